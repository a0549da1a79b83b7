"""Reads an expert container of mlx-lm into plain request and the arrays behind them.

Only the containers that mlx-lm's ``switch_layers`` defines are read. Anything else in a projection's place
(an adapter, a plugin's own module) makes the container "adapted", and the fused kernels leave it alone.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from mlx_experts.engine.kernels.memory.slots import ExpertSlots, SlottedExperts
from mlx_experts.engine.kernels.request import (
    Activation,
    Device,
    Format,
    KernelRequest,
    Projection,
    SharedRequest,
)

ARRAY_NAMES = ("weight", "scales", "biases", "bias", "global_scale")


@dataclass(frozen=True, eq=False)
class Stack:
    """One stack of expert matrices: its request and its arrays as MLX stores them.

    A dense layer is a stack of one whose arrays lack the axis E.

    Args:
        weight: ``[E, rows, cols]`` when plain, else packed ``[E, rows, cols * bits / 32]`` uint32.
        scales: ``[E, rows, cols / group_size]``; None when plain.
        biases: like ``scales``, for affine only.
        bias: ``[E, rows]`` added to the product, or None.
        global_scale: ``[E]`` float32, or None.
        first: the row of the arrays at which this matrix begins (gate and up may be halves of one).
    """

    projection: Projection
    weight: mx.array
    scales: mx.array | None = None
    biases: mx.array | None = None
    bias: mx.array | None = None
    global_scale: mx.array | None = None
    first: int = 0

    @property
    def count(self) -> int:
        """E, the matrices in the stack."""
        return self.weight.shape[0] if self.weight.ndim == 3 else 1

    def arrays(self) -> list[mx.array]:
        """The arrays that exist, in the order of the fields."""
        held = (self.weight, self.scales, self.biases, self.bias, self.global_scale)
        return [a for a in held if a is not None]


@dataclass(frozen=True, eq=False)
class ExpertWeights:
    """The stacks of one layer and the activation between them; ``gate`` is None when ungated.

    With ``slots`` the stacks are of slots, and callers name experts.
    """

    gate: Stack | None
    up: Stack
    down: Stack
    activation: Activation
    shared: SharedExpertWeights | None = None
    slots: ExpertSlots | None = None

    @property
    def count(self) -> int:
        """E, the experts that callers may name."""
        return self.up.count if self.slots is None else self.slots.experts

    def stacks(self) -> list[Stack]:
        """Gate (when there is one), up, down; without the shared expert's."""
        return [s for s in (self.gate, self.up, self.down) if s is not None]


@dataclass(frozen=True, eq=False)
class SharedExpertWeights:
    """A shared expert's stacks, and the row of its own gate where it has one."""

    expert: ExpertWeights
    gate: Stack | None

    def stacks(self) -> list[Stack]:
        """The expert's stacks, then the gate's."""
        return [*self.expert.stacks(), *([self.gate] if self.gate is not None else [])]


@dataclass(frozen=True, eq=False)
class Held:
    """The modules and arrays that something was made of, held so that replacing one is noticed.

    MLX's own leaves and mlx-lm's containers say nothing of a write, so identities are compared, in one pass
    of built-in functions. Strong references, because an id alone could come back as another object.
    """

    holders: tuple[nn.Module, ...]
    names: tuple[str, ...]
    members: tuple[Any, ...] = field(repr=False)

    @classmethod
    def of(cls, container: nn.Module, others: tuple[nn.Module, ...] = ()) -> Held:
        """Take note of the container's projections, and of every array directly in them or in the others."""
        names = tuple(_parts(container).values())
        leaves = (*(container[name] for name in names), *others)
        places = [(container, name) for name in names] + [(m, name) for m in leaves for name in ARRAY_NAMES]
        holders, keys = zip(*places, strict=True)
        return cls(holders, keys, tuple(map(dict.get, holders, keys)))

    def stands(self) -> bool:
        """Whether nothing has been replaced since."""
        return all(map(operator.is_, map(dict.get, self.holders, self.names), self.members))


class SharedModules(NamedTuple):
    """A shared expert that stands beside the routed ones, as modules.

    Args:
        parts: its projections, as ``MLP.projections`` names them.
        activation: between them.
        gate: the layer of one output whose sigmoid weighs it, or None.
    """

    parts: Mapping[str, nn.Module]
    activation: Activation
    gate: nn.Module | None

    def modules(self) -> tuple[nn.Module, ...]:
        """Every module that a decision depends on."""
        return (*self.parts.values(), *(() if self.gate is None else (self.gate,)))


def _parts(container: nn.Module) -> dict[str, str]:
    """Which child plays which part: mlx-lm's gated container, or the one with two linear layers."""
    if "gate_proj" in container:
        return {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
    return {"up": "fc1", "down": "fc2"}


def children(container: nn.Module) -> dict[str, nn.Module]:
    """The projections of a container by part: ``gate`` (when gated), ``up``, ``down``."""
    return {part: container[name] for part, name in _parts(container).items()}


def dtype_name(dtype: mx.Dtype) -> str:
    """``float32`` for ``mlx.core.float32``."""
    return str(dtype).rpartition(".")[2]


def global_factor(global_scale: mx.array) -> mx.array:
    """What nvfp4's decoded weights are multiplied by: MLX keeps the largest value, 6 times 448 in codes."""
    return global_scale.astype(mx.float32) / (6 * 448)


def read_stack(
    module: nn.Module, plain: type = SwitchLinear, quantised: type = QuantizedSwitchLinear
) -> Stack | None:
    """A projection's request and arrays, or None when it is of neither class."""
    bias = module.get("bias")
    # Exact, because a subclass may compute something else; one that does not says so itself.
    kind: type = vars(type(module)).get("computes", type(module))
    if kind is plain:
        weight = module["weight"]
        projection = Projection(
            format="plain",
            bits=weight.dtype.size * 8,
            group_size=0,
            rows=weight.shape[-2],
            cols=weight.shape[-1],
            dtype=dtype_name(weight.dtype),
            bias=bias is not None,
        )
        return Stack(projection, weight, bias=bias)
    if kind is not quantised:
        return None
    weight, scales = module["weight"], module["scales"]
    mode: Format = module.mode
    global_scale = module.get("global_scale")
    projection = Projection(
        format=mode,
        bits=module.bits,
        group_size=module.group_size,
        rows=weight.shape[-2],
        cols=scales.shape[-1] * module.group_size,
        dtype=dtype_name(scales.dtype),
        bias=bias is not None,
        global_scale=global_scale is not None,
    )
    return Stack(projection, weight, scales, module.get("biases"), bias, global_scale)


def read(container: nn.Module, activation: Activation) -> ExpertWeights | None:
    """The container's stacks, or None when one of its projections is not a plain mlx-lm projection."""
    stacks = {part: read_stack(module) for part, module in children(container).items()}
    up, down = stacks["up"], stacks["down"]
    if up is None or down is None or any(s is None for s in stacks.values()):
        return None
    return ExpertWeights(stacks.get("gate"), up, down, activation, slots=slots_of(container))


def slots_of(container: nn.Module) -> ExpertSlots | None:
    """The slots of a container whose experts stay in files, or None."""
    return container.slots if isinstance(container, SlottedExperts) else None


def read_shared(
    parts: Mapping[str, nn.Module], activation: Activation, gate: nn.Module | None
) -> SharedExpertWeights | None:
    """A shared expert's stacks, or None when one of its projections is not MLX's own.

    Args:
        parts: its projections as ``MLP.projections`` names them.
        gate: the layer of one output that weighs it, or None.
    """
    stacks = {part: _dense(module) for part, module in parts.items()}
    joined = stacks.pop("gate_up", None)
    if joined is not None:
        half = replace(joined.projection, rows=joined.projection.rows // 2)
        stacks["gate"] = replace(joined, projection=half)
        stacks["up"] = replace(joined, projection=half, first=half.rows)
    row = None if gate is None else _dense(gate)
    up, down = stacks.get("up"), stacks.get("down")
    if up is None or down is None or None in stacks.values() or (gate is not None and row is None):
        return None
    return SharedExpertWeights(ExpertWeights(stacks.get("gate"), up, down, activation), row)


def _dense(module: nn.Module) -> Stack | None:
    return read_stack(module, nn.Linear, nn.QuantizedLinear)


def read_dense(module: nn.Module) -> Stack | None:
    """A linear layer's, or an embedding's, request and arrays, or None when it is neither of MLX's."""
    return _dense(module) or read_stack(module, nn.Embedding, nn.QuantizedEmbedding)


# Stands for a projection that is not mlx-lm's own; the gate declines before it looks at one.
_UNREAD = Projection(format="plain", bits=0, group_size=0, rows=0, cols=0, dtype="")


def request_of(
    experts: ExpertWeights | None,
    activation: Activation,
    *,
    rows: int,
    top_k: int,
    dtype: mx.Dtype,
    device: Device,
    training: bool = False,
) -> KernelRequest:
    """The request of one kind of call; ``experts`` None means an adapted container."""
    gate = experts.gate.projection if experts is not None and experts.gate is not None else None
    shared = None if experts is None else experts.shared
    return KernelRequest(
        rows=rows,
        top_k=top_k,
        num_experts=0 if experts is None else experts.count,
        gate=gate,
        up=_UNREAD if experts is None else experts.up.projection,
        down=_UNREAD if experts is None else experts.down.projection,
        activation=activation,
        dtype=dtype_name(dtype),
        device=device,
        training=training,
        adapted=experts is None,
        shared=None if shared is None else shared_request(shared, dtype=dtype, device=device),
    )


def shared_request(shared: SharedExpertWeights, *, dtype: mx.Dtype, device: Device) -> SharedRequest:
    """The request of a shared expert for one token row."""
    expert = shared.expert
    request = request_of(expert, expert.activation, rows=1, top_k=1, dtype=dtype, device=device)
    return SharedRequest(request, None if shared.gate is None else shared.gate.projection)
