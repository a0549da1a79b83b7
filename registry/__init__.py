"""The catalogue of families and everything that can be known without MLX."""
