"""Numbers side by side: fused against gather against float32 truth, and a checkpoint against a reference."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.switch_layers import SwitchLinear
from mlx_lm.utils import load_model as load_mlx_lm_model

from mlx_experts.engine.dispatch.expert_dispatch import ExpertDispatch, current_device
from mlx_experts.engine.dispatch.trace import trace
from mlx_experts.engine.kernels import expert_weights, naive
from mlx_experts.engine.layers.module_tree import find
from mlx_experts.engine.layers.moe import MoE
from mlx_experts.engine.loading.api import load_model
from mlx_experts.engine.tools.family_check import EXPECTED_DECLINES, build_tiny
from mlx_experts.engine.tools.inspect import layer_words
from mlx_experts.registry.errors import CheckpointError, SettingError
from mlx_experts.registry.resolve.tiny_config import tiny_config
from mlx_experts.registry.spec.family import Family

FORMATS: tuple[tuple[str, int, int], ...] = (
    ("affine", 4, 32),
    ("affine", 8, 64),
    ("affine", 6, 32),
    ("mxfp4", 4, 32),
    ("plain", 0, 0),
)
ROWS = (1, 2, 64)
# Relative RMS distance to the float32 truth that a path may have.
BOUNDS = {"float32": 1e-5, "bfloat16": 5e-3, "float16": 5e-3}
# Gathered products are rounded to the narrow type after each projection, fused ones once at the end. Measured
# over all families on the CPU, at most: gathered 6.2e-3 in bfloat16 and 7.8e-4 in float16, fused 2.1e-3 and
# 2.7e-4.
GATHER_BOUNDS = {**BOUNDS, "bfloat16": 2e-2}
TOLERANCE = 1e-4


@dataclass(frozen=True)
class ExpertParity:
    """One call of one family's experts on one path, or a format that was skipped.

    Args:
        rows: token rows of the call; 0 when skipped.
        path: ``fused``, ``gather`` or ``skipped``.
        reason: why one row did not run fused, or why the format was skipped.
        error: relative RMS distance to the float32 truth; None when skipped.
        bound: what ``error`` may be; None when skipped.
        unexpected: whether one row was to run fused and was gathered for a reason that nobody expects.
    """

    family: str
    format: str
    dtype: str
    rows: int
    path: str
    reason: str
    error: float | None
    bound: float | None
    unexpected: bool = False

    @property
    def ok(self) -> bool:
        """Whether the path is the expected one and keeps its bound; a skipped format breaks nothing."""
        if self.error is None or self.bound is None:
            return self.path == "skipped"
        return not self.unexpected and self.error < self.bound


def _rms(got: mx.array, want: mx.array) -> float:
    a, b = (np.array(v.astype(mx.float32), dtype=np.float64) for v in (got, want))
    return float(np.linalg.norm(a - b) / max(float(np.linalg.norm(b)), 1e-30))


def synthetic_parity(family: Family) -> Iterator[ExpertParity]:
    """Every format, dtype and number of rows on the family's tiny experts, both paths against truth.

    A format whose group does not divide a width of those experts gives one skipped row for each dtype, and a
    family that keeps all of mlx-lm's blocks one skipped row.
    """
    if family.backbone is not None and family.backbone.kept is not None:
        why = f"mlx-lm's blocks are kept: {family.backbone.kept}"
        yield ExpertParity(family.family, "every", "every", 0, "skipped", why, None, None)
        return
    config = tiny_config(family)
    for mode, bits, group in FORMATS:
        for dtype in (mx.float32, mx.bfloat16):
            model = build_tiny(family, config)
            moe = next(m for m in model.modules() if isinstance(m, MoE))
            container = find(moe, moe.experts_path)
            odd = _undivided(container, group)
            if odd:
                label, why = f"{mode} {bits}-bit group {group}", f"groups of {group} do not divide {odd}"
                yield ExpertParity(
                    family.family, label, expert_weights.dtype_name(dtype), 0, "skipped", why, None, None
                )
                continue
            if mode != "plain":
                nn.quantize(container, group_size=group, bits=bits, mode=mode)
            else:
                container.apply(lambda value, wanted=dtype: value.astype(wanted))
            label = "plain" if mode == "plain" else f"{mode} {bits}-bit group {group}"
            yield from _calls(family.family, moe, container, label, dtype)


def _undivided(container: nn.Module, group: int) -> str:
    """The projections whose inputs groups of this size do not divide, with their widths; or nothing."""
    widths = {
        name: module.weight.shape[-1]
        for name, module in container.named_modules()
        if isinstance(module, SwitchLinear)
    }
    odd = [
        f"the {width} inputs of {name}" for name, width in sorted(widths.items()) if group and width % group
    ]
    return ", ".join(odd)


def _calls(
    family: str, moe: MoE, container: nn.Module, label: str, dtype: mx.Dtype
) -> Iterator[ExpertParity]:
    activation = moe.activation
    experts = expert_weights.read(container, activation)
    assert experts is not None
    width, count = experts.up.projection.cols, experts.up.weight.shape[0]
    top_k = min(moe.top_k, count)
    for rows in ROWS:
        mx.random.seed(rows)
        x = mx.random.normal((1, rows, width)).astype(dtype)
        indices = mx.argsort(mx.random.uniform(shape=(1, rows, count)), axis=-1)[..., :top_k]
        weights = mx.softmax(mx.random.normal((1, rows, top_k)), axis=-1)
        truth = naive.experts_in_float32(experts, x, indices, weights)
        for fused in (True, False):
            trace.reset()
            got = ExpertDispatch("parity", activation, fused)(container, x, indices, weights)
            mx.eval(got)
            row = trace.snapshot()[0]
            if fused and row.path != "fused" and rows == 1:
                reason = row.note
            elif fused and row.path != "fused":
                continue
            else:
                reason = ""
            name = expert_weights.dtype_name(dtype)
            bound = (BOUNDS if row.path == "fused" else GATHER_BOUNDS)[name]
            unexpected = bool(reason) and row.reason not in EXPECTED_DECLINES
            yield ExpertParity(
                family, label, name, rows, row.path, reason, _rms(got, truth), bound, unexpected
            )
    trace.reset()


@dataclass
class CheckpointParity:
    """A checkpoint here against a reference.

    Args:
        logits: relative distance of the prompt's logits: largest difference over largest logit.
        layers: the same for each layer's output, where the reference has them.
        kinds: what each of those layers is, in words.
        first_difference: step of the first differing greedy token, or None.
        logit_gap: at that step, the reference's distance between its token and ours.
    """

    reference: str
    logits: float
    layers: list[float] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)
    decode: float | None = None
    tokens: int = 0
    first_difference: int | None = None
    logit_gap: float | None = None

    @property
    def departs(self) -> int | None:
        """The first layer whose output is not the reference's; None where every one is, or none was given."""
        return next((i for i, distance in enumerate(self.layers) if not distance < TOLERANCE), None)

    @property
    def ok(self) -> bool:
        """Within tolerance, with equal greedy tokens."""
        near = self.logits < TOLERANCE and (self.decode is None or self.decode < TOLERANCE)
        return near and self.first_difference is None


def _distance(got: mx.array | np.ndarray, want: mx.array | np.ndarray) -> float:
    a, b = (np.array(v.astype(mx.float32) if isinstance(v, mx.array) else v) for v in (got, want))
    if a.shape != b.shape or not np.isfinite(a).all():
        return float("inf")
    return float(np.abs(a - b).max() / max(float(np.abs(b).max()), 1e-30))


def against_arrays(folder: Path, reference: Path, families: tuple[Path, ...] = ()) -> CheckpointParity:
    """Compare with saved answers: `input_ids`, `logits`, and for decoding `greedy_ids`, `greedy_logits`.

    Where the file holds `hidden_states` too, the output of each layer is compared.

    Raises:
        RegistryError: the checkpoint or the file cannot be read.
    """
    arrays = _answers(reference)
    ids, want = mx.array(arrays["input_ids"]), arrays["logits"]
    model, _ = load_model(folder, dtype="float32", families=families)
    vocabulary = model.plan.sizes.vocab_size
    if want.shape[-1] != vocabulary:
        raise CheckpointError(
            "the reference is of a model with another vocabulary",
            where=str(reference),
            expected=f"{vocabulary} logits a token",
            found=str(want.shape[-1]),
        )
    got, mine = _with_layers(model, ids)
    result = CheckpointParity(str(reference), _distance(got, want))
    states = arrays.get("hidden_states")
    if states is not None:
        if len(states) != len(mine):
            raise CheckpointError(
                "the reference is of a model with another number of layers",
                where=str(reference),
                expected=f"hidden_states of {len(mine)} layers",
                found=str(len(states)),
            )
        result.layers = [_distance(a, b) for a, b in zip(mine, states, strict=True)]
        borrowed = model.plan.family.backbone is not None
        result.kinds = [layer_words(layer, borrowed) for layer in model.plan.layers[: len(mine)]]
    steps = arrays.get("greedy_ids")
    if steps is not None:
        cache = make_prompt_cache(model)
        steps_got = [model(ids, cache=cache)[:, -1]]
        for k in range(steps.shape[1] - 1):
            steps_got.append(model(mx.array(steps[:, k : k + 1]), cache=cache)[:, -1])
        stacked = np.array(mx.stack(steps_got, axis=1).astype(mx.float32))
        result.decode, result.tokens = _distance(stacked, arrays["greedy_logits"]), steps.shape[1]
        _first_difference(result, stacked, arrays["greedy_logits"])
    return result


def _answers(path: Path) -> dict[str, np.ndarray]:
    """The arrays of a file of saved answers, checked to belong together."""
    try:
        loaded = np.load(path)
        arrays = (
            {name: loaded[name] for name in loaded.files} if isinstance(loaded, np.lib.npyio.NpzFile) else {}
        )
    except (OSError, ValueError, EOFError, BadZipFile) as error:
        raise CheckpointError(
            "the reference cannot be read",
            where=str(path),
            expected="an .npz file",
            found="no such file" if isinstance(error, FileNotFoundError) else type(error).__name__,
            hint="scripts/save_answers.py makes one with transformers",
        ) from error
    for ids, logits in (("input_ids", "logits"), ("greedy_ids", "greedy_logits")):
        a, b = arrays.get(ids), arrays.get(logits)
        if a is None and b is None and ids == "greedy_ids":
            continue
        if a is None or b is None or not _belong_together(a, b):
            raise CheckpointError(
                "the reference holds no answers",
                where=str(path),
                expected=f"{ids} [B, L] below the vocabulary, and {logits} [B, L, vocabulary]",
                found=", ".join(f"{name} {list(v.shape)}" for name, v in arrays.items()) or "nothing",
            )
    states = arrays.get("hidden_states")
    if states is not None and (states.ndim != 4 or states.shape[1:3] != arrays["input_ids"].shape):
        raise CheckpointError(
            "the reference's hidden states are not those of its tokens",
            where=str(path),
            expected=f"hidden_states [layers, {', '.join(map(str, arrays['input_ids'].shape))}, width]",
            found=str(list(states.shape)),
        )
    return arrays


def _belong_together(ids: np.ndarray, logits: np.ndarray) -> bool:
    if logits.ndim != 3 or logits.shape[:2] != ids.shape or not np.issubdtype(ids.dtype, np.integer):
        return False
    return ids.size > 0 and bool(0 <= ids.min() <= ids.max() < logits.shape[2])


def _first_difference(result: CheckpointParity, got: np.ndarray, want: np.ndarray) -> None:
    """Record the first step whose greedy tokens differ; arrays are [B, steps, vocabulary]."""
    mine, theirs = got.argmax(-1), want.argmax(-1)
    different = np.argwhere(mine != theirs)
    if len(different):
        row, step = min(map(tuple, different), key=lambda pair: pair[1])
        result.first_difference = int(step)
        result.logit_gap = float(want[row, step, theirs[row, step]] - want[row, step, mine[row, step]])


def _with_layers(model: Any, ids: mx.array) -> tuple[mx.array, list[mx.array]]:
    """Logits of a prompt and the output of every layer, in order.

    Layers are watched through their classes, because some models hand out copies of their list.
    """
    kept: list[mx.array] = []
    originals = {kind: kind.__call__ for kind in {type(layer) for layer in model.layers}}

    def watched(call: Any) -> Any:
        def record(*arguments: Any, **named: Any) -> Any:
            result = call(*arguments, **named)
            kept.append(result[0] if isinstance(result, tuple) else result)
            return result

        return record

    for kind, call in originals.items():
        kind.__call__ = watched(call)
    try:
        return model(ids), kept
    finally:
        for kind, call in originals.items():
            kind.__call__ = call


def against_mlx_lm(
    folder: Path, *, tokens: int = 16, prompt: list[int] | None = None, families: tuple[Path, ...] = ()
) -> CheckpointParity:
    """Compare with mlx-lm's own model of the checkpoint, layer by layer and by greedy tokens.

    Raises:
        RegistryError: the checkpoint cannot be read here.
        SettingError: mlx-lm cannot load it.
    """
    model, _ = load_model(folder, families=families)
    try:
        other, _ = load_mlx_lm_model(folder, strict=True)
    except (ValueError, TypeError, KeyError, RuntimeError, NotImplementedError) as error:
        raise SettingError(
            "mlx-lm cannot load this checkpoint, so it is no reference for it",
            where=str(folder),
            found=f"{type(error).__name__}: {error}"[:300],
            hint="use --reference FILE.npz with the original implementation's logits",
        ) from error
    if current_device() == "cpu":
        other.apply(lambda v: v.astype(mx.float32) if mx.issubdtype(v.dtype, mx.floating) else v)
    vocabulary = model.plan.sizes.vocab_size
    ids = mx.array([prompt or [(7 * i + 3) % vocabulary for i in range(24)]])
    (got, mine), (want, theirs) = _with_layers(model, ids), _with_layers(other, ids)
    result = CheckpointParity("mlx-lm", _distance(got, want), tokens=tokens)
    if len(mine) == len(theirs):
        result.layers = [_distance(a, b) for a, b in zip(mine, theirs, strict=True)]
        borrowed = model.plan.family.backbone is not None
        result.kinds = [layer_words(layer, borrowed) for layer in model.plan.layers[: len(mine)]]
    pairs = [_greedy(each, ids, tokens) for each in (model, other)]
    _first_difference(result, pairs[0][None], pairs[1][None])
    return result


def _greedy(model: Any, ids: mx.array, tokens: int) -> np.ndarray:
    """Logits of each greedy step, [tokens, vocabulary]."""
    cache, steps = make_prompt_cache(model), []
    logits = model(ids, cache=cache)[0, -1]
    for _ in range(tokens):
        steps.append(np.array(logits.astype(mx.float32)))
        logits = model(mx.argmax(logits)[None, None], cache=cache)[0, -1]
    return np.stack(steps)
