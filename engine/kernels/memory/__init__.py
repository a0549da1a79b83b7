"""Experts that stay in the checkpoint's files: slots for some of them, filled as they are picked.

Imports engine.kernels; engine.dispatch, engine.layers and engine.weights may import it.
"""
