"""Our own odd pieces, filling the same hooks as anybody's plugin. One module, one piece."""

OFFERS: dict[str, tuple[str, str]] = {
    "absorb": ("layout operation", "absorb_kv"),
    "block_sparse": ("mixer", "block_sparse"),
    "compressed_groups": ("cache", "compressed_groups"),
    "dsa": ("mixer", "dsa"),
    "gated_delta": ("mixer", "gated_delta"),
    "kimi_delta": ("mixer", "kimi_delta"),
    "lightning": ("mixer", "lightning"),
    "mamba1": ("mixer", "mamba1"),
    "mamba2": ("mixer", "mamba2"),
    "mla": ("mixer", "mla"),
    "ngram_embedding": ("embedding", "ngram"),
    "normed_residual": ("block", "normed_residual"),
    "parallel_moe": ("block", "parallel_moe"),
    "plain_muse_spark": ("stand-ins", "plain_muse_spark"),
    "shared_row": ("layout operation", "shared_row"),
    "short_conv": ("mixer", "short_conv"),
    "shortcut": ("block", "shortcut"),
    "sparsemixer": ("selection", "sparsemixer"),
}
"""By module, the kind and the name of its piece, so that names are known before MLX is imported."""
