"""Routers that read more than a layer's input: token ids, a memory across layers, shared experts' scores.

Each is a plain object like `engine.layers.router.Router`, registered by the `router.kind` that families name.
Imported by engine/layers and plugins; imports nothing above engine/layers.
"""
