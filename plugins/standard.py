"""The engine's standard components, which family files name as they name a plugin's.

They live in the engine and fill the same hooks, so that a plugin may override one of them knowingly.
"""

from __future__ import annotations

from typing import Final

_MIXERS = "mlx_experts.engine.layers.mixers"
COMPONENTS: Final[dict[str, tuple[str, str]]] = {
    **{
        f"{_MIXERS}.{name}": ("mixer", name)
        for name in (
            "adjusted",
            "block_mean",
            "compressed",
            "convolved",
            "dsa",
            "gated_delta",
            "kimi_delta",
            "lightning",
            "mamba1",
            "mamba2",
            "mla",
            "relative",
            "routed",
            "short_conv",
        )
    },
    **{
        f"mlx_experts.engine.layers.routers.{name}": ("router", name)
        for name in ("recurrent", "shared_sink", "token_table")
    },
    "mlx_experts.engine.models.residual_layer": ("block", "residual"),
    "mlx_experts.engine.weights.kv_absorb": ("layout operation", "absorb_kv"),
}
"""By module, the kind and the name of its component, so that names are known before MLX is imported."""
