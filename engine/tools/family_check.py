"""Builds a family's tiny model from random numbers and tries everything that the registry promises of it.

Nothing here compares with an original implementation: that is what the converted reference cases are for.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.cache import load_prompt_cache, make_prompt_cache, save_prompt_cache
from mlx_lm.models.switch_layers import SwitchLinear

from mlx_experts.engine.dispatch.trace import trace
from mlx_experts.engine.layers.moe import MoE
from mlx_experts.engine.loading.api import load_model, save_model
from mlx_experts.engine.loading.checkpoint_loader import saved_quantization
from mlx_experts.engine.models.base import LanguageModel
from mlx_experts.engine.models.factory import build
from mlx_experts.engine.models.model import ModelArgs
from mlx_experts.engine.weights.audit import audit
from mlx_experts.engine.weights.quantization import Format
from mlx_experts.registry.checkpoint.size_limits import matrices
from mlx_experts.registry.errors import DeviceError, RegistryError, SpecError
from mlx_experts.registry.resolve.planner import resolve
from mlx_experts.registry.resolve.tiny_config import tiny_config
from mlx_experts.registry.spec.checkpoint import Stacked
from mlx_experts.registry.spec.family import Family

PROMPT, STEPS = 11, 4
# Values of one matrix of a tiny model: 64 MB of float32, of which a model has several.
LARGEST = 1 << 24
# Float32 sums in another order differ by this much; a wrong formula differs by far more.
AGREE = 2e-4
# Why experts may be seen on the gather path: several rows made of one token's weighted inputs, or a machine
# without what the kernel needs.
EXPECTED_DECLINES = frozenset({"rows", "numba"})


@dataclass
class Step:
    """One thing that was tried."""

    name: str
    ok: bool
    detail: str = ""


@dataclass
class FamilyReport:
    """What was tried on one family.

    Args:
        family: its name.
        steps: in the order in which they ran; the first failure ends the list.
        fused: MoE layers that ran fused on the decoded token.
        moe_layers: MoE layers in all.
        reason: why the others did not, or nothing.
        lacks: what this machine lacks to run the family, so that nothing was tried; or nothing.
    """

    family: str
    steps: list[Step] = field(default_factory=list)
    fused: int = 0
    moe_layers: int = 0
    reason: str = ""
    lacks: str = ""

    @property
    def ok(self) -> bool:
        """Whether every step that this machine can run passed."""
        return all(step.ok for step in self.steps)


def build_tiny(family: Family, config: Mapping[str, Any], seed: int = 0) -> LanguageModel:
    """The tiny model of a family with every parameter random."""
    args = ModelArgs(resolve(family, config), dict(config), None, str(config.get("model_type", "")))
    mx.random.seed(seed)
    model = build(args)
    numbers = np.random.default_rng(seed)
    filled = [(name, _random(value, numbers)) for name, value in tree_flatten(model.parameters())]
    model.update(tree_unflatten(filled))
    model.eval()
    mx.eval(model.parameters())
    return model


def _random(value: mx.array, numbers: np.random.Generator) -> mx.array:
    if not mx.issubdtype(value.dtype, mx.floating):
        return value
    # NumPy draws them ten times as fast as MLX on a CPU, which would be most of the time of a build.
    noise = mx.array(numbers.standard_normal(value.shape, np.float32))
    if value.ndim == 1:
        # Norm weights, biases, decay rates: near what their module starts with, but never equal.
        return value + 0.1 * noise
    return noise * (0.5 / value.shape[-1] ** 0.5)


def check_family(family: Family) -> FamilyReport:
    """Try build, layouts, saving, prefill, decoding, batches, prompt caches and the fused path.

    Returns:
        The report; a failed step says what is wrong and where.
    """
    report = FamilyReport(family.family)
    steps = _Steps(report)
    config = steps.run("config", lambda: tiny_config(family))
    if steps.going:
        steps.run("plan", lambda: _count_layers(family, config, report))
    model = steps.run("build", lambda: build_tiny(family, config)) if steps.going else None
    if model is None:
        return report
    for index in (None, *range(len(family.expert_layouts))):
        label = "tree" if index is None else family.expert_layouts[index].kind
        steps.run(f"layout {label}", lambda i=index: _layout_round_trip(family, config, model, i))
    steps.run("save and load", lambda: _files_round_trip(family, model, config))
    steps.run("decode", lambda: _decodes(model))
    steps.run("batch", lambda: _batches(model))
    steps.run("prompt cache", lambda: _prompt_cache(model))
    steps.run("fused", lambda: _fused(family, config, report))
    return report


class _Steps:
    """Runs steps until one fails, and keeps the account."""

    def __init__(self, report: FamilyReport) -> None:
        self.report = report

    @property
    def going(self) -> bool:
        return self.report.ok and not self.report.lacks

    def run(self, name: str, step: Any) -> Any:
        if not self.going:
            return None
        try:
            result = step()
        except DeviceError as error:
            self.report.lacks = self.report.reason = f"needs {error.expected}"
            self.report.steps.append(Step(name, True, self.report.lacks))
            return None
        except (RegistryError, AssertionError) as error:
            self.report.steps.append(Step(name, False, str(error)))
            return None
        self.report.steps.append(Step(name, True, result if isinstance(result, str) else ""))
        return result


def _count_layers(family: Family, config: Mapping[str, Any], report: FamilyReport) -> str:
    plan = resolve(family, config)
    for name, values in matrices(plan):
        if values > LARGEST:
            raise SpecError(
                "the tiny model would not be tiny",
                where=f"{family.family}.yaml, example",
                expected=f"{name}: at most {LARGEST}",
                found=str(values),
                hint="state smaller sizes under `example`",
            )
    report.moe_layers = len(plan.moe_layers)
    return f"{report.moe_layers} MoE layers"


def _parameters(model: nn.Module) -> dict[str, mx.array]:
    return dict(tree_flatten(model.parameters()))


def _close(a: mx.array, b: mx.array) -> float:
    x, y = np.array(a.astype(mx.float32)), np.array(b.astype(mx.float32))
    return float(np.abs(x - y).max() / max(float(np.abs(y).max()), 1e-30))


def _layout_round_trip(
    family: Family, config: Mapping[str, Any], model: LanguageModel, index: int | None
) -> str:
    """Write the parameters in a layout, read them into a second model, compare."""
    layout = family.expert_layouts[index] if index is not None else None
    other = build_tiny(family, config, seed=1)
    if isinstance(layout, Stacked) and layout.packed:
        model = build_tiny(family, config)
        for each in (model, other):
            _quantize_experts(each, "mxfp4")
    disk = model.converter.export(_parameters(model), index)
    mx.eval(disk)
    converted = other.convert(disk)
    audit(_parameters(other), converted.tensors).check(f"a synthetic checkpoint of {family.family}")
    for name, value in _parameters(model).items():
        got = converted.tensors[name]
        assert _close(got, value) < 1e-6, f"{name} changed on its way through the layout"
    again = other.convert(converted.tensors).tensors
    for name, value in converted.tensors.items():
        assert mx.array_equal(again[name], value).item(), f"{name} changes when it is converted twice"
    return f"{len(disk)} tensors"


def _files_round_trip(family: Family, model: LanguageModel, config: Mapping[str, Any]) -> str:
    with tempfile.TemporaryDirectory() as folder:
        save_model(folder, model, config)
        loaded, _ = load_model(folder, dtype="float32", family=family)
        for name, value in _parameters(model).items():
            got = dict(_parameters(loaded))[name]
            assert _close(got, value) < 1e-6, f"{name} changed by saving and loading"
        mx.eval(loaded.parameters())
    return ""


def _ids(model: LanguageModel, length: int, rows: int = 1) -> mx.array:
    mx.random.seed(7)
    return mx.random.randint(0, model.plan.sizes.vocab_size, (rows, length))


def _decodes(model: LanguageModel) -> str:
    """Cached decoding, and prefill in two pieces, give the logits of the uncached model."""
    ids = _ids(model, PROMPT + STEPS)
    whole = model(ids)
    assert mx.isfinite(whole).all().item(), "the logits are not finite"
    cache = make_prompt_cache(model)
    parts = [model(ids[:, :5], cache=cache), model(ids[:, 5:PROMPT], cache=cache)]
    parts += [model(ids[:, i : i + 1], cache=cache) for i in range(PROMPT, PROMPT + STEPS)]
    error = _close(mx.concatenate(parts, axis=1), whole)
    assert error < AGREE, f"cached logits differ from uncached ones by {error:.1e}"
    return f"{error:.0e}"


def _batches(model: LanguageModel) -> str:
    """Two rows give each row's own logits."""
    ids = _ids(model, PROMPT, rows=2)
    both = model(ids, cache=make_prompt_cache(model))
    single = mx.concatenate([model(ids[i : i + 1]) for i in range(2)], axis=0)
    error = _close(both, single)
    assert error < AGREE, f"a batch differs from its rows by {error:.1e}"
    return f"{error:.0e}"


def _prompt_cache(model: LanguageModel) -> str:
    """A prompt cache that was saved and loaded continues as the one in memory."""
    ids = _ids(model, PROMPT + 1)
    cache = make_prompt_cache(model)
    model(ids[:, :PROMPT], cache=cache)
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "cache.safetensors")
        save_prompt_cache(path, cache)
        loaded = load_prompt_cache(path)
        here, there = (model(ids[:, PROMPT:], cache=c) for c in (cache, loaded))
        assert _close(there, here) < AGREE, "a loaded prompt cache continues differently"
    return ""


def _fused(family: Family, config: Mapping[str, Any], report: FamilyReport) -> str:
    """The fused path is seen in the trace on 4-bit experts, and agrees with the gather path."""
    if family.backbone is not None and family.backbone.kept is not None:
        report.reason = family.backbone.kept
        return "mlx-lm's blocks are kept"
    fused = build_tiny(family, config)
    _quantize_experts(fused)
    ids = _ids(fused, PROMPT + 1)
    results = []
    declined: dict[str, str] = {}
    blocks = {module.name for module in fused.modules() if isinstance(module, MoE)}
    for on in (True, False):
        cache = make_prompt_cache(fused)
        for module in fused.modules():
            if isinstance(module, MoE):
                module.use_fused(on)
        mx.eval(fused(ids[:, :PROMPT], cache=cache))
        trace.reset()
        results.append(fused(ids[:, PROMPT:], cache=cache))
        mx.eval(results[-1])
        if on:
            report.fused = len({r.layer for r in trace.snapshot() if r.path == "fused"} & blocks)
            declined = {row.reason: row.note for row in trace.snapshot() if row.path == "gather"}
            report.reason = "; ".join(f"{rule} ({note})" for rule, note in declined.items())
    trace.reset()
    error = _close(results[0], results[1])
    assert error < 5e-3, f"fused and gathered logits differ by {error:.1e}"
    unexpected = sorted(set(declined) - EXPECTED_DECLINES)
    assert not unexpected, f"experts that should run fused do not: {report.reason}"
    assert report.fused == report.moe_layers or declined, "an MoE layer was not seen in the trace"
    return f"{report.fused} of {report.moe_layers} layers, {error:.0e}"


def _quantize_experts(model: LanguageModel, mode: str = "affine") -> dict[str, Any]:
    """Quantise the routed experts to 4 bits in groups of 32, as conversions do."""
    formats: dict[str, Format] = {}

    def predicate(path: str, module: nn.Module) -> bool | dict[str, Any]:
        if not isinstance(module, SwitchLinear):
            return False
        width = module.weight.shape[-1]
        assert width % 32 == 0, (
            f"{path} reads {width} values, which no group of 32 divides; state other sizes under `example`"
        )
        formats[path] = Format(4, 32, mode)
        return {"group_size": 32, "bits": 4, "mode": mode}

    nn.quantize(model, class_predicate=predicate)
    mx.eval(model.parameters())
    return saved_quantization(formats)
