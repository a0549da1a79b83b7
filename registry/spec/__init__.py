"""What a family file may say: one section a module, and the words that describe it.

Imports registry.errors alone; every other room of the registry, the engine and the plugins may import it.
"""
