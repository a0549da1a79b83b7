"""The modules that a decoder is made of: attention, rope, norms, MLPs, router, experts.

Imports engine.kernels and engine.dispatch; weights, models, loading, tools and plugins may import it.
"""
