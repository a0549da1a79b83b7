"""Residual forms: what a decoder layer reads its branches from, and how it writes them back.

The standard sum stands in the decoder layer itself; what lives here is named by a family's
`block.options.residual`. Imported by engine/models; imports nothing above engine/layers.
"""
