"""Builds MLX models from family descriptions."""
