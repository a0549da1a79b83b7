"""The public ways to get a model and text from it.

Imports engine.models and engine.weights; tools and api may import it.
"""
