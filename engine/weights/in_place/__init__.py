"""Where the experts of a checkpoint lie in its files, and the plan of a memory budget for them.

Imports engine.weights; engine.loading may import it.
"""
