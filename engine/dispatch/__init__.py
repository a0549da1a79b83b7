"""Which path a call takes, why, and the count of it: eligibility, verification, policy, trace, tuning.

Imports engine.kernels; layers, models, loading and tools may import it.
"""
