"""Experts that nearly cancel: what is left of a narrow block is right, on every path and in every form."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_map
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.switch_layers import SwitchGLU
from representatives import blocks, one_of_each

from mlx_experts.engine.dispatch import verify
from mlx_experts.engine.dispatch.trace import trace
from mlx_experts.engine.kernels import activations, expert_weights, fused_kernel
from mlx_experts.engine.kernels.request import Decline
from mlx_experts.engine.layers.module_tree import ZeroCentredRMSNorm, find
from mlx_experts.engine.layers.moe import MoE
from mlx_experts.engine.models.known_families import catalog
from mlx_experts.engine.tools.family_check import build_tiny
from mlx_experts.plugins.builtin.parallel_moe import ExpertLayer
from mlx_experts.registry.resolve.planner import resolve
from mlx_experts.registry.resolve.tiny_config import tiny_config

FAMILIES = [name for name in catalog().names() if catalog().load(name).backbone is None]
NARROW = [mx.bfloat16, mx.float16]
# The sum is this share of what is added up.
LEFT = 0.02
# Blocks that can be called alone.
BLOCKS = (MoE, ExpertLayer)
Call = Callable[[mx.array], mx.array]


def first_block(name: str) -> tuple[Any, MoE, Callable[[Any, MoE], Call]]:
    """A tiny model, its first block, and how the model calls that block."""
    family = catalog().load(name)
    model = build_tiny(family, tiny_config(family))
    found = [(i, m) for i, layer in enumerate(model.layers) for m in layer.modules() if type(m) in BLOCKS]
    if not found:
        pytest.skip("every router reads a state that the layers hand on; parity with the original holds it")
    at, block = found[0]

    def call_of(model: Any, block: MoE) -> Call:
        if isinstance(block, ExpertLayer):
            return block.feed
        shared = model.plan.layers[at].moe.shared
        if shared is not None and shared.exists and shared.path.startswith("../"):
            lent = find(model.layers[at], shared.path.removeprefix("../"))
            return lambda x: block(x, lent)
        return block

    return model, block, call_of


def cancel(block: MoE, call: Call, x: mx.array) -> None:
    """Turn the last pick's down projection until the block's output is next to nothing for ``x``."""
    indices, _ = block.route(x)
    container = find(block, block.experts_path)
    down = container["down_proj" if "down_proj" in container else "fc2"]
    e = indices.reshape(-1)[-1].item()
    kept, whole = down.weight, call(x)
    # The output is affine in the projection; its slope along the output's own direction is found by trying.
    flat = whole.reshape(-1)
    probe = mx.zeros(kept.shape)
    probe[e] = mx.broadcast_to((flat / mx.linalg.norm(flat))[: kept.shape[1], None], kept.shape[1:])
    down.weight = kept + probe
    slope = (call(x) - whole).reshape(-1)
    down.weight = kept - probe * ((1 - LEFT) * (flat @ slope) / (slope @ slope))


def rms(t: mx.array) -> float:
    return mx.sqrt(mx.mean(mx.square(t.astype(mx.float32)))).item()


@pytest.mark.report("N1")
@pytest.mark.parametrize("dtype", NARROW, ids=["bf16", "f16"])
@pytest.mark.parametrize("name", one_of_each(blocks, FAMILIES))
def test_a_block_whose_experts_cancel_rounds_once_for_one_row_and_for_many(
    name: str, dtype: mx.Dtype
) -> None:
    model, block, call_of = first_block(name)
    mx.random.seed(5)
    x = mx.random.normal((1, 1, block.input_width)).astype(dtype).astype(mx.float32)
    cancel(block, call_of(model, block), x)
    narrow = copy.deepcopy(model)
    narrow.update(tree_map(lambda t: t.astype(dtype), model.parameters()))
    model.update(tree_map(lambda t: t.astype(mx.float32), narrow.parameters()))
    find_block = lambda m: next(each for each in m.modules() if type(each) in BLOCKS)  # noqa: E731
    truth = call_of(model, find_block(model))(x)
    run = call_of(narrow, find_block(narrow))
    one = run(x.astype(dtype))
    assert one.dtype == dtype
    spread = mx.broadcast_to(x.astype(dtype), (1, 40, x.shape[-1]))
    for got in (one, run(spread[:, :3]), run(spread)):
        error = rms(got.astype(mx.float32) - truth) / rms(truth)
        assert error < 4e-3, f"{got.shape[1]} rows: {error:.1e}"


# One family for each form in which a shared expert, a space of the experts' own or a factor joins the sum.
FORMS = {
    "sum": "deepseek_v3",
    "sigmoid gate": "qwen2_moe",
    "mean": "cohere2_moe",
    "parallel": "gemma4_text",
    "mix": "Klear",
    "latent": "nemotron_h",
    "zero experts": "longcat_flash",
    "scaled": "beam",
    "bias": "jetmoe",
}


@pytest.mark.report("N1")
@pytest.mark.parametrize("dtype", NARROW, ids=["bf16", "f16"])
@pytest.mark.parametrize("form", FORMS)
def test_one_row_and_many_differ_by_one_rounding_at_most(form: str, dtype: mx.Dtype) -> None:
    model, block, call_of = first_block(FORMS[form])
    model.update(tree_map(lambda t: t.astype(dtype), model.parameters()))
    call = call_of(model, block)
    mx.random.seed(3)
    x = mx.random.normal((1, 50, block.input_width)).astype(dtype)
    trace.reset()
    many = call(x)
    one = mx.concatenate([call(x[:, i : i + 1]) for i in range(50)], axis=1)
    assert trace.total("fused") > 0
    a, b = one.astype(mx.float32), many.astype(mx.float32)
    ulp = 2.0**-7 if dtype == mx.bfloat16 else 2.0**-10
    assert mx.all(mx.abs(a - b) <= ulp * mx.maximum(mx.abs(a), 1e-3)).item()


def two_that_cancel(dtype: mx.Dtype) -> nn.Module:
    """A container of two experts whose outputs are nearly opposite."""
    mx.random.seed(2)
    container = SwitchGLU(64, 64, 2)
    for leaf in ("gate_proj", "up_proj", "down_proj"):
        first = container[leaf].weight[0]
        sign = -1 if leaf == "down_proj" else 1
        noise = 1e-2 * mx.random.normal(first.shape) * mx.abs(first).mean() if sign < 0 else 0
        container[leaf].weight = mx.stack([first, sign * first + noise]).astype(dtype)
    return container


@pytest.mark.report("N2")
@pytest.mark.parametrize("dtype", NARROW, ids=["bf16", "f16"])
def test_the_one_time_check_takes_the_right_kernel_where_experts_cancel_and_no_wrong_one(
    dtype: mx.Dtype, recwarn: pytest.WarningsRecorder
) -> None:
    container, activation = two_that_cancel(dtype), activations.make("swiglu")
    packed = expert_weights.read(container, activation)
    request = expert_weights.request_of(
        packed, activation, rows=1, top_k=2, dtype=dtype, device="cpu", training=False
    )
    run = fused_kernel("cpu").prepare(packed, dtype)
    x = mx.zeros((1, 1, 64), dtype)
    verify._tried.cache_clear()
    assert verify.verify_kernel("cpu", run, request, container, x) is run
    assert not recwarn.list

    def one_expert_alone(x: mx.array, indices: mx.array, weights: mx.array) -> mx.array:
        return run(x, indices[..., :1], weights[..., :1])

    verify._tried.cache_clear()
    with pytest.warns(RuntimeWarning, match="computes something else"):
        refused = verify.verify_kernel("cpu", one_expert_alone, request, container, x)
    assert isinstance(refused, Decline)
    verify._tried.cache_clear()


def renormalising(name: str) -> bool:
    family = catalog().load(name)
    plan = resolve(family, tiny_config(family))
    return plan.layers[plan.moe_layers[0]].moe.router.select == "topk"


@pytest.mark.report("N3")
@pytest.mark.parametrize("name", [n for n in FAMILIES if renormalising(n)])
def test_scores_that_all_underflow_give_finite_weights_on_both_paths(name: str) -> None:
    _, block, _ = first_block(name)
    router, bound = block._router, block.router
    bias = None if router.bias_path is None else mx.zeros((router.experts,))
    for low in (-1e4, -95.0, -40.0, 0.0):
        logits = mx.full((1, 1, router.experts), low) + mx.arange(router.experts) * 1e-3
        _, weights = bound.plain(logits, bias)
        assert mx.all(mx.isfinite(weights)).item(), low
        run = router.one_launch("cpu")
        if not isinstance(run, Decline):
            fused = run(logits, bias)
            assert mx.allclose(mx.sort(fused[1]), mx.sort(weights), rtol=1e-3).item(), low


@pytest.mark.report("N6")
@pytest.mark.parametrize("device", ["metal", "cuda"])
def test_a_gpu_that_is_neither_declines_experts_and_router_for_the_same_reason(device: Any) -> None:
    """This machine has neither, which is what a faked name of a device comes to."""
    absent = fused_kernel(device).unavailable()
    if absent is None:
        pytest.skip("the device is here")
    _, block, _ = first_block("deepseek_v3")
    block.use_fused(True)
    declined = block._router.one_launch(device)
    assert isinstance(declined, Decline)
    assert declined.rule == absent.rule


@pytest.mark.report("N4")
@pytest.mark.parametrize("dtype", NARROW, ids=["bf16", "f16"])
@pytest.mark.parametrize("name", [n for n in catalog().names() if catalog().load(n).backbone is not None])
def test_models_of_mlx_lm_run_in_narrow_types_on_the_cpu(
    name: str, dtype: mx.Dtype, lab: Any, tmp_path: Path
) -> None:
    model, config = lab.tiny(name)
    word = "bfloat16" if dtype == mx.bfloat16 else "float16"
    narrow, _, _ = lab.load(lab.write(tmp_path, lab.parameters(model), config), dtype=word)
    wide, _, _ = lab.load(tmp_path)
    cache = make_prompt_cache(narrow)
    got = mx.concatenate([narrow(lab.ids, cache=cache), narrow(lab.ids[:, :1], cache=cache)], axis=1)
    want = wide(mx.concatenate([lab.ids, lab.ids[:, :1]], axis=1))
    distance = mx.linalg.norm(got.astype(mx.float32) - want) / mx.linalg.norm(want)
    assert distance.item() < 0.3


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_a_norm_around_one_adds_one_to_a_narrow_weight_without_rounding_it(dtype: mx.Dtype) -> None:
    mx.random.seed(4)
    norm = ZeroCentredRMSNorm(2048, 1e-6)
    norm.weight = (0.3 * mx.random.normal((2048,))).astype(dtype)
    x = mx.random.normal((4, 2048)).astype(dtype)
    made = norm(x)
    assert made.dtype == dtype
    norm.weight = norm.weight.astype(mx.float32)
    want = norm(x.astype(mx.float32))
    one_rounding = 2.0 ** (-8 if dtype == mx.bfloat16 else -11)
    assert mx.abs(made.astype(mx.float32) - want).max() <= one_rounding * mx.abs(want).max()
    assert mx.linalg.norm(made.astype(mx.float32) - want) <= 0.45 * one_rounding * mx.linalg.norm(want)
