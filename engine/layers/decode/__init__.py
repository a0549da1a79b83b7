"""One token through the decoder as compiled pieces: what lies between two cache writes is one function.

Imports engine.layers, dispatch and kernels; engine.models may import it.
"""
