"""Reads an expert container of mlx-lm into plain facts and the arrays behind them.

Only the containers that mlx-lm's ``switch_layers`` defines are read. Anything else in a projection's place
(an adapter, a plugin's own module) makes the container "adapted", and the fused kernels leave it alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from mlx_experts.engine.kernels.facts import Activation, Device, ExpertFacts, Format, Projection

ARRAY_NAMES = ("weight", "scales", "biases", "bias", "global_scale")


@dataclass(frozen=True, eq=False)
class Stack:
    """One stack of expert matrices: its facts and its arrays as MLX stores them.

    Args:
        weight: ``[E, rows, cols]`` when plain, else packed ``[E, rows, cols * bits / 32]`` uint32.
        scales: ``[E, rows, cols / group_size]``; None when plain.
        biases: like ``scales``, for affine only.
        bias: ``[E, rows]`` added to the product, or None.
        global_scale: ``[E]`` float32, or None.
    """

    projection: Projection
    weight: mx.array
    scales: mx.array | None = None
    biases: mx.array | None = None
    bias: mx.array | None = None
    global_scale: mx.array | None = None

    def arrays(self) -> list[mx.array]:
        """The arrays that exist, in the order of the fields."""
        held = (self.weight, self.scales, self.biases, self.bias, self.global_scale)
        return [a for a in held if a is not None]


@dataclass(frozen=True, eq=False)
class PackedExperts:
    """The stacks of one layer and the activation between them; ``gate`` is None when ungated."""

    gate: Stack | None
    up: Stack
    down: Stack
    activation: Activation

    def stacks(self) -> list[Stack]:
        """Gate (when there is one), up, down."""
        return [s for s in (self.gate, self.up, self.down) if s is not None]


@dataclass(frozen=True, eq=False)
class Snapshot:
    """Which modules and arrays a decision was made for, held so that replacing one is noticed.

    Strong references on purpose: an id alone could come back as another object.
    """

    children: tuple[tuple[str, nn.Module], ...]
    arrays: tuple[tuple[nn.Module, str, Any], ...] = field(repr=False)

    @classmethod
    def of(cls, container: nn.Module) -> Snapshot:
        """Take note of the container's projections and of every array directly in them."""
        children = tuple((n, container[n]) for n in _parts(container).values())
        arrays = tuple((c, n, c.get(n)) for _, c in children for n in ARRAY_NAMES)
        return cls(children, arrays)

    def holds(self, container: nn.Module) -> bool:
        """Whether nothing has been replaced since."""
        for name, child in self.children:
            if container.get(name) is not child:
                return False
        return all(child.get(name) is array for child, name, array in self.arrays)


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


def read_stack(module: nn.Module) -> Stack | None:
    """A projection's facts and arrays, or None when it is not a plain mlx-lm projection."""
    bias = module.get("bias")
    # Exact types: a subclass may compute something else.
    if type(module) is SwitchLinear:
        weight = module["weight"]
        projection = Projection(
            format="plain",
            bits=weight.dtype.size * 8,
            group_size=0,
            rows=weight.shape[1],
            cols=weight.shape[2],
            dtype=dtype_name(weight.dtype),
            bias=bias is not None,
        )
        return Stack(projection, weight, bias=bias)
    if type(module) is not QuantizedSwitchLinear:
        return None
    weight, scales = module["weight"], module["scales"]
    mode: Format = module.mode
    global_scale = module.get("global_scale")
    projection = Projection(
        format=mode,
        bits=module.bits,
        group_size=module.group_size,
        rows=weight.shape[1],
        cols=scales.shape[2] * module.group_size,
        dtype=dtype_name(scales.dtype),
        bias=bias is not None,
        global_scale=global_scale is not None,
    )
    return Stack(projection, weight, scales, module.get("biases"), bias, global_scale)


def read(container: nn.Module, activation: Activation) -> PackedExperts | None:
    """The container's stacks, or None when one of its projections is not a plain mlx-lm projection."""
    stacks = {part: read_stack(module) for part, module in children(container).items()}
    up, down = stacks["up"], stacks["down"]
    if up is None or down is None or any(s is None for s in stacks.values()):
        return None
    return PackedExperts(stacks.get("gate"), up, down, activation)


# Stands for a projection that is not mlx-lm's own; the gate declines before it looks at one.
_UNREAD = Projection(format="plain", bits=0, group_size=0, rows=0, cols=0, dtype="")


def facts_of(
    experts: PackedExperts | None,
    activation: Activation,
    *,
    rows: int,
    top_k: int,
    dtype: mx.Dtype,
    device: Device,
    training: bool = False,
) -> ExpertFacts:
    """The facts of one kind of call; ``experts`` None means an adapted container."""
    gate = experts.gate.projection if experts is not None and experts.gate is not None else None
    return ExpertFacts(
        rows=rows,
        top_k=top_k,
        num_experts=0 if experts is None else experts.up.weight.shape[0],
        gate=gate,
        up=_UNREAD if experts is None else experts.up.projection,
        down=_UNREAD if experts is None else experts.down.projection,
        activation=activation,
        dtype=dtype_name(dtype),
        device=device,
        training=training,
        adapted=experts is None,
    )
