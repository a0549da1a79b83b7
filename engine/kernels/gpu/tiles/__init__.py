"""The tensor-core launches of a few tokens' experts on CUDA, in tiles of 16 rows: forms, cuts, texts.

Imports the texts and helpers of ``gpu``; the rest of ``gpu``, its pieces and ``grouped`` may import it.
"""
