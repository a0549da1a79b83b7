"""Checkpoint layouts as declared operations from tensor names on disk to names in the module tree.

A path is a module path or a tensor name with `{layer}` and `{expert}` standing for numbers and a last
`*` standing for any rest. An operation on a module path moves all of its planes (weight, scales,
biases, bias, global_scale) together.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from mlx_experts.registry.spec.values import AnyValue, DiskPath, Options, Spec


class PerExpert(Spec):
    """One tensor for each expert and projection."""

    kind: Literal["per_expert"] = Field(description="One tensor for each expert.")
    path: DiskPath = Field(description="Path in the layer, without the expert's number.")
    leaves: tuple[DiskPath, ...] = Field(description="Leaves: gate, up, down (up, down when not gated).")
    fused: Literal["gate_up", "up_gate"] | None = Field(
        None, description="The first of two leaves holds gate and up, in this order."
    )
    extra_experts: bool = Field(
        False,
        description="Identity experts may have tensors too, numbered after the others; they are dropped.",
    )


class Stacked(Spec):
    """All experts in one tensor, gate and up fused."""

    kind: Literal["stacked"] = Field(description="All experts in one tensor; gate and up are fused.")
    path: DiskPath = Field(description="Path in the layer.")
    fused: DiskPath = Field(
        "gate_up_proj", description="Leaf of the fused gate and up (of up when not gated)."
    )
    down: DiskPath = Field("down_proj", description="Leaf of the down projection.")
    order: Literal["gate_up", "up_gate", "interleaved"] = Field(
        "gate_up", description="Halves in this order, or rows in turn, gate first."
    )
    transposed: bool = Field(False, description="Matrices are [in, out].")
    suffix: Literal["", ".weight"] = Field("", description="What follows the leaf.")
    extra_rows: bool = Field(False, description="The fused stack may carry rows of identity experts.")
    packed: bool | None = Field(
        None, description="Only quantised planes (true), or only full precision (false), look like this."
    )


class Split(Spec):
    """All experts in one tensor for each projection."""

    kind: Literal["split"] = Field(description="All experts in one tensor for each projection.")
    path: DiskPath = Field(description="Path in the layer.")
    leaves: tuple[DiskPath, ...] = Field(description="Leaves: gate, up, down (up, down when not gated).")


class Flat(Spec):
    """All experts stacked along the rows of one matrix."""

    kind: Literal["flat"] = Field(description="Matrices [experts * width, hidden].")
    path: DiskPath = Field(description="Path in the layer.")
    leaves: tuple[DiskPath, ...] = Field(description="Leaves: gate, up, down.")
    down_transposed: bool = Field(description="The down matrix is stored [experts * width, hidden] as well.")


ExpertLayout = Annotated[PerExpert | Stacked | Split | Flat, Field(discriminator="kind")]


class Rename(Spec):
    """Another name."""

    op: Literal["rename"] = Field(description="Rename a module, a tensor or, with a last `*`, a subtree.")
    source: DiskPath = Field(alias="from", description="Name on disk.")
    target: DiskPath = Field(alias="to", description="Name in the module tree.")


class SplitOp(Spec):
    """One tensor on disk is several in the tree."""

    op: Literal["split"] = Field(description="Cut a module's planes along their output rows.")
    source: DiskPath = Field(alias="from", description="Name on disk.")
    target: tuple[DiskPath, ...] = Field(
        alias="to", min_length=1, description="Names in the module tree, in order."
    )
    interleaved: bool = Field(False, description="Rows in turn instead of blocks.")
    groups: AnyValue = Field(1, description="Blocks repeat for each group (a config reference).")
    channels: bool = Field(False, description="Cut convolution kernels along their channels.")


class ConvOp(Spec):
    """A depthwise convolution's kernel, [C, 1, K] on disk and [C, K, 1] in MLX."""

    op: Literal["conv"] = Field(description="Move the kernel axis; done when the middle axis is 1.")
    source: DiskPath = Field(alias="from", description="Tensor name.")
    target: DiskPath | None = Field(
        None, alias="to", description="Name in the module tree, where it is another."
    )


class ReshapeOp(Spec):
    """Same values in another shape."""

    op: Literal["reshape"] = Field(description="Give a tensor the shape that the module has.")
    source: DiskPath = Field(alias="from", description="Tensor name.")


class PickOp(Spec):
    """A part of a tensor, or its transpose, under another name."""

    op: Literal["pick"] = Field(description="Take one row of a tensor, or turn it, and give it another name.")
    source: DiskPath = Field(alias="from", description="Tensor name on disk.")
    target: DiskPath = Field(alias="to", description="Tensor name in the module tree.")
    row: int | None = Field(None, description="The row that is taken; absent for all.")
    transposed: bool = Field(False, description="The matrix on disk is [in, out].")


class PluginOp(Spec):
    """An operation that a plugin supplies."""

    op: Literal["plugin"] = Field(description="A plugin's layout operation.")
    name: str = Field(description="Name under which the plugin offers it.")
    source: DiskPath = Field(alias="from", description="Module path it applies to.")
    options: Options = Field({}, description="Options of the operation.")


LayoutOp = Annotated[Rename | SplitOp | ConvOp | ReshapeOp | PickOp | PluginOp, Field(discriminator="op")]


class LayoutsSpec(Spec):
    """What a checkpoint may look like. The module tree itself is always accepted."""

    prefixes: tuple[str, ...] = Field(
        (), description="Prefixes on disk of the text model, each replaced by the wrapper's."
    )
    experts: tuple[ExpertLayout, ...] = Field((), description="Layouts of the routed experts.")
    save_as: Literal["tree", "per_expert"] = Field(
        "tree",
        description="How experts are written: as in the module tree, or one by one as mlx-lm reads them.",
    )
    ops: tuple[LayoutOp, ...] = Field((), description="Operations, applied in order.")
    drop: tuple[str, ...] = Field((), description="Tensors that the text model does not have.")
    drop_unused: tuple[str, ...] = Field(
        (), description="Modules that are dropped from layers which do not have them."
    )
    may_lack: tuple[str, ...] = Field(
        (), description="Parameters that some tools throw away; where a checkpoint has none of them, zero."
    )
    drop_extra_layers: bool = Field(
        False, description="Layers past the last one (next-token prediction) are dropped."
    )
