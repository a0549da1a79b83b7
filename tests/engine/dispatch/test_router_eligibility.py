"""Which declared routers run as one launch, in which words, and that they agree with plain MLX."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from representatives import one_of_each, routers
from stateful import routes_alone

from mlx_experts.engine.dispatch.expert_dispatch import current_device
from mlx_experts.engine.dispatch.router_eligibility import prepare, steps_of
from mlx_experts.engine.kernels.request import Decline, Device
from mlx_experts.engine.layers.moe import MoE
from mlx_experts.engine.models.known_families import catalog
from mlx_experts.engine.tools.family_check import build_tiny
from mlx_experts.registry.resolve.tiny_config import tiny_config
from mlx_experts.registry.spec.family import RouterSpec

BASE: dict[str, Any] = {
    "path": "gate",
    "dtype": "model",
    "score": "softmax",
    "order": "score_then_topk",
}


def steps(top_k: int = 2, **changes: Any) -> Any:
    return steps_of(RouterSpec.model_validate({**BASE, **changes}), 8, top_k)


def test_softmax_over_the_picked_is_said_as_softmax_divided_by_the_sum() -> None:
    made = steps(order="topk_then_score")
    assert (made.score, made.normalise, made.eps) == ("softmax", "sum", 0.0)


def test_normalising_is_left_out_for_a_single_expert_where_the_family_says_so() -> None:
    rule = {"enabled": True, "eps": 1e-20, "skip_single": True}
    assert steps(top_k=1, renormalize=rule).normalise == "none"
    assert steps(top_k=2, renormalize=rule).normalise == "sum"


def test_a_clamped_sum_is_said_as_a_clamp() -> None:
    made = steps(renormalize={"enabled": True, "clamp": 1e-12})
    assert (made.normalise, made.eps) == ("clamp", 1e-12)


def test_a_bias_that_a_config_switches_off_is_none() -> None:
    assert steps(selection_bias={"path": "bias"}).bias
    assert not steps(selection_bias={"path": "bias", "enabled": False}).bias


def test_groups_that_keep_everything_are_no_groups() -> None:
    assert steps(groups={"count": 4, "keep": 4, "score": "top2"}).groups == 1
    made = steps(groups={"count": 4, "keep": 2, "score": "max"})
    assert (made.groups, made.keep_groups, made.group_score) == (4, 2, "max")


@pytest.mark.parametrize(
    ("rule", "changes"),
    [
        ("select", {"select": "sparsemixer"}),
        ("score_dtype", {"score_dtype": "logits"}),
        ("expert_scale", {"expert_scale": "per_expert_scale"}),
        ("groups", {"groups": {"count": 2, "keep": 2, "score": "max", "each": True}}),
        ("normalise", {"renormalize": {"enabled": True, "p": 2.0}}),
        ("order", {"order": "topk_then_score", "renormalize": {"enabled": True}}),
        ("order", {"order": "topk_then_score", "score": "sigmoid", "selection_bias": {"path": "bias"}}),
        (
            "order",
            {"order": "topk_then_score", "groups": {"count": 4, "keep": 2, "score": "top2"}},
        ),
    ],
)
def test_steps_that_the_kernel_lacks_are_declined(rule: str, changes: dict[str, Any]) -> None:
    made = steps(**changes)
    assert isinstance(made, Decline)
    assert made.rule == rule


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_switch_leaves_routing_to_plain_mlx(device: Device) -> None:
    off = prepare(RouterSpec.model_validate(BASE), 8, 2, device, False)
    assert isinstance(off, Decline)
    assert off.rule == "switch"


# Families whose routers have a step that the launch lacks, by the rule that declines them.
PLAIN = {
    "cohere2_moe": "order",
    "gemma4": "expert_scale",
    "gemma4_text": "expert_scale",
    "interns1pro": "groups",
    "kolibri1": "order",
    "lfm2_moe": "score_dtype",
    "phimoe": "select",
}


def routed_here(name: str) -> bool:
    """Whether a family's blocks are this package's."""
    backbone = catalog().load(name).backbone
    return backbone is None or backbone.kept is None


@pytest.mark.parametrize(
    "name", one_of_each(routers, [n for n in catalog().names() if routed_here(n) and routes_alone(n)])
)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_one_launch_routes_as_plain_mlx_does(device: Device, name: str) -> None:
    if current_device() != device:
        pytest.skip(f"the default device is not {device}")
    family = catalog().load(name)
    model = build_tiny(family, tiny_config(family))
    mx.random.seed(3)
    blocks = [module for module in model.modules() if isinstance(module, MoE)]
    assert blocks
    for module in blocks:
        x = mx.random.normal((1, 1, module.input_width))
        module.use_fused(True)
        fused = module.route(x)
        made = module._router.runs[device]
        assert (made.rule if isinstance(made, Decline) else None) == PLAIN.get(name)
        module.use_fused(False)
        plain = module.route(x)
        assert module._router.runs[device].rule == "switch"
        sort = [np.argsort(np.array(indices).ravel()) for indices, _ in (fused, plain)]
        chosen = [np.array(i).ravel()[o] for (i, _), o in zip((fused, plain), sort, strict=True)]
        shares = [np.array(w).ravel()[o] for (_, w), o in zip((fused, plain), sort, strict=True)]
        np.testing.assert_array_equal(chosen[0], chosen[1])
        np.testing.assert_allclose(shares[0], shares[1], rtol=1e-5)


@pytest.mark.parametrize("name", one_of_each(routers, [n for n in catalog().names() if routed_here(n)]))
def test_the_launch_takes_a_bias_where_the_block_has_one(name: str) -> None:
    family = catalog().load(name)
    model = build_tiny(family, tiny_config(family))
    routers_there = [module._router for module in model.modules() if isinstance(module, MoE)]
    assert routers_there
    for router in routers_there:
        made = steps_of(router.spec, router.experts, router.top_k)
        if not isinstance(made, Decline):
            assert made.bias == (router.bias_path is not None)


@pytest.mark.parametrize("name", [n for n in catalog().names() if routed_here(n) and not routes_alone(n)])
def test_routers_that_need_or_give_more_than_a_row_have_no_launch_of_their_own(name: str) -> None:
    """Their blocks bind no router that could be called alone; the experts run fused all the same."""
    family = catalog().load(name)
    model = build_tiny(family, tiny_config(family))
    blocks = [module for module in model.modules() if isinstance(module, MoE)]
    assert blocks
    assert all(block.steps().router is None for block in blocks)


def test_training_routes_by_plain_mlx_which_has_a_gradient() -> None:
    family = catalog().load("qwen3_moe")
    model = build_tiny(family, tiny_config(family))
    block = next(module for module in model.modules() if isinstance(module, MoE))
    model.train()
    block.use_fused(True)
    block.route(mx.ones((1, 1, block.input_width)))
    assert block._router.runs == {}
