"""What `registry check --device` runs: this machine's kernels against float32 truth, and their times.

`combinations` lists what is tried and `pieces` has the kernels beside the experts'; `workers` spreads both
over processes; `report` says what came out. Nothing but registry.cli and the tests imports this room.
"""
