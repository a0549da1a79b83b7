"""A usual layer's call for one token on the CPU in one piece, where its kernels are decided.

What the call reads is held by identity and by address: whatever is replaced, or changed in place, makes it
anew, and where a part of it is not decided for a kernel the layer goes another way.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import is_
from typing import TYPE_CHECKING, Any

import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import KVCache

from mlx_experts.engine.dispatch.trace import Tallies
from mlx_experts.engine.kernels.cpu.router import Routed
from mlx_experts.engine.kernels.expert_weights import ARRAY_NAMES
from mlx_experts.engine.layers.decode.cache_rows import next_place
from mlx_experts.engine.layers.linear import is_linear
from mlx_experts.engine.layers.moe import ExpertsOnRow

if TYPE_CHECKING:
    from mlx_experts.engine.kernels.cpu.layer import LayerCall

# A root-mean-square norm with its centre and epsilon.
NormParts = tuple[Any, np.float32, np.float32]


@dataclass(frozen=True, eq=False)
class Shape:
    """Heads h and g of queries and of keys, widths of a key and of a value, and the factor on logits."""

    heads: int
    groups: int
    width: int
    depth: int
    scale: np.float32


@dataclass(frozen=True, eq=False)
class _Held:
    """A call, and what it was made of.

    Args:
        arrays: modules, names in them, and what was there.
        settings: modules, their attributes, and those values.
        experts: what the experts' dispatch had decided.
    """

    call: LayerCall
    tallies: Tallies
    arrays: tuple[tuple[Any, ...], ...]
    settings: tuple[tuple[Any, ...], ...]
    experts: Any

    def stands(self) -> bool:
        """Whether nothing has been replaced, switched or moved since."""
        holders, names, members = self.arrays
        modules, attributes, values = self.settings
        return (
            all(map(is_, map(dict.get, holders, names), members))
            and all(map(is_, map(getattr, modules, attributes), values))
            and self.call.stands
        )


class WholeLayer:
    """One layer's call in one piece; see :func:`whole_layer`."""

    def __init__(
        self, norms: tuple[NormParts, ...], linears: tuple[Any, ...], shape: Shape, feed: ExpertsOnRow | None
    ) -> None:
        self._norms, self._linears, self._shape, self._feed = norms, linears, shape, feed
        self._held: _Held | None = None

    def __call__(
        self, x: np.ndarray, turn: tuple[np.ndarray, np.ndarray, bool], cache: KVCache
    ) -> np.ndarray | None:
        """A row [1, D] to the row behind the layer, or to the residual and the normed row [2, D].

        None, and nothing is counted or written, where this form cannot compute the call.

        Args:
            turn: cosines and sines of the position, and whether neighbours are turned together.
        """
        feed, shape = self._feed, self._shape
        experts = None if feed is None else feed.decided()
        held = self._held
        if held is None or held.experts is not experts or not held.stands():
            held = self._held = self._made(turn, experts)
            if held is None:
                return None
        place = next_place(cache, shape.groups, shape.width, shape.depth)
        if place is None:
            return None
        cos, sin, _ = turn
        behind = held.call(x, cos, sin, place)
        cache.offset += 1
        held.tallies.add()
        return behind

    def _made(self, turn: tuple[np.ndarray, np.ndarray, bool], experts: Any) -> _Held | None:
        """The call for what is there now, or None where a part has no kernel."""
        found = [module._dispatch.decided(module) for module in self._linears]
        if None in found:
            return None
        from mlx_experts.engine.kernels.cpu.layer import AttentionParts, ExpertParts, LayerCall, Norm

        first, second, q_norm, k_norm = (
            Norm(module.get("weight"), centre, eps) for module, centre, eps in self._norms
        )
        q, k, v, o = (kernel for kernel, _ in found)
        s = self._shape
        attention = AttentionParts(
            first, q, k, v, q_norm, k_norm, o, second, s.heads, s.groups, s.width, s.depth, s.scale
        )
        tallies = [tally for _, tally in found]
        modules, places = list(self._linears), [(module, "weight") for module, *_ in self._norms]
        parts = None
        if experts is not None and self._feed is not None:
            kernel, tally = experts
            matrix, routed, bias = self._feed.router.in_memory()
            decided = matrix._dispatch.decided(matrix) if is_linear(matrix) else None
            layout = kernel.alone
            if isinstance(routed, Routed) and decided is not None and layout is not None:
                tilt = None if bias is None or not routed.biased else bias[0][bias[1]]
                parts = ExpertParts(decided[0], routed, tilt, layout, kernel.arrays)
                tallies += [decided[1], tally]
                modules.append(matrix)
                places += [] if bias is None else [bias]
        vectors = [each for each in map(dict.get, *zip(*places, strict=True)) if each is not None]
        if not all(memoryview(vector).c_contiguous for vector in vectors):  # type: ignore[arg-type]
            return None  # A view into a larger array has gaps.
        places += [(module, name) for module in modules for name in ARRAY_NAMES]
        holders, names = zip(*places, strict=True)
        set_ = [(module, name) for module in modules for name in ("_dispatch", "_training")]
        owners, attributes = zip(*set_, strict=True)
        return _Held(
            LayerCall(attention, parts, turn[0].size, turn[2]),
            Tallies(tallies),
            (holders, names, tuple(map(dict.get, holders, names))),
            (owners, attributes, tuple(map(getattr, owners, attributes))),
            experts,
        )


def whole_layer(
    norms: tuple[NormParts, ...], linears: tuple[nn.Module, ...], shape: Shape, feed: Any
) -> WholeLayer | None:
    """A layer's call in one piece, or None where a matrix is no linear layer of this package.

    Args:
        norms: before attention, behind it, of the queries' heads and of the keys'.
        linears: to queries, keys and values, and from the heads' outputs.
        feed: experts as :class:`ExpertsOnRow`, which become a part of the call; anything else does not.
    """
    if not all(map(is_linear, linears)):
        return None
    return WholeLayer(norms, linears, shape, feed if isinstance(feed, ExpertsOnRow) else None)
