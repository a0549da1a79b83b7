"""Loads a checkpoint folder into a model: config, family, plan, tensors, quantisation, audit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.switch_layers import QuantizedSwitchLinear

from mlx_experts.engine import kernels
from mlx_experts.engine.dispatch import policy
from mlx_experts.engine.dispatch.expert_dispatch import current_device
from mlx_experts.engine.loading.expert_memory import in_slots, plan_experts, put_slots
from mlx_experts.engine.loading.experts_per_token import changed_top_k, with_experts_per_token
from mlx_experts.engine.loading.gathered import gathered_notice
from mlx_experts.engine.models.base import LanguageModel
from mlx_experts.engine.models.cpu_activations import choose_activations
from mlx_experts.engine.models.factory import build
from mlx_experts.engine.models.known_families import catalog
from mlx_experts.engine.models.model import ModelArgs
from mlx_experts.engine.weights import heads
from mlx_experts.engine.weights.in_place.budget import bytes_of
from mlx_experts.engine.weights.pipeline import prepare
from mlx_experts.engine.weights.quantization import Format
from mlx_experts.engine.weights.reader import reading
from mlx_experts.registry.checkpoint.checkpoint import Checkpoint
from mlx_experts.registry.checkpoint.size_limits import check_sizes
from mlx_experts.registry.errors import QuantizationError, SettingError, TensorError
from mlx_experts.registry.resolve.planner import resolve
from mlx_experts.registry.resolve.prediction import add_prediction_layer
from mlx_experts.registry.spec.family import Family

Progress = Callable[[int, int, str], None]
# The word for the checkpoint's own dtype, whatever the device.
STORED = "stored"
_DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}


@dataclass
class LoadReport:
    """What a load did that a person may ask about.

    Args:
        family: name of the family.
        notices: remarks, such as quantisation entries that matched nothing.
        ignored: tensors that the model does not have, counted by the rule that ignores them.
        formats: format of every quantised module, by path.
        dtype: name of the compute dtype, or None for the checkpoint's.
    """

    family: str
    notices: list[str] = field(default_factory=list)
    ignored: dict[str, int] = field(default_factory=dict)
    formats: dict[str, Format] = field(default_factory=dict)
    dtype: str | None = None


def load_checkpoint(
    checkpoint: Checkpoint,
    *,
    lazy: bool = False,
    fused: bool | None = None,
    dtype: str | None = None,
    model_config: Mapping[str, Any] | None = None,
    families: tuple[Path, ...] = (),
    family: Family | str | None = None,
    progress: Progress | None = None,
    mtp: bool = False,
    expert_memory: str | int | None = None,
    experts_per_token: int | None = None,
    cpu_activations: str | None = None,
) -> tuple[LanguageModel, dict[str, Any], LoadReport]:
    """Build the model of a checkpoint and fill every parameter.

    Args:
        checkpoint: an opened checkpoint.
        lazy: leave the arrays unevaluated.
        fused: True or False to force or forbid the fused path; None for the policy.
        dtype: compute dtype (`float32`, `float16`, `bfloat16`, `stored` for the checkpoint's own); None for
            float32 on the CPU, where MLX's narrow products are many times slower, and `stored` elsewhere.
        model_config: entries that replace those of config.json.
        families: further folders with family files.
        family: use this family, or the one of this name, whatever the config says.
        progress: called with (shards read, shards in all, file name).
        mtp: keep the checkpoint's first next-token prediction layer.
        expert_memory: memory for experts, such as `4GB` or bytes; those that it does not hold stay in the
            files and are read when they are picked. None loads all.
        experts_per_token: experts that a token picks, instead of what the config says.
        cpu_activations: what the CPU's kernels multiply activations as, ``float32`` or ``int8``; None leaves
            the choice to the environment.

    Returns:
        The model, its config, and a report.

    Raises:
        RegistryError: whatever is wrong with the checkpoint, its config, or an argument.
    """
    compute = compute_dtype(dtype)
    # Settings that no layer could use are refused before anything is read.
    enabled = policy.resolve(current_device(), fused).enabled
    policy.activations(cpu_activations)
    config = {**checkpoint.config, **(model_config or {})}
    known = catalog(*families)
    if isinstance(family, str):
        family = known.load(family)
    budget = None if expert_memory is None else bytes_of(expert_memory)
    family = family or known.for_config(config)
    notices: list[str] = []
    if experts_per_token is not None:
        config = with_experts_per_token(family, config, experts_per_token)
    if experts_per_token is not None or model_config:
        notices = changed_top_k(family, checkpoint.config, config)
    plan = resolve(family, config)
    if mtp:
        plan = add_prediction_layer(plan)
    check_sizes(plan, checkpoint)
    if enabled and not lazy:
        kernels.warm(current_device())
    args = ModelArgs(plan, config, fused, str(config.get("model_type", "")))
    model = build(args)
    report = LoadReport(plan.family.family, [*checkpoint.notices, *notices])
    report.dtype = compute
    with reading(checkpoint):
        try:
            _fill(model, checkpoint, config, report, progress, budget)
        except (TensorError, QuantizationError) as error:
            raise error.within(checkpoint.parts) from error
        model.eval()
        if cpu_activations is not None:
            choose_activations(model, cpu_activations)
        slow = gathered_notice(model, _DTYPES[report.dtype or model.stored_dtype or "float32"])
        report.notices += [] if slow is None else [slow]
        if not lazy:
            # One layer at a time, so that what is cut or decoded on the way is released with each.
            for layer in model.layers:
                mx.eval(layer.parameters())
            mx.eval(model.parameters())
    return model, config, report


def _fill(
    model: LanguageModel,
    checkpoint: Checkpoint,
    config: dict[str, Any],
    report: LoadReport,
    progress: Progress | None,
    budget: int | None,
) -> None:
    """Give every parameter its tensor, unevaluated; nothing else holds the checkpoint's arrays afterwards."""
    dense = _DTYPES.get(report.dtype or "", mx.bfloat16)
    prepared = prepare(model, model, checkpoint, config, dense=dense, progress=progress)
    prepared.audit.check(hint=prepared.hint)
    report.ignored, report.formats = prepared.ignored, prepared.formats
    report.notices += [*model.remarks, *prepared.notices]
    own = _own_dtype(model, prepared.tensors)
    model.stored_dtype = next((name for name, each in _DTYPES.items() if each == own), None)
    tensors = cast_tensors(model, prepared.tensors, report.dtype)
    if budget is not None:
        memory, located = plan_experts(model, checkpoint, config, tensors, budget)
        slotted = in_slots(memory, located)
        containers = tuple(f"{layer.container}." for _, layer in slotted)
        tensors = {name: value for name, value in tensors.items() if not name.startswith(containers)}
        put_slots(model, slotted)
    model.update(tree_unflatten(list(tensors.items())))
    if prepared.untied:
        heads.say_untied(model.plan, config)
    declared = prepared.as_declared and prepared.entry == config.get("quantization")
    _settle_quantization(config, report.formats, declared)


def compute_dtype(dtype: str | None) -> str | None:
    """The compute dtype to use: the one asked for, float32 on the CPU, else None for the checkpoint's.

    Raises:
        SettingError: the dtype is not known.
    """
    if dtype == STORED:
        return None
    if dtype is not None and dtype not in _DTYPES:
        raise SettingError("the dtype is not known", expected=", ".join((*_DTYPES, STORED)), found=str(dtype))
    if dtype is None and mx.default_device().type == mx.DeviceType.cpu:
        return "float32"
    return dtype


def cast_tensors(
    model: LanguageModel, tensors: Mapping[str, mx.array], dtype: str | None
) -> dict[str, mx.array]:
    """Float tensors, scales of quantised ones too, in the compute dtype, except those that stay float32.

    Tensors of two types would widen what they meet to float32, so None too stands for one type: the
    checkpoint's own. Where float32 is wanted, quantised matrices keep narrower scales: what they meet is
    float32 anyway, and the CPU reads a tenth less a token.
    """
    keeps = model.cast_predicate
    wanted = activation_dtype(model, tensors, dtype)
    narrow = _matrices_with_scales(model, tensors) if wanted == mx.float32 else frozenset()

    def cast(name: str, value: mx.array) -> bool:
        path, _, leaf = name.rpartition(".")
        if not mx.issubdtype(value.dtype, mx.floating) or leaf == "global_scale":
            return False
        if leaf in ("scales", "biases") and path in narrow:
            return False
        return wanted == mx.float32 or bool(keeps(name))

    return {name: value.astype(wanted) if cast(name, value) else value for name, value in tensors.items()}


def _matrices_with_scales(model: LanguageModel, tensors: Mapping[str, mx.array]) -> frozenset[str]:
    """Paths of quantised linear layers and experts on the CPU whose scales and biases have one dtype.

    An embedding is none of them: its rows have its scales' dtype.
    """
    if mx.default_device().type != mx.DeviceType.cpu:
        return frozenset()

    def alike(path: str) -> bool:
        scales, biases = tensors.get(f"{path}.scales"), tensors.get(f"{path}.biases")
        return scales is not None and biases is not None and scales.dtype == biases.dtype

    kinds = (nn.QuantizedLinear, QuantizedSwitchLinear)
    return frozenset(p for p, module in model.named_modules() if isinstance(module, kinds) and alike(p))


def activation_dtype(model: LanguageModel, tensors: Mapping[str, mx.array], dtype: str | None) -> mx.Dtype:
    """What activations are computed in, whatever a quantised matrix keeps its scales in."""
    return _own_dtype(model, tensors) if dtype is None else _DTYPES[dtype]


def restore_dtype(model: LanguageModel) -> None:
    """Give a model that was widened to float32 for the CPU's sake the checkpoint's dtype back."""
    if model.stored_dtype not in (None, "float32"):
        widened = {n: v for n, v in tree_flatten(model.parameters()) if v.dtype == mx.float32}
        narrow = cast_tensors(model, widened, model.stored_dtype)
        model.update(tree_unflatten(list(narrow.items())))


def _own_dtype(model: LanguageModel, tensors: Mapping[str, mx.array]) -> mx.Dtype:
    """The dtype that a checkpoint computes in: what its config says where its tensors have it, else that
    of the embedding."""
    plan = model.plan
    floats = {n: v.dtype for n, v in tensors.items() if mx.issubdtype(v.dtype, mx.floating)}
    for key in ("dtype", "torch_dtype"):
        stated = _DTYPES.get(str(plan.config.get(key)))
        if stated is not None and stated in floats.values():
            return stated
    names = plan.family.names
    embedding = f"{names.wrapper}.{names.root}.{names.embed}".removeprefix(".")
    found = (floats.get(f"{embedding}.{tensor}") for tensor in ("weight", "scales"))
    return next(filter(None, [*found, *floats.values()]), mx.float32)


def _settle_quantization(config: dict[str, Any], formats: Mapping[str, Format], as_declared: bool) -> None:
    """Make the config say how the tensors are quantised now, for whoever saves them."""
    if not formats or not as_declared:
        config.pop("quantization", None)
        # Another library's entry no longer holds, and mlx-lm's copy of its own must not differ.
        config.pop("quantization_config", None)
        if formats:
            config["quantization"] = saved_quantization(formats)


def saved_quantization(formats: Mapping[str, Format]) -> dict[str, Any]:
    """The quantisation entry that describes these formats: the commonest as default, the rest by path."""
    counts: dict[Format, int] = {}
    for found in formats.values():
        counts[found] = counts.get(found, 0) + 1
    common = max(counts, key=lambda f: counts[f])
    others = {path: _words(found) for path, found in formats.items() if found != common}
    # mlx-lm sees by the tensors which modules have a scale of the whole, where no entry of their own says so.
    return {**_words(replace(common, global_scale=False)), **others}


def _words(found: Format) -> dict[str, Any]:
    words = {"group_size": found.group_size, "bits": found.bits, "mode": found.mode}
    return {**words, "global_scale": True} if found.global_scale else words
