"""What a checkpoint declares of its quantisation: methods, formats, and the format of each module.

Imports registry.checkpoint; checks, cli and the engine may import it.
"""
