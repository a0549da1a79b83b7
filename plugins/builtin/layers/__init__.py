"""Decoder layers that only one family has, each in a module of its own.

Imports engine.layers and registry.spec; the standard plugins load what lies here.
"""
