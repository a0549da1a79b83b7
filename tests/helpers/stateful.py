"""Which families route by more than a token's own row, so that no block of theirs can be asked alone."""

from __future__ import annotations

from mlx_experts.engine.models.known_families import catalog

# A router that hands its memory on to the next layer's, and one that weighs the shared experts too.
HANDED_ON, WITH_SHARED = "recurrent", "shared_sink"


def hands_on(name: str) -> bool:
    """Whether a layer's picks need what the layers before have left."""
    return catalog().load(name).moe.router.kind == HANDED_ON


def routes_alone(name: str) -> bool:
    """Whether a block's router gives nothing but the picks of a row and their weights."""
    return catalog().load(name).moe.router.kind not in (HANDED_ON, WITH_SHARED)
