"""Kernels of the pieces of a layer around its experts, for one token row.

Products of the row, turned heads, routing. CUDA and Metal share the bodies. May be imported by engine.kernels
and engine.dispatch.
"""
