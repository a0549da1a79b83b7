"""The odd pieces of our own, which fill the same hooks as anybody's plugin. One module, one piece.

A builtin plugin imports engine.layers, engine.weights and engine.models; nothing imports it but the manager.
"""

COMPONENTS: dict[str, tuple[str, str]] = {
    "block_sparse": ("mixer", "block_sparse"),
    "compressed_groups": ("cache", "compressed_groups"),
    "first_rows": ("layout operation", "first_rows"),
    "interleave_queries": ("layout operation", "interleave_queries"),
    "join_shards": ("layout operation", "join_shards"),
    "ngram_embedding": ("embedding", "ngram"),
    "ngram_values": ("injection", "ngram_values"),
    "normed_residual": ("block", "normed_residual"),
    "parallel_moe": ("block", "parallel_moe"),
    "plain_muse_spark": ("fallbacks", "plain_muse_spark"),
    "shared_row": ("layout operation", "shared_row"),
    "shortcut": ("block", "shortcut"),
    "sparsemixer": ("selection", "sparsemixer"),
}
"""By module, the kind and the name of its piece, so that names are known before MLX is imported."""
