"""The kernels that numba compiles for the CPU: experts, rows, router.

Imports engine.kernels; engine.dispatch may import it.
"""
