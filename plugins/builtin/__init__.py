"""The odd pieces of our own, which fill the same hooks as anybody's plugin. One module, one piece.

A builtin plugin imports engine.layers, engine.weights and engine.models; nothing imports it but the manager.
"""

COMPONENTS: dict[str, tuple[str, str]] = {
    "attention.fourier": ("mixer", "fourier"),
    "attention.kept_prompt": ("mixer", "kept_prompt"),
    "attention.routed_values": ("mixer", "routed_values"),
    "attention.shared_query": ("mixer", "shared_query"),
    "attention.tempered": ("mixer", "tempered"),
    "block_sparse": ("mixer", "block_sparse"),
    "compressed_groups": ("cache", "compressed_groups"),
    "copy_to_layers": ("layout operation", "copy_to_layers"),
    "first_rows": ("layout operation", "first_rows"),
    "interleave_queries": ("layout operation", "interleave_queries"),
    "join_shards": ("layout operation", "join_shards"),
    "layers.adjunct_experts": ("block", "adjunct_experts"),
    "layers.dense_residual": ("block", "dense_residual"),
    "layers.early_router": ("block", "early_router"),
    "layers.normed_stream": ("block", "normed_stream"),
    "ngram_embedding": ("embedding", "ngram"),
    "ngram_values": ("injection", "ngram_values"),
    "normed_residual": ("block", "normed_residual"),
    "parallel_moe": ("block", "parallel_moe"),
    "plain_muse_spark": ("fallbacks", "plain_muse_spark"),
    "shared_row": ("layout operation", "shared_row"),
    "shortcut": ("block", "shortcut"),
    "sparsemixer": ("selection", "sparsemixer"),
    "stack_numbered": ("layout operation", "stack_numbered"),
}
"""By module, the kind and the name of its piece, so that names are known before MLX is imported."""
