"""Our own odd pieces, filling the same hooks as anybody's plugin. One module, one piece."""

MODULES: tuple[str, ...] = (
    "absorb",
    "block_sparse",
    "compressed_groups",
    "dsa",
    "gated_delta",
    "kimi_delta",
    "lightning",
    "mamba1",
    "mamba2",
    "mla",
    "ngram_embedding",
    "normed_residual",
    "parallel_moe",
    "shared_row",
    "short_conv",
    "shortcut",
    "sparsemixer",
)
