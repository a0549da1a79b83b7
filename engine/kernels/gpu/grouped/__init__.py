"""Experts for many tokens on CUDA: tokens grouped by expert, packed weights decoded within the product.

Imports the texts and helpers of ``gpu``; dispatch may import it.
"""
