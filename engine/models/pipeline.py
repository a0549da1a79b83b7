"""Pipeline parallelism: each rank runs some of the layers, and the hidden states go from rank to rank.

As mlx-lm's ``PipelineMixin`` (mlx_lm/models/pipeline.py): the last rank runs the first layers and rank 0 the
last ones, whose output every rank gets. Embedding, final norm and head are whole on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, CacheList

from mlx_experts.registry.errors import SettingError

Group = mx.distributed.Group


@dataclass(frozen=True, eq=False)
class Stage:
    """The layers of one rank.

    Args:
        group: the ranks.
        start: first layer of this rank.
        end: the layer after its last one.
    """

    group: Group
    start: int
    end: int

    def receive(self, h: mx.array) -> mx.array:
        """The hidden states [B, L, D] from the rank before, whose layers stand before these."""
        rank = self.group.rank()
        return h if rank == self.group.size() - 1 else mx.distributed.recv_like(h, rank + 1, group=self.group)

    def pass_on(self, h: mx.array, caches: Sequence[Any]) -> mx.array:
        """Send the hidden states to the rank after this one; the last layer's output, on every rank."""
        rank = self.group.rank()
        if rank != 0:
            h = mx.distributed.send(h, rank - 1, group=self.group)
            held = [cache for cache in caches if cache is not None]
            if held:
                # Whoever evaluates the caches alone, as prefilling does, sends as well.
                _tie(held[-1], h)
        return mx.distributed.all_gather(h, group=self.group)[: h.shape[0]]


def _tie(cache: Any, h: mx.array) -> None:
    """Make a cache's arrays depend on ``h``."""
    if isinstance(cache, CacheList):
        # The first holds keys and values; what stands beside it may already wait for it.
        _tie(cache.caches[0], h)
    elif isinstance(cache, ArraysCache):
        slot = next(i for i, each in enumerate(cache.cache) if each is not None)
        cache.cache[slot] = mx.depends(cache.cache[slot], h)
    elif isinstance(cache.keys, mx.array):
        cache.keys = mx.depends(cache.keys, h)
    else:
        # A quantised cache holds three arrays.
        cache.keys = (mx.depends(cache.keys[0], h), *cache.keys[1:])


def plan_stages(
    sources: Sequence[int | None], keeps: Sequence[bool], ranks: int, split: Sequence[int] | None = None
) -> list[int]:
    """How many layers each rank runs, from rank 0, which runs the last ones.

    Args:
        sources: for each layer, the earlier layer whose keys or picks it reads, or None.
        keeps: for each layer, whether it keeps a cache.
        ranks: how many ranks there are.
        split: the counts to use; None for the most even ones that the sources allow.

    Raises:
        SettingError: no such split exists, or the given one does not fit.
    """
    count = len(sources)
    if split is not None:
        if len(split) != ranks or sum(split) != count or min(split) <= 0:
            raise SettingError(
                "the split does not fit the layers",
                expected=f"{ranks} counts above 0 that sum to {count}",
                found=str(list(split)),
            )
        starts = [count - sum(split[: rank + 1]) for rank in range(ranks)]
    else:
        starts = _even(sources, ranks)
    for start in starts:
        if start and not _free(sources, start):
            raise _bound_layers(sources, ranks)
    ends = [count, *starts[:-1]]
    for start, end in zip(starts, ends, strict=True):
        if not any(keeps[start:end]):
            raise SettingError(
                f"layers {start} to {end - 1} keep no cache, so nothing would make their rank send",
                hint="use tensor parallelism, or another split",
            )
    return [end - start for start, end in zip(starts, ends, strict=True)]


def _even(sources: Sequence[int | None], ranks: int) -> list[int]:
    """First layers from rank 0, each at the allowed place nearest to an even split."""
    count = len(sources)
    allowed = [i for i in range(1, count) if _free(sources, i)]
    if len(allowed) < ranks - 1:
        raise _bound_layers(sources, ranks)
    base, extra = divmod(count, ranks)
    starts, end = [], count
    for rank in range(ranks - 1):
        wanted = end - base - (1 if rank < extra else 0)
        # Enough places must be left for the ranks after this one.
        left = [i for i in allowed if i < end][ranks - 2 - rank :]
        if not left:
            raise _bound_layers(sources, ranks)
        end = min(left, key=lambda i: abs(i - wanted))
        starts.append(end)
    return [*starts, 0]


def _free(sources: Sequence[int | None], at: int) -> bool:
    """Whether no layer from ``at`` on reads what an earlier one leaves."""
    return all(source is None or source >= at for source in sources[at:])


def _bound_layers(sources: Sequence[int | None], ranks: int) -> SettingError:
    reading = [f"layer {i} reads layer {source}" for i, source in enumerate(sources) if source is not None]
    return SettingError(
        "the layers cannot be spread over the ranks",
        expected=f"{ranks} runs of layers that read nothing of each other",
        found="; ".join(reading[:3]) or f"{len(sources)} layers",
        hint="use tensor parallelism, which spreads every layer",
    )
