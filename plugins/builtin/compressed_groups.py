"""The prompt cache of a window and compressed groups of keys, in a form that can be saved and loaded."""

from __future__ import annotations

from typing import Any

from mlx_lm.models import cache as mlx_lm_caches
from mlx_lm.models.deepseek_v41 import LayerCache

from mlx_experts.plugins.hookspecs import hookimpl

_HELD = ("window", "compress_kv", "index_k", "pending_kv", "pending_gate", "offset", "window_size")


class CompressedGroupsCache(LayerCache):  # type: ignore[misc]
    """mlx-lm's cache of one DeepSeek-V4.1 layer, whose state is all that it holds.

    mlx-lm's own leaves the window's size out of its state and cannot be made from one. B rows, D key width:
    the window [B, at most ``window_size``, D], the closed groups [B, groups, D] with their index keys
    [B, groups, index width], and the rows of the open group [B, fewer than the ratio, D], each None until
    something stands there.
    """

    @property
    def state(self) -> tuple[Any, ...]:
        """The arrays, the tokens seen, and the window's size in tokens."""
        return tuple(getattr(self, name) for name in _HELD)

    @state.setter
    def state(self, values: tuple[Any, ...]) -> None:
        for name, value in zip(_HELD, values, strict=True):
            setattr(self, name, value)

    @classmethod
    def from_state(cls, state: tuple[Any, ...]) -> CompressedGroupsCache:
        """The cache that had this state; ``load_prompt_cache`` calls it."""
        made = cls(0)
        made.state = state
        return made

    @classmethod
    def instead_of(cls, theirs: LayerCache) -> CompressedGroupsCache:
        """A cache that takes the place of an empty one of mlx-lm's."""
        return cls(theirs.window_size)


# A saved cache names its classes, and `load_prompt_cache` knows those alone that stand in its own module:
# mlx-lm 0.32 has no other way to tell it of one.
setattr(mlx_lm_caches, CompressedGroupsCache.__name__, CompressedGroupsCache)


@hookimpl
def register_caches() -> dict[str, Any]:
    """The cache `compressed_groups`."""
    return {"compressed_groups": CompressedGroupsCache.instead_of}
