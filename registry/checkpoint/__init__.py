"""A checkpoint's files without MLX: config, headers, index, hub, strict JSON, and the sizes they bear out.

Imports registry.spec, catalog and resolve; quantization, checks, cli and the engine may import it.
"""
