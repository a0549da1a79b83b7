"""The decoder of a plan, the language model around it, and mlx-lm's own models with these experts inside.

Imports engine.layers and engine.weights; loading and tools may import it.
"""
