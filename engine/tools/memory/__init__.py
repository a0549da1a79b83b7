"""Tools for models larger than memory: what a process takes, and experts that can be read in place.

Imports engine.loading; registry.cli may import it.
"""
