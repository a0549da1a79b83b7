"""What `registry draft` runs: facts of tensors and config, the base that they are nearest to, and questions.

`facts` and `evidence` know nothing of MLX; `draft` tries candidates with engine.tools.inspect. Nothing but
registry.cli and the tests imports this room.
"""
