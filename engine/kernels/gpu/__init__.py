"""The kernels for CUDA and Metal: texts, and how a launch is put together from them.

Imports engine.kernels; engine.dispatch may import it.
"""
