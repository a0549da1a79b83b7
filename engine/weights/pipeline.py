"""The one road of a checkpoint's tensors into a model; loading walks it with values, inspecting without.

    headers -> what is ignored -> arrays -> encodings undone -> conversions -> quantised modules -> audit

Without values the arrays are placeholders of the headers' shapes and dtypes. MLX arrays are lazy, so the
same code works out what would come of them, and nothing is allocated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlx_experts.engine.weights.audit import Audit, audit
from mlx_experts.engine.weights.conversion import WeightConverter
from mlx_experts.engine.weights.heads import missing_head
from mlx_experts.engine.weights.quantization import Format, Reader, quantize_modules, settings
from mlx_experts.engine.weights.reader import array_shape, load_arrays, placeholder, stored_dtypes
from mlx_experts.engine.weights.tensor_tree import Tensors
from mlx_experts.registry.checkpoint.checkpoint import Checkpoint
from mlx_experts.registry.resolve.planner import Plan

# AutoGPTQ and its kin write a bias for every module, of zeros where the model has none.
_WITH_BIASES = frozenset({"awq", "gptq"})
ZERO_BIASES = "biases of zeros that the model does not have"


class Target(Protocol):
    """A model that a checkpoint is prepared for."""

    @property
    def plan(self) -> Plan:
        """What the model was built from."""

    @property
    def converter(self) -> WeightConverter:
        """What converts checkpoints to this model's parameters."""

    def untie_head(self) -> None:
        """Give the model an output head of its own."""


@dataclass
class Prepared:
    """A checkpoint as a model takes it.

    Args:
        tensors: by parameter path, unevaluated.
        ignored: how many tensors each rule ignored.
        formats: format of every quantised module, by path.
        entry: the quantisation entry that was followed.
        as_declared: whether the entry says exactly what the modules became.
        notices: remarks, one sentence each.
        audit: how the tensors and the model's parameters fit.
        untied: whether the model got a head of its own against the config.
        hint: what to do about what is missing, where more is known than that the two do not fit.
    """

    tensors: Tensors
    ignored: dict[str, int]
    formats: dict[str, Format]
    entry: dict[str, Any]
    as_declared: bool
    audit: Audit
    notices: list[str] = field(default_factory=list)
    untied: bool = False
    hint: str = ""


def prepare(
    model: nn.Module,
    target: Target,
    checkpoint: Checkpoint,
    config: Mapping[str, Any],
    *,
    dense: mx.Dtype = mx.bfloat16,
    values: bool = True,
    progress: Callable[[int, int, str], None] | None = None,
) -> Prepared:
    """Bring a checkpoint's tensors to the names, layouts and formats of a model, whose modules are quantised.

    Args:
        model: the model as a module.
        target: the same model.
        checkpoint: an opened checkpoint.
        config: its config, perhaps with other entries.
        dense: dtype of weights that MLX has no packed form for.
        values: False works with the headers alone.
        progress: called with (shards read, shards in all, file name).

    Raises:
        TensorError: a layout is incomplete or of the wrong shape.
        QuantizationError: an encoding or a format cannot be read.
        CheckpointError: a file is gone or damaged, or a dtype has no form in MLX.
    """
    converter = target.converter
    shapes = {name: array_shape(info) for name, info in checkpoint.tensors.items()}
    names, ignored = converter.ignored.sift(shapes)
    if values:
        arrays = load_arrays(checkpoint, progress, names)
    else:
        arrays = {name: placeholder(checkpoint.tensors[name]) for name in names}
    kinds = {name: value.dtype for name, value in tree_flatten(model.parameters())}
    dtypes = stored_dtypes(checkpoint)
    decoded = converter.decode(arrays, config, dtypes, dense, values=values, parameters=kinds)
    converted = converter.convert(decoded.weights, values=values)
    notices = list(decoded.notices)
    if converted.own_head:
        target.untie_head()
        converter = target.converter
        notices.append(
            "the config ties the head to the embedding, and the checkpoint holds another head, which is used"
        )
    notices += [
        f"the checkpoint has no {rule}; the {count} parameters are taken as zero"
        for rule, count in converted.missing.items()
    ]
    if decoded.encodings & _WITH_BIASES:
        extra = zero_biases(converted.tensors, converter.tree.shapes, values)
        if extra:
            converted.ignored[ZERO_BIASES] += extra
    entry = decoded.quantization or settings(config)
    declared = config.get("quantization") or config.get("quantization_config") or {}
    reader = Reader(entry, converter, foreign="quant_method" in declared)
    formats = quantize_modules(model, converted.tensors, reader)
    parameters = dict(tree_flatten(model.parameters()))
    tensors = {n: _in_width(value, parameters.get(n)) for n, value in converted.tensors.items()}
    found = audit(parameters, tensors)
    return Prepared(
        tensors,
        dict(ignored + converted.ignored),
        formats,
        entry,
        reader.as_declared,
        found,
        [*notices, *reader.remarks()],
        converted.own_head,
        missing_head(target.plan, found.missing),
    )


def zero_biases(tensors: Tensors, shapes: Mapping[str, tuple[int, ...]], values: bool) -> int:
    """Remove biases that no module has where they are zero; how many there were.

    Args:
        values: whether the tensors hold values; without, all such biases count as zero.
    """
    extra = [name for name in tensors if name.endswith(".bias") and name not in shapes]
    if values:
        extra = [name for name in extra if not mx.any(tensors[name]).item()]
    for name in extra:
        del tensors[name]
    return len(extra)


def _in_width(value: mx.array, parameter: mx.array | None) -> mx.array:
    """Whole numbers in the width that a model has them in; files keep them in any."""
    if parameter is None or parameter.dtype not in (mx.int32, mx.int64):
        return value
    return value.astype(parameter.dtype) if mx.issubdtype(value.dtype, mx.integer) else value
