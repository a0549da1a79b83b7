"""From a family file and a config.json to a plan: references read, layers listed, values held to each other.

Imports registry.spec and registry.catalog; checkpoint, checks, cli and the engine may import it.
"""
