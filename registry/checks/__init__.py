"""What `registry check` knows without MLX: names, coverage of the neighbours, evidence of what ran.

Imports the rooms above it and plugins.manager; cli may import it.
"""
