"""Finding and reading family files: the catalogue, the strict YAML reader, errors in the file's words.

Imports registry.spec; resolve, checkpoint, checks, cli and the engine may import it.
"""
