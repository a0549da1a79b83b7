"""What a bound on the length of prompt caches does to a model's caches, in words."""

from __future__ import annotations

from collections import Counter
from typing import Any

import mlx.nn as nn
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, RotatingKVCache, make_prompt_cache

from mlx_experts.engine.models.base import LanguageModel
from mlx_experts.registry.errors import SettingError

# Tokens at the start that ``mlx_lm.models.cache.make_prompt_cache`` keeps where it bounds caches.
KEPT = 4


def unbounded(model: nn.Module, max_kv_size: int | None) -> str | None:
    """Why ``max_kv_size`` does not bound a model's caches, or None where it does or nobody asks for it.

    mlx-lm bounds the caches of a model whose layers all keep plain keys and values. Where some keep a
    window, a state or several caches, the model makes them itself, there as here.

    Raises:
        SettingError: the bound leaves no place beside the tokens that are always kept.
    """
    if max_kv_size is not None and max_kv_size <= KEPT:
        raise SettingError(
            "a prompt cache of this size holds nothing beside the first tokens, which are always kept",
            where="max_kv_size",
            expected=f"more than {KEPT}",
            found=str(max_kv_size),
        )
    if max_kv_size is None or not isinstance(model, LanguageModel):
        return None
    made = make_prompt_cache(model, max_kv_size)
    if all(type(cache) is RotatingKVCache and cache.max_size == max_kv_size for cache in made):
        return None
    kinds = Counter(_words(cache) for cache in made)
    kept = ", ".join(f"{count} with {words}" for words, count in kinds.items())
    return f"max_kv_size {max_kv_size} does not bound the caches of this model, which makes its own: {kept}"


def _words(cache: Any) -> str:
    if isinstance(cache, RotatingKVCache):
        return f"a window of {cache.max_size} tokens"
    if isinstance(cache, ArraysCache):
        return "a state of fixed size"
    if isinstance(cache, CacheList):
        return " beside ".join(_words(each) for each in cache.caches)
    return "every token" if type(cache) is KVCache else f"a {type(cache).__name__}"
