"""The field's standard mixers beside grouped-query attention: latent, linear, state-space, convolution.

Imports engine.layers; models reaches it by the names in plugins.standard.
"""
