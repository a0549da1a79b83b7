"""A checkpoint's tensors on their way into the module tree, and back: read, convert, dequantize, audit.

Imports engine.layers at most; models, loading, tools and plugins may import it.
"""
