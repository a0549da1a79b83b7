"""Machine code that multiplies packed weights on the CPU, written as LLVM vectors: by row, by tile, by unit.

Imports engine.kernels and engine.kernels.cpu.native; engine.kernels.cpu may import it.
"""
