"""What the commands run: inspect, draft, parity, checks of families and devices, benchmarks.

Imports every other room of the engine; registry.cli imports it when a verb is called.
"""
