"""Decoder layers that only one family has, each in a module of its own."""
