"""The fused path runs where it should, says why where it does not, and agrees with the float32 truth."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.switch_layers import SwitchGLU, SwitchLinear, SwitchMLP
from representatives import blocks, one_of_each

from mlx_experts.engine.dispatch import expert_dispatch as dispatch
from mlx_experts.engine.dispatch import verify
from mlx_experts.engine.dispatch.expert_dispatch import ExpertDispatch
from mlx_experts.engine.dispatch.policy import WIDTH_BOUND
from mlx_experts.engine.dispatch.trace import trace
from mlx_experts.engine.kernels import activations, expert_weights, gather, naive
from mlx_experts.engine.kernels.cpu import experts as cpu
from mlx_experts.engine.kernels.gpu.source import text
from mlx_experts.engine.models.known_families import catalog
from mlx_experts.engine.tools.family_check import build_tiny
from mlx_experts.registry.resolve.tiny_config import tiny_config

FAMILIES = [name for name in catalog().names() if catalog().load(name).backbone is None]
SWIGLU = activations.make("swiglu")
MODES = {"affine": (4, 32), "mxfp4": (4, 32), "mxfp8": (8, 32), "nvfp4": (4, 16)}


@pytest.fixture(autouse=True)
def _fresh_trace() -> Iterator[None]:
    trace.reset()
    yield
    trace.reset()


def experts(
    width: int, inner: int, count: int, mode: str = "", dtype: mx.Dtype = mx.float32, bias: bool = False
) -> nn.Module:
    """Experts with random weights, plain or quantised."""
    mx.random.seed(width + inner)
    container = SwitchGLU(width, inner, count, bias=bias)
    for leaf in ("gate_proj", "up_proj", "down_proj"):
        module = container[leaf]
        module.weight = mx.random.normal(module.weight.shape) * module.weight.shape[-1] ** -0.5
        if bias:
            module.bias = mx.random.normal(module.bias.shape) * 0.2
    container.set_dtype(dtype)
    if mode:
        nn.quantize(container, MODES[mode][1], MODES[mode][0], mode=mode)
    container.eval()
    mx.eval(container.parameters())
    return container


def call(
    width: int, count: int, top_k: int, rows: int = 1, dtype: mx.Dtype = mx.float32
) -> tuple[mx.array, ...]:
    """Inputs of a call: tokens, picks without repetition, and weights."""
    mx.random.seed(rows)
    x = mx.random.normal((1, rows, width)).astype(dtype)
    picks = mx.argsort(mx.random.normal((1, rows, count)), axis=-1)[..., :top_k].astype(mx.uint32)
    return x, picks, mx.softmax(mx.random.normal((1, rows, top_k)), axis=-1)


def distance(got: mx.array, want: mx.array) -> float:
    a, b = (np.array(t.astype(mx.float32), dtype=np.float64) for t in (got, want))
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def truth(container: nn.Module, *token: mx.array, activation: Any = SWIGLU) -> mx.array:
    return naive.experts_in_float32(expert_weights.read(container, activation), *token)


def runs(model: Any) -> int:
    """How often one token runs a stack of experts: in a loop once a pass, apart for shared experts that the
    router weighs."""
    form, plan = model.decoder._form, model.plan
    stacks = {
        i: 1 + (plan.layers[i].moe.shared is not None and plan.layers[i].moe.shared.combine == "router")
        for i in plan.moe_layers
    }
    return sum(stacks[i] * (form.passes(i) if form is not None else 1) for i in plan.moe_layers)


@pytest.mark.report("KRN-07", "KRN-32")
@pytest.mark.parametrize("name", one_of_each(blocks, FAMILIES))
def test_every_family_runs_fused_once_a_layer_and_token_unless_a_bound_forbids_it(
    name: str, lab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    family = catalog().load(name)
    model = build_tiny(family, tiny_config(family))
    nn.quantize(model, 32, 4, class_predicate=lambda _, module: isinstance(module, SwitchLinear))
    model.eval()
    layers, calls = runs(model), []
    several = any(m._spec.experts.apply_router_weight_on_input and m.top_k > 1 for m in lab.blocks(model))
    for bound in (None, "1"):
        if bound is not None:
            monkeypatch.setenv(WIDTH_BOUND, bound)
        for moe in lab.blocks(model):
            moe.use_fused(None)
        cache = make_prompt_cache(model)
        model(lab.ids, cache=cache)
        trace.reset()
        for token in (5, 6, 7):
            mx.eval(model(mx.array([[token]]), cache=cache))
        calls.append(trace.total("fused"))
    assert calls == [0 if several else 3 * layers, 0]
    assert trace.total("gather", reason="rows" if several else "width_bound") == 3 * layers


@pytest.mark.report("KRN-01")
@pytest.mark.parametrize("device", ["metal", "cuda"])
def test_a_machine_without_the_device_gathers_before_a_kernel_is_made(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if mx.metal.is_available() or mx.cuda.is_available():
        pytest.skip("this machine has the device")
    container, token = experts(64, 32, 4, "affine"), call(64, 4, 2)
    want = ExpertDispatch("block", SWIGLU)(container, *token)
    monkeypatch.setattr(dispatch, "current_device", lambda: device)
    trace.reset()
    assert distance(ExpertDispatch("block", SWIGLU)(container, *token), want) < 1e-5
    assert [(row.path, row.reason) for row in trace.snapshot()] == [("gather", device)]


@pytest.mark.report("KRN-03")
@pytest.mark.parametrize(
    "place",
    [
        pytest.param(mx.cpu, id="cpu"),
        pytest.param(mx.gpu, id="gpu", marks=pytest.mark.cuda),
    ],
)
def test_the_device_of_the_current_stream_decides_which_kernel_runs(place: mx.Device) -> None:
    container, token = experts(64, 64, 4, "affine"), call(64, 4, 2)
    block = ExpertDispatch("block", SWIGLU)
    with mx.stream(place):
        got = block(container, *token)
        mx.eval(got)
    assert [(row.path, row.reason) for row in trace.snapshot()] == [
        ("fused", "cpu" if place == mx.cpu else dispatch._gpu())
    ]
    assert distance(got, truth(container, *token)) < 1e-3


@pytest.mark.report("KRN-05", "KRN-27", "KRN-13")
@pytest.mark.parametrize("mode", ["", *MODES])
@pytest.mark.parametrize(("width", "inner"), [(64, 896), (64, 2880), (544, 64)])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_both_paths_are_held_to_the_truth_and_the_fused_one_is_no_farther_from_it(
    mode: str, width: int, inner: int, dtype: mx.Dtype
) -> None:
    """Widths of real experts, with biases: 896 in Klear, 2880 in gpt-oss, and a tail past every block."""
    container = experts(width, inner, 8, mode, dtype, bias=True)
    token = call(width, 8, 4, dtype=dtype)
    want = truth(container, *token)
    fused = ExpertDispatch("block", SWIGLU, True)(container, *token)
    gathered = ExpertDispatch("block", SWIGLU, False)(container, *token)
    assert {row.path for row in trace.snapshot()} == {"fused", "gather"}
    bound = 1e-5 if dtype == mx.float32 else 5e-3
    assert distance(fused, want) < bound
    assert distance(gathered, want) < 4 * bound
    assert distance(fused, want) <= distance(gathered, want) + bound / 2


@pytest.mark.report("KRN-09")
def test_dtypes_in_one_process_are_each_right() -> None:
    container = experts(64, 64, 4, "affine")
    block = ExpertDispatch("block", SWIGLU)
    for dtype, bound in ((mx.float16, 5e-3), (mx.bfloat16, 5e-3), (mx.float32, 1e-5), (mx.float16, 5e-3)):
        token = call(64, 4, 2, dtype=dtype)
        got = block(container, *token)
        assert got.dtype == dtype
        assert distance(got, truth(container, *token)) < bound
    assert trace.total("fused") == 4


@pytest.mark.report("KRN-11", "KRN-15", "KRN-19")
@pytest.mark.parametrize("mode", ["", *MODES])
@pytest.mark.parametrize("inner", [32, 96, 160])
@pytest.mark.parametrize("rows", [1, 5, 80])
def test_sorted_and_unsorted_products_of_any_width_are_the_truth(mode: str, inner: int, rows: int) -> None:
    container, token = experts(inner, inner, 4, mode), call(inner, 4, 2, rows)
    want = truth(container, *token)
    got = gather.experts(container, SWIGLU, *token)
    singly = [gather.experts(container, SWIGLU, *(t[:, i : i + 1] for t in token)) for i in range(rows)]
    assert mx.isfinite(got).all().item()
    assert distance(got, want) < 1e-5
    assert distance(mx.concatenate(singly, axis=1), want) < 1e-5


@pytest.mark.report("KRN-15")
def test_long_rows_of_small_floats_are_the_truth() -> None:
    container, token = experts(4096, 32, 2, "nvfp4"), call(4096, 2, 2, rows=3)
    assert distance(gather.experts(container, SWIGLU, *token), truth(container, *token)) < 1e-5


@pytest.mark.report("KRN-17")
@pytest.mark.parametrize("rows", [1, 80])
def test_halves_of_a_fused_stack_give_what_copies_give(rows: int) -> None:
    container, token = experts(64, 64, 8, "affine"), call(64, 8, 2, rows)
    want = ExpertDispatch("copies", SWIGLU)(container, *token)
    gate, up = container.gate_proj, container.up_proj
    for plane in ("weight", "scales", "biases"):
        both = mx.concatenate([gate[plane], up[plane]], axis=1)
        mx.eval(both)
        gate[plane], up[plane] = both[:, :64], both[:, 64:]
    assert distance(ExpertDispatch("views", SWIGLU)(container, *token), want) < 1e-5


_PRODUCT = re.compile(r"(?<!\w)(e|expert|row|at|(?:int64_t\()?indices\[[^\]]*\]+\)?) \*")


def narrow(source: str) -> list[str]:
    """What multiplies an expert or a row in fewer than 64 bits, or keeps such a product in fewer."""
    found = []
    for statement in re.split(r"[;{}]", source):
        for factor in _PRODUCT.findall(statement):
            types = re.findall(rf"(\w+) {factor} =", source) if factor.isidentifier() else [factor[:7]]
            kept = re.search(r"\b(?:int|me_uint|uint32_t) \w+ =", statement)
            if set(types) != {"int64_t"} or kept:
                found.append(statement.strip())
    return found


@pytest.mark.report("KRN-21")
@pytest.mark.parametrize(
    "name",
    [
        "rows_up.h",
        "rows_down.h",
        "tiles/mma_up.cu",
        "tiles/down_ask.cu",
        "tiles/down_bulk_ask.cu",
    ],
)
def test_kernels_count_rows_of_stacks_in_64_bits(name: str) -> None:
    """A stack of 512 experts of [2048, 4096] has more than 2^31 weights."""
    assert _PRODUCT.search(text(name))
    assert narrow(text(name)) == []
    assert narrow(text(name).replace("int64_t", "me_uint")) != []


def test_a_narrow_factor_is_seen_beside_a_wide_product() -> None:
    assert narrow("const me_uint e = indices[k]; const int64_t at = e * ME_H;") != []
    assert narrow("const int64_t e = indices[k]; const me_uint at = e * ME_H;") != []
    assert narrow("const int64_t e = indices[k]; const int64_t at = e * ME_H;") == []


@pytest.mark.report("KRN-24")
@pytest.mark.parametrize("name", activations.names())
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_a_clamp_is_part_of_the_kernel(name: str, dtype: mx.Dtype) -> None:
    """Inputs reach +-20 before the activation, far past a bound of 7."""
    activation = activations.make(name, alpha=1.702, limit=7.0)
    container = (SwitchGLU if activation.gated else SwitchMLP)(64, 32, 4)
    container.apply(lambda w: mx.random.normal(w.shape) * 0.7)
    container.set_dtype(dtype)
    container.eval()
    token = call(64, 4, 2, dtype=dtype)
    got = ExpertDispatch("block", activation, True)(container, *token)
    assert trace.total("fused") == 1
    want = truth(container, *token, activation=activation)
    assert distance(got, want) < (1e-5 if dtype == mx.float32 else 5e-3)
    assert all(activations.lookup(name).c and activations.lookup(name).scalar for name in activations.names())


@pytest.mark.report("KRN-25")
@pytest.mark.parametrize("fault", [lambda y: y * 3, lambda y: y * mx.nan, lambda y: mx.zeros_like(y)])
def test_a_kernel_that_computes_something_else_is_not_used(
    fault: Callable[[mx.array], mx.array], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = cpu.FusedExperts.__call__
    monkeypatch.setattr(cpu.FusedExperts, "__call__", lambda self, *token: fault(right(self, *token)))
    verify._tried.cache_clear()
    container, token = experts(64, 32, 4, "affine"), call(64, 4, 2)
    with pytest.warns(RuntimeWarning, match="'cpu' computes something else"):
        got = ExpertDispatch("block", SWIGLU)(container, *token)
    verify._tried.cache_clear()
    assert distance(got, truth(container, *token)) < 1e-5
    assert [(row.path, row.reason) for row in trace.snapshot()] == [("gather", "self_check")]


def test_a_kernel_is_tried_once_for_each_kind_of_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    verify._tried.cache_clear()
    tried: list[Any] = []
    compare = verify._compare
    monkeypatch.setattr(verify, "_compare", lambda *a: tried.append(a[0]) or compare(*a))
    for mode in ("affine", "affine", "mxfp8"):
        ExpertDispatch("block", SWIGLU)(experts(64, 32, 4, mode), *call(64, 4, 2))
    assert tried == ["cpu", "cpu"]


@pytest.mark.report("KRN-29")
@pytest.mark.parametrize("mode", ["", "affine"])
@pytest.mark.parametrize("rows", [0, 1, 40])
def test_experts_without_a_token_and_calls_without_any_are_left_out(mode: str, rows: int) -> None:
    container = experts(64, 32, 4, mode)
    x, _, _ = call(64, 4, 1, max(rows, 1))
    token = x[:, :rows], mx.full((1, rows, 1), 3, dtype=mx.uint32), mx.ones((1, rows, 1))
    got = ExpertDispatch("block", SWIGLU)(container, *token)
    assert got.shape == (1, rows, 64)
    assert rows == 0 or distance(got, truth(container, *token)) < 1e-5


def test_an_expert_past_the_last_one_is_refused() -> None:
    x, _, weights = call(64, 4, 2)
    with pytest.raises(IndexError, match="of 4"):
        mx.eval(ExpertDispatch("block", SWIGLU)(experts(64, 32, 4), x, mx.array([[[1, 4]]]), weights))
