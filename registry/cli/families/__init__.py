"""Verbs about family files: one verb a file.

Each imports what it needs when it is called; only registry.cli imports them.
"""
