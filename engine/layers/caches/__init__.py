"""Caches of layers that keep more than keys and values: pooled keys, token history.

Imports engine.layers; its mixers import it.
"""
