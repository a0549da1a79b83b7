"""Attention over the sums of blocks of layers in place of a residual, and layers that run several times.

The sources are transformers' ``models/inkling2/modeling_inkling2.py`` (BlockAttentionResidual) and
``models/inkling2_loop/modeling_inkling2_loop.py``. Legend: B batch, L tokens, D model width, S finished
blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import mlx.core as mx
import mlx.nn as nn
from pydantic import Field

from mlx_experts.engine.layers.module_tree import find, place
from mlx_experts.engine.layers.residual.base import Branch, ResidualForm, Site
from mlx_experts.registry.errors import ConfigError
from mlx_experts.registry.resolve.planner import LayerPlan, Plan
from mlx_experts.registry.spec.values import Count, ModulePath, Positive, Spec, Times, Width

_QUERY_EPS = 1e-6
_INPUTS = ("q", "k", "v")


class LoopOptions(Spec):
    """Options of layers that run several times."""

    first: Count = Field(description="The first such layer.")
    stop: Count = Field(description="The layer past the last one.")
    passes: Times = Field(description="How often they run.")
    rank: Width = Field(description="Width that the gates on messages go through.")
    messages: ModulePath = Field(description="Module of the queries that read messages, in the decoder.")


class BlocksOptions(Spec):
    """Options of attention over block sums."""

    kind: Literal["blocks"] = Field(description="Attention over the sums of blocks of layers.")
    layers: Width = Field(description="Layers of a block.")
    apart: list[str] = Field(description="Layer types whose query, key and value inputs are read apart.")
    mixer: ModulePath = Field(description="Module of the query before the mixer, in the layer.")
    mlp: ModulePath = Field(description="Module of the query before the MLP, in the layer.")
    head: ModulePath = Field(description="Module of the query behind the last layer, in the decoder.")
    eps: Positive = Field(description="Epsilon of the norms of what is read.")
    loop: LoopOptions | None = Field(None, description="Layers that run several times.")


@dataclass(frozen=True)
class Blocks:
    """The stream: the open block's sum [B, L, D], the closed ones, and messages of a pass before, or None.

    Args:
        messages: [B, L, 4, D], for the inputs of query, key, value and MLP.
    """

    open: mx.array
    closed: tuple[mx.array, ...] = ()
    messages: mx.array | None = None


def attend(query: mx.array, stream: Blocks) -> mx.array:
    """What ``query`` [n, D] reads of all block sums, [B, L, n, D] in float32; values are the normed sums."""
    sums = mx.stack([*stream.closed, stream.open], axis=-2).astype(mx.float32)
    sums = mx.fast.rms_norm(sums, None, _QUERY_EPS)
    scores = query.astype(mx.float32) @ sums.swapaxes(-1, -2) * query.shape[-1] ** -0.5
    return mx.softmax(scores, axis=-1, precise=True) @ sums


class Query(Site):
    """Learned queries over block sums."""

    float32_leaves: ClassVar[tuple[str, ...]] = ("query",)

    def __init__(self, shape: Sequence[int]) -> None:
        super().__init__()
        self.query = mx.zeros(tuple(shape))

    def __call__(self, stream: Blocks) -> mx.array:
        """What the one query reads, [B, L, D] in float32."""
        return attend(self.query.reshape(-1, self.query.shape[-1]), stream)[..., 0, :]


class MessageGate(Site):
    """``(1 - forget) * h + gain * message``, both gates of h and the message through a narrow width."""

    float32_leaves: ClassVar[tuple[str, ...]] = ("forget_gate_proj", "message_gate_proj")

    def __init__(self, width: int, rank: int, eps: float) -> None:
        super().__init__()
        self.down_proj = nn.Linear(2 * width, rank, bias=False)
        self.forget_gate_proj = nn.Linear(rank, width, bias=False)
        self.message_gate_proj = nn.Linear(rank, width, bias=False)
        self._eps = eps

    def __call__(self, h: mx.array, message: mx.array) -> mx.array:
        """``h`` and ``message`` [B, L, D] to [B, L, D] in float32."""
        h, message = h.astype(mx.float32), message.astype(mx.float32)
        both = mx.concatenate([mx.fast.rms_norm(t, None, self._eps) for t in (h, message)], axis=-1)
        narrow = self.down_proj(both.astype(self.forget_gate_proj.weight.dtype)).astype(mx.float32)
        return (1 - mx.tanh(self.forget_gate_proj(narrow))) * h + mx.tanh(
            self.message_gate_proj(narrow)
        ) * message


class BlockSite(Site):
    """Reads a branch's input, or the three inputs of a mixer, and adds the branch to the open block.

    Args:
        spec: the form's options.
        branch: which of the layer's two.
        index: index of the layer.
        apart: query, key and value inputs have a query and a norm each.
        width: D.
        rank: width of the gates on messages; 0 for none.
    """

    float32_leaves: ClassVar[tuple[str, ...]] = ("query",)

    def __init__(
        self, spec: BlocksOptions, branch: Branch, index: int, apart: bool, width: int, rank: int
    ) -> None:
        super().__init__()
        self._apart, self._reads = apart, branch == "mlp" or index > 0
        self._closes = branch == "mixer" and index % spec.layers == 0
        self._mixes, self._looped = branch == "mixer", rank > 0
        self.inputs = len(_INPUTS) if apart or (self._mixes and rank) else 1
        if self._reads:
            self.query = mx.zeros((3, width) if apart else (width,))
        if apart:
            self.norms = [nn.RMSNorm(width, eps=spec.eps) for _ in _INPUTS]
        else:
            self.norm = nn.RMSNorm(width, eps=spec.eps)
        if rank:
            self.gates = [MessageGate(width, rank, spec.eps) for _ in (_INPUTS if self._mixes else "m")]

    def read(self, stream: Blocks) -> tuple[Any, Any]:
        """The branch's input [B, L, D], or those of query, key and value."""
        dtype, messages = stream.open.dtype, stream.messages
        if not self._reads:
            parts = [stream.open] * (3 if self._apart else 1)
        else:
            query = self.query.reshape(-1, self.query.shape[-1])
            found = attend(query, stream)
            parts = [found[..., i, :] for i in range(query.shape[0])]
        if messages is not None and self._looped:
            first = 0 if self._mixes else len(_INPUTS)
            parts = parts * len(self.gates) if len(parts) == 1 else parts
            parts = [
                gate(part, messages[..., first + i, :])
                for i, (gate, part) in enumerate(zip(self.gates, parts, strict=True))
            ]
        norms = self.norms if self._apart else [self.norm] * len(parts)
        normed = [norm(part).astype(dtype) for norm, part in zip(norms, parts, strict=True)]
        return (tuple(normed) if len(normed) > 1 else normed[0]), None

    def write(self, stream: Blocks, kept: Any, branch: mx.array) -> Blocks:
        """The stream with the branch added to the open block, or opening a new one."""
        if self._closes:
            return Blocks(branch, (*stream.closed, stream.open), stream.messages)
        added = stream.open.astype(mx.float32) + branch.astype(mx.float32)
        return Blocks(added.astype(branch.dtype), stream.closed, stream.messages)


class BlockAttention(ResidualForm):
    """Every branch reads an attention over block sums; some layers may run several times.

    Args:
        spec: the form's options.
        plan: the model's plan.

    Raises:
        ConfigError: the looped layers are no whole blocks behind the first one, or are not in the model.
    """

    def __init__(self, spec: BlocksOptions, plan: Plan) -> None:
        self.spec, self.width, loop = spec, plan.sizes.hidden_size, spec.loop
        if loop is not None:
            inside = 0 < loop.first < loop.stop <= plan.sizes.num_layers
            if not inside or loop.first % spec.layers or loop.stop % spec.layers:
                raise ConfigError(
                    "the layers that run several times are no whole blocks of layers behind the first",
                    where="config.json",
                    expected=f"multiples of {spec.layers} between 1 and {plan.sizes.num_layers}",
                    found=f"{loop.first} to {loop.stop}",
                )

    def _looped(self, index: int) -> bool:
        loop = self.spec.loop
        return loop is not None and loop.first <= index < loop.stop

    def build(self, decoder: nn.Module) -> None:
        """Place the last query, and the queries for messages."""
        place(decoder, self.spec.head, Query((self.width,)))
        if (loop := self.spec.loop) is not None:
            place(decoder, loop.messages, Query((loop.stop - loop.first, len(_INPUTS) + 1, self.width)))

    def begin(self, decoder: nn.Module, h: mx.array) -> Blocks:
        """Embeddings [B, L, D] open the first block."""
        return Blocks(h)

    def end(self, decoder: nn.Module, stream: Blocks) -> mx.array:
        """What the last query reads, in the embeddings' type."""
        read: mx.array = find(decoder, self.spec.head)(stream)
        return read.astype(stream.open.dtype)

    def site(self, layer: LayerPlan, branch: Branch) -> tuple[str, Site]:
        """The queries, norms and gates of a branch."""
        loop = self.spec.loop
        apart = branch == "mixer" and layer.type in self.spec.apart
        rank = loop.rank if loop is not None and self._looped(layer.index) else 0
        site = BlockSite(self.spec, branch, layer.index, apart, self.width, rank)
        return self.spec.mixer if branch == "mixer" else self.spec.mlp, site

    def passes(self, index: int) -> int:
        """How often a layer runs."""
        loop = self.spec.loop
        return loop.passes if loop is not None and self._looped(index) else 1

    def run(
        self, decoder: nn.Module, count: int, stream: Blocks, step: Callable[[int, Any, int], Any]
    ) -> Blocks:
        """All layers; later passes start where the first did and read messages of the pass before."""
        loop = self.spec.loop
        if loop is None:
            return super().run(decoder, count, stream, step)  # type: ignore[no-any-return]
        for index in range(loop.first):
            stream = step(index, stream, 0)
        start = stream
        for index in range(loop.first, loop.stop):
            stream = step(index, stream, 0)
        queries = find(decoder, loop.messages).query
        for number in range(1, loop.passes):
            # The block that the first layer of the pass closed was open before it.
            before = Blocks(stream.open, stream.closed[len(start.closed) + 1 :])
            stream = start
            for index in range(loop.first, loop.stop):
                messages = attend(queries[index - loop.first], before)
                stream = step(index, Blocks(stream.open, stream.closed, messages), number)
            stream = Blocks(stream.open, stream.closed)
        for index in range(loop.stop, count):
            stream = step(index, stream, 0)
        return stream
