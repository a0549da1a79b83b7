"""Our own odd pieces, filling the same hooks as anybody's plugin. One module, one piece."""

MODULES: tuple[str, ...] = (
    "absorb",
    "gated_delta",
    "mamba2",
    "mla",
    "short_conv",
    "sparsemixer",
)
