"""The router's launch: Metal and CUDA text on the CPU, and on the GPU, against float64 NumPy."""

from __future__ import annotations

import dataclasses

import mlx.core as mx
import numpy as np
import pytest

from mlx_experts.engine.kernels import router_kernel as router
from mlx_experts.engine.kernels.gpu.source import Launch
from mlx_experts.engine.kernels.request import Decline
from mlx_experts.engine.kernels.router_kernel import RouterSteps

CASES = {
    "softmax": RouterSteps(64, 8),
    "softmax_normalised": RouterSteps(128, 8, normalise="sum"),
    "softmax_few_experts": RouterSteps(8, 2, normalise="sum"),
    "sigmoid_with_bias": RouterSteps(
        100, 6, score="sigmoid", bias=True, normalise="sum", eps=1e-20, scale=2.5
    ),
    "groups_by_top2": RouterSteps(
        256, 8, score="sigmoid", bias=True, groups=8, keep_groups=4, normalise="sum", eps=1e-20, scale=2.5
    ),
    "groups_by_max": RouterSteps(160, 6, groups=8, keep_groups=3, group_score="max", scale=16.0),
    "groups_of_two": RouterSteps(64, 4, score="sigmoid", groups=32, keep_groups=2),
    "sqrtsoftplus": RouterSteps(512, 10, score="sqrtsoftplus", bias=True, normalise="sum", scale=1.5),
    "clamped_sum": RouterSteps(64, 6, score="sigmoid", normalise="clamp", eps=4.0),
    "most": RouterSteps(512, 32, normalise="sum"),
    "one_of_one": RouterSteps(1, 1, score="sigmoid"),
}


def truth(steps: RouterSteps, logits: np.ndarray, bias: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """The same steps in float64: indices in falling order of selection, and their weights."""
    v = logits.astype(np.float64)
    if steps.score == "softmax":
        scores = np.exp(v - v.max())
        scores /= scores.sum()
    elif steps.score == "sigmoid":
        scores = 1 / (1 + np.exp(-v))
    else:
        scores = np.sqrt(np.logaddexp(0, v))
    choice = scores if bias is None else scores + bias
    if steps.groups > 1:
        grouped = np.sort(choice.reshape(steps.groups, -1), axis=1)
        worth = grouped[:, -1] if steps.group_score == "max" else grouped[:, -2:].sum(axis=1)
        lost = np.argsort(-worth)[steps.keep_groups :]
        choice = choice.reshape(steps.groups, -1).copy()
        choice[lost] = -np.inf
        choice = choice.reshape(-1)
    chosen = np.argsort(-choice, kind="stable")[: steps.top_k]
    weights = scores[chosen]
    if steps.normalise == "sum":
        weights = weights / (weights.sum() + steps.eps)
    elif steps.normalise == "clamp":
        weights = weights / max(weights.sum(), steps.eps)
    return chosen, weights * steps.scale


def token(steps: RouterSteps, spread: float = 2.0) -> tuple[np.ndarray, np.ndarray | None]:
    """Random logits and, where there is one, a bias that changes the selection."""
    random = np.random.default_rng(steps.num_experts + steps.top_k)
    logits = random.normal(0, spread, steps.num_experts).astype(np.float32)
    bias = random.normal(0, 0.3, steps.num_experts).astype(np.float32) if steps.bias else None
    return logits, bias


def check(steps: RouterSteps, chosen: np.ndarray, share: np.ndarray, logits: np.ndarray, bias) -> None:
    wanted, weights = truth(steps, logits, bias)
    assert chosen.reshape(-1).tolist() == wanted.tolist()
    np.testing.assert_allclose(share.reshape(-1), weights, rtol=1e-5)


def on_host(host, steps: RouterSteps, logits: np.ndarray, bias, change=lambda text: text):
    backend = router.BACKENDS[host.kind]
    inputs = [mx.array(logits)[None], *([] if bias is None else [mx.array(bias)])]
    shape = (1, steps.top_k)
    outputs = [(shape, mx.uint32), (shape, mx.float32)]
    return host.run(backend, router.launch(backend, steps), inputs, outputs, change)


@pytest.mark.parametrize("steps", CASES.values(), ids=CASES)
def test_metal_text_routes_as_the_steps_say(steps, host_metal):
    logits, bias = token(steps)
    check(steps, *on_host(host_metal, steps, logits, bias), logits, bias)


@pytest.mark.parametrize("name", ["softmax", "groups_by_top2", "sqrtsoftplus"])
def test_cuda_text_routes_as_the_steps_say(name, host_cuda):
    logits, bias = token(CASES[name])
    check(CASES[name], *on_host(host_cuda, CASES[name], logits, bias), logits, bias)


def test_large_logits_stay_finite(host_metal):
    steps = RouterSteps(64, 4, score="sqrtsoftplus", normalise="sum")
    logits, _ = token(steps, spread=60.0)
    check(steps, *on_host(host_metal, steps, logits, None), logits, None)


def test_equal_scores_go_to_the_lower_index(host_metal):
    chosen, share = on_host(host_metal, RouterSteps(96, 5), np.zeros(96, np.float32), None)
    assert chosen.reshape(-1).tolist() == [0, 1, 2, 3, 4]
    np.testing.assert_allclose(share, 1 / 96, rtol=1e-6)


def test_logits_that_are_not_numbers_still_name_experts(host_metal):
    steps = RouterSteps(16, 2)
    chosen, share = on_host(host_metal, steps, np.full(16, np.nan, np.float32), None)
    assert (chosen < 16).all()
    assert np.isnan(share).all()


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("me_max(me_min(first, f), me_max(second, s))", "me_max(second, s)"),
        ("its = s;", "its = high;"),
    ],
)
def test_a_planted_mistake_is_noticed(right, wrong, host_metal):
    steps = CASES["groups_by_top2"]
    logits, bias = token(steps)
    assert right in router.launch(router.BACKENDS["metal"], steps).source
    with pytest.raises(AssertionError):
        check(
            steps, *on_host(host_metal, steps, logits, bias, lambda t: t.replace(right, wrong)), logits, bias
        )


@pytest.mark.parametrize("steps", CASES.values(), ids=CASES)
def test_the_kernel_takes_these_steps(steps):
    assert router.check(steps) is None


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (dict(num_experts=513), "experts"),
        (dict(num_experts=0), "experts"),
        (dict(top_k=33), "top_k"),
        (dict(top_k=0), "top_k"),
        (dict(num_experts=4, top_k=5), "top_k"),
        (dict(groups=7), "groups"),
        (dict(groups=33, num_experts=66), "groups"),
        (dict(groups=8, keep_groups=9), "keep_groups"),
        (dict(groups=8, keep_groups=1, top_k=9), "keep_groups"),
        (dict(groups=32, keep_groups=8, num_experts=32), "group_score"),
    ],
)
def test_the_kernel_declines_these_steps(change, rule):
    steps = dataclasses.replace(RouterSteps(64, 8, keep_groups=4), **change)
    verdict = router.prepare(steps, "cuda")
    assert isinstance(verdict, Decline)
    assert verdict.rule == rule


def on_cpu(steps: RouterSteps, logits: np.ndarray, bias) -> list[np.ndarray]:
    run = router.prepare(steps, "cpu")
    assert not isinstance(run, Decline)
    routed = run(mx.array(logits)[None, None], None if bias is None else mx.array(bias))
    assert not isinstance(routed, Decline)
    assert [a.shape for a in routed] == [(1, 1, steps.top_k)] * 2
    assert [a.dtype for a in routed] == [mx.uint32, mx.float32]
    return [np.array(a) for a in routed]


@pytest.mark.parametrize("steps", CASES.values(), ids=CASES)
def test_the_cpu_routes_as_the_steps_say(steps):
    logits, bias = token(steps)
    check(steps, *on_cpu(steps, logits, bias), logits, bias)


def test_the_cpu_keeps_large_logits_finite_ties_in_order_and_names_experts_for_nan():
    large = RouterSteps(64, 4, score="sqrtsoftplus", normalise="sum")
    logits, _ = token(large, spread=60.0)
    check(large, *on_cpu(large, logits, None), logits, None)
    chosen, _ = on_cpu(RouterSteps(96, 5), np.zeros(96, np.float32), None)
    assert chosen.reshape(-1).tolist() == [0, 1, 2, 3, 4]
    for groups in (1, 4):
        steps = RouterSteps(16, 2, groups=groups, keep_groups=2)
        chosen, share = on_cpu(steps, np.full(16, np.nan, np.float32), None)
        assert len(set(chosen.reshape(-1).tolist()) & set(range(16))) == 2
        assert np.isnan(share).all()


def test_the_cpu_leaves_a_function_that_is_differentiated_to_plain_mlx():
    run = router.prepare(RouterSteps(8, 2), "cpu")
    seen = []

    def loss(logits):
        seen.append(run(logits))
        return logits.sum()

    mx.grad(loss)(mx.ones(8))
    assert isinstance(seen[0], Decline)
    assert seen[0].rule == "transformation"


def test_a_kernel_is_made_for_each_type_of_logits_and_bias(monkeypatch):
    """MLX keeps compiled kernels by a name that stands for the types: a cast model needs another one."""
    made = []

    def make(launch, backend, dtypes, shapes, **options):
        made.append(tuple(dtypes[:-2]))
        return lambda inputs: [mx.zeros(shape) for shape in shapes]

    monkeypatch.setattr(Launch, "make", make)
    run = router.prepare(RouterSteps(8, 2, bias=True), "cuda")
    kinds = [(mx.float32, mx.float32), (mx.bfloat16, mx.float32), (mx.bfloat16, mx.bfloat16)]
    for logits, bias in [*kinds, *kinds]:
        chosen, _ = run(mx.zeros((1, 8), logits), mx.zeros((8,), bias))
        assert chosen.shape == (1, 2)
    assert made == kinds


@pytest.mark.cuda
@pytest.mark.parametrize("steps", CASES.values(), ids=CASES)
def test_the_gpu_routes_as_the_steps_say(steps):
    logits, bias = token(steps)
    run = router.prepare(steps, "cuda", init_value=float("nan"))
    assert not isinstance(run, Decline)
    held = None if bias is None else mx.array(bias)
    chosen, share = run(mx.array(logits)[None, None], held)
    assert chosen.shape == share.shape == (1, 1, steps.top_k)
    check(steps, np.array(chosen), np.array(share), logits, bias)
