"""Whole models of a public shape with random weights: mlx-lm's class and ours over the very same arrays."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.mla import MultiLinear, QuantizedMultiLinear
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear
from mlx_lm.utils import _get_classes

from mlx_experts.engine.models.factory import get_model_classes
from mlx_experts.engine.tools.bench_experts import Storage
from mlx_experts.registry.errors import CheckFailed

_PLAIN = (nn.Linear, nn.Embedding, SwitchLinear, MultiLinear)
_QUANTISED = (nn.QuantizedLinear, nn.QuantizedEmbedding, QuantizedSwitchLinear, QuantizedMultiLinear)
# A matrix of more rows takes them from this many at random. A router's rows differ: equal ones would tie.
_ROWS = 1024

Chosen = Callable[[str, nn.Module], bool | dict[str, Any]]


def build(
    config: dict[str, Any], storage: Storage, dtype: mx.Dtype, *, experts_only: bool = False, seed: int = 0
) -> tuple[nn.Module, nn.Module]:
    """mlx-lm's model and ours, with the same random weights.

    Args:
        config: what config.json holds.
        storage: of every matrix that mlx-lm would quantise; routers keep the 8 bits that mlx-lm gives them.
        experts_only: everything but the experts stays plain.

    Raises:
        CheckFailed: the two classes name their parameters differently.
    """
    mx.random.seed(seed)
    model_class, args_class = _get_classes(config)
    theirs = model_class(args_class.from_dict(config))
    quantise(theirs, storage, experts_only)
    _fill(theirs, dtype)
    ours_class, ours_args = get_model_classes(config)
    ours = ours_class(ours_args.from_dict(config))
    _store_alike(ours, theirs)
    held, wanted = (dict(tree_flatten(m.parameters())) for m in (theirs, ours))
    if set(held) != set(wanted):
        differing = sorted(set(held) ^ set(wanted))
        raise CheckFailed(
            "mlx-lm's model and ours name their parameters differently.",
            where=str(config.get("model_type")),
            found=", ".join(differing[:4]),
        )
    ours.update(tree_unflatten(list(held.items())))
    for model in (theirs, ours):
        model.eval()
    return theirs, ours


def quantise(model: nn.Module, storage: Storage, experts_only: bool = False) -> None:
    """Replace the modules that mlx-lm would quantise. Nothing is computed; the arrays are filled later."""
    if not storage.bits:
        return
    said: Chosen = getattr(model, "quant_predicate", None) or (lambda path, module: True)

    def chosen(path: str, module: nn.Module) -> bool | dict[str, Any]:
        if not isinstance(module, _PLAIN) or (experts_only and not isinstance(module, SwitchLinear)):
            return False
        return module["weight"].shape[-1] % storage.group_size == 0 and said(path, module)

    nn.quantize(model, storage.group_size, storage.bits, mode=storage.mode, class_predicate=chosen)


def _store_alike(model: nn.Module, other: nn.Module) -> None:
    """Quantise what is quantised in another model, and in the same way."""
    how = {
        path: {"group_size": module.group_size, "bits": module.bits, "mode": module.mode}
        for path, module in other.named_modules()
        if isinstance(module, _QUANTISED)
    }
    nn.quantize(model, class_predicate=lambda path, module: how.get(path, False))


def _fill(model: nn.Module, dtype: mx.Dtype) -> None:
    """Random numbers in place of what the modules would have computed at first use."""
    for _, module in model.named_modules():
        if isinstance(module, _QUANTISED):
            rows = _quantised(module, dtype)
            module.update(rows)
        elif isinstance(module, _PLAIN):
            shape = module["weight"].shape
            module.weight = (mx.random.normal(shape, dtype=dtype) * shape[-1] ** -0.5).astype(dtype)
        mx.eval([value for value in module.values() if isinstance(value, mx.array)])
    cast = getattr(model, "cast_predicate", None) or (lambda path: True)
    for path, value in tree_flatten(model.parameters()):
        if value.dtype == mx.float32 and cast(path) and dtype != mx.float32:
            model.update(tree_unflatten([(path, value.astype(dtype))]))
    mx.eval(model.parameters())


def _quantised(module: Any, dtype: mx.Dtype) -> dict[str, mx.array]:
    """Packed weights, scales and biases of a module's own shapes."""
    shape = (*module.weight.shape[:-1], module.scales.shape[-1] * module.group_size)
    rows = prod(shape[:-1])
    block = (mx.random.normal((min(rows, _ROWS), shape[-1])) * shape[-1] ** -0.5).astype(dtype)
    quantised = mx.quantize(block, module.group_size, module.bits, mode=module.mode)
    picked = mx.arange(rows) if rows <= _ROWS else mx.random.randint(0, _ROWS, (rows,))
    picked = picked.reshape(shape[:-1])
    return dict(zip(("weight", "scales", "biases"), (part[picked] for part in quantised), strict=False))
