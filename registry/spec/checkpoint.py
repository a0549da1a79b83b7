"""The checkpoint section: from tensor names on disk to names in the module tree, and back.

A path is a module path or a tensor name with `{layer}` and `{expert}` standing for numbers and a last
`*` standing for any rest. A path that starts with a dot lies in a decoder layer: `.mlp.gate` is
`model.layers.{layer}.mlp.gate`, with the names that the section `names` gives. An operation on a module
path moves all of its tensors (weight, scales, biases, bias, global_scale) together.

A family file may state several operations of a kind in one step (``registry.catalog.conversion_steps``).
"""

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from mlx_experts.registry.spec.values import AnyValue, DiskPath, LayerPath, ModulePath, Options, Spec
from mlx_experts.registry.spec.written import Written


class PerExpert(Spec):
    """One tensor for each expert and projection."""

    kind: Literal["per_expert"] = Field(description="One tensor for each expert.")
    path: LayerPath = Field(
        "",
        description="Path in the layer, without the expert's number; `experts` in the MoE block if absent.",
    )
    projections: tuple[DiskPath, ...] = Field(
        (), description="Leaves: gate, up, down (up, down when not gated); the checkpoint's if absent."
    )
    fused: Literal["gate_up", "up_gate"] | None = Field(
        None, description="The first of two leaves holds gate and up, in this order."
    )
    extra_experts: bool = Field(
        False,
        description="Identity experts may have tensors too, numbered after the others; they are ignored.",
    )


class Stacked(Spec):
    """All experts in one tensor, gate and up fused."""

    kind: Literal["stacked"] = Field(description="All experts in one tensor; gate and up are fused.")
    path: LayerPath = Field("", description="Path in the layer; `experts` in the MoE block if absent.")
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
        None, description="Only quantised tensors (true), or only full precision (false), look like this."
    )


class Split(Spec):
    """All experts in one tensor for each projection."""

    kind: Literal["split"] = Field(description="All experts in one tensor for each projection.")
    path: LayerPath = Field("", description="Path in the layer; `experts` in the MoE block if absent.")
    projections: tuple[DiskPath, ...] = Field(
        (), description="Leaves: gate, up, down (up, down when not gated); the checkpoint's if absent."
    )


class Flat(Spec):
    """All experts stacked along the rows of one matrix."""

    kind: Literal["flat"] = Field(description="Matrices [experts * width, hidden].")
    path: LayerPath = Field("", description="Path in the layer; `experts` in the MoE block if absent.")
    projections: tuple[DiskPath, ...] = Field(
        (), description="Leaves: gate, up, down; the checkpoint's if absent."
    )
    down_transposed: bool = Field(description="The down matrix is stored [experts * width, hidden] as well.")


ExpertLayout = Annotated[PerExpert | Stacked | Split | Flat, Field(discriminator="kind")]

STANDARD_LAYOUTS: tuple[PerExpert | Stacked, ...] = (PerExpert(kind="per_expert"), Stacked(kind="stacked"))
"""What most families' checkpoints look like: experts one by one, or stacked as transformers 5 writes them."""


class Rename(Spec):
    """Another name."""

    source: DiskPath = Field(
        alias="rename", description="Module, tensor or, with a last `*`, subtree on disk."
    )
    target: DiskPath = Field(alias="to", description="Name in the module tree.")
    layer_shift: int = Field(0, description="Added to the number of the layer on disk.")


class SplitOp(Spec):
    """One module on disk is several in the tree: its tensors are cut along their output rows."""

    source: DiskPath = Field(alias="split", description="Module on disk.")
    target: tuple[DiskPath, ...] = Field(
        alias="to", min_length=1, description="Names in the module tree, in order."
    )
    groups: AnyValue = Field(1, description="Blocks repeat for each group (a config reference).")
    channels: bool = Field(False, description="Cut convolution kernels along their channels.")
    interleaved: bool = Field(False, description="Rows take turns; otherwise blocks follow each other.")


class ConvOp(Spec):
    """A depthwise convolution's kernel, [C, 1, K] on disk and [C, K, 1] in MLX."""

    source: DiskPath = Field(
        alias="conv", description="Tensor whose kernel axis is moved, if it is the last."
    )
    target: DiskPath | None = Field(
        None, alias="to", description="Name in the module tree, where it is another."
    )


class ReshapeOp(Spec):
    """Same values in another shape."""

    source: DiskPath = Field(alias="reshape", description="Tensor that gets the shape that the module has.")


class PickOp(Spec):
    """A part of a tensor, or its transpose, under another name."""

    source: DiskPath = Field(alias="pick", description="Tensor on disk.")
    target: DiskPath = Field(alias="to", description="Tensor name in the module tree.")
    row: int | None = Field(None, description="The row that is taken; absent for all.")
    transposed: bool = Field(False, description="The matrix on disk is [in, out].")


class PluginOp(Spec):
    """An operation that a plugin supplies."""

    name: str = Field(alias="plugin", description="Name under which a plugin offers the operation.")
    source: DiskPath = Field(alias="from", description="Module path it applies to.")
    options: Options = Field(
        {}, description="Options of the operation; text that starts with a dot is a path in the layer."
    )


VERBS: dict[str, type[Spec]] = {
    "rename": Rename,
    "split": SplitOp,
    "conv": ConvOp,
    "reshape": ReshapeOp,
    "pick": PickOp,
    "plugin": PluginOp,
}
"""The key that tells which operation a mapping is."""


def _verb(value: Any) -> str | None:
    # The tags are no keys, so that places in a file are told from them.
    if isinstance(value, dict):
        return next((f"a {verb}" for verb in VERBS if verb in value), None)
    kind = type(value).section if isinstance(value, Written) else type(value)
    return next((f"a {verb}" for verb, each in VERBS.items() if each is kind), None)


Operation = Annotated[
    Annotated[Rename, Tag("a rename")]
    | Annotated[SplitOp, Tag("a split")]
    | Annotated[ConvOp, Tag("a conv")]
    | Annotated[ReshapeOp, Tag("a reshape")]
    | Annotated[PickOp, Tag("a pick")]
    | Annotated[PluginOp, Tag("a plugin")],
    Discriminator(
        _verb,
        custom_error_type="operation",
        custom_error_message=f"a mapping with one of the keys {', '.join(VERBS)}",
    ),
]


class CheckpointSpec(Spec):
    """What a checkpoint may look like. The module tree itself is always accepted."""

    define: dict[str, Any] = Field(
        {}, description="Values with names, as in the family's `define`, for lists of this section."
    )
    prefixes: tuple[str, ...] = Field(
        (), description="Prefixes on disk of the text model, each replaced by the wrapper's."
    )
    conversions: tuple[Operation, ...] = Field(
        (),
        description="Operations, applied in order. One step may stand for several: `rename: {a: b, c: d}`, "
        "and so `split`, `conv` and `pick`; `conv: [a, b]`, and so `reshape`. `in` is what all paths of a "
        "step begin with: `{in: .mlp, rename: {w1: gate_proj, w3: up_proj}}`.",
    )
    experts: tuple[ExpertLayout, ...] | None = Field(
        None,
        description="Layouts of the routed experts; when absent `per_expert` and `stacked`, both as they "
        "stand under `experts` in the MoE block (none beside a `backbone`).",
    )
    projections: tuple[DiskPath, ...] = Field(
        ("gate_proj", "up_proj", "down_proj"),
        description="What layouts call the experts' gate, up and down (up and down when not gated).",
    )
    save_as: Literal["tree", "per_expert"] = Field(
        "tree",
        description="How experts are written: as in the module tree, or one by one as mlx-lm reads them.",
    )
    full_precision: dict[str, tuple[ModulePath, ...]] = Field(
        {},
        description="Modules that a conversion does not quantise: by layer type, paths in a layer; under "
        "`frame`, paths of the rest.",
    )
    ignore: tuple[str, ...] = Field((), description="Tensors that the text model does not have.")
    ignore_unused: tuple[str, ...] = Field(
        (), description="Modules that are ignored in layers which do not have them."
    )
    ignore_extra_layers: bool = Field(
        False, description="Layers past the last one (next-token prediction) are ignored."
    )
    optional: tuple[str, ...] = Field(
        (), description="Parameters that some tools throw away; where a checkpoint has none of them, zero."
    )
