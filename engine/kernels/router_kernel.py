"""The router in one launch: from logits to the chosen experts and their weights.

It does what the steps say and nothing about families; the plain-MLX router is its truth. "Top-k, then softmax
over the chosen logits" is ``score="softmax", normalise="sum"`` with no epsilon: the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import mlx.core as mx

from mlx_experts.engine.kernels.cpu import router as cpu_router
from mlx_experts.engine.kernels.gpu import cuda, metal
from mlx_experts.engine.kernels.gpu.source import Backend, Launch, defines, text
from mlx_experts.engine.kernels.request import MAX_TOP_K, Decline, Device

MAX_EXPERTS = 512
# MLX's CUDA build keeps arrays of up to 8 bytes in memory shared with the host. A kernel that reads one from
# there took 28 us longer on an H200, so two indices get a buffer of four.
_FEWEST = 4
_SCORES = {"softmax": 0, "sigmoid": 1, "sqrtsoftplus": 2}
_NORMALISE = {"none": 0, "sum": 1, "clamp": 2}
BACKENDS: dict[Device, Backend] = {"cuda": cuda.BACKEND, "metal": metal.BACKEND}

RoutedRun = Callable[[mx.array, mx.array | None], tuple[mx.array, mx.array] | Decline]


@dataclass(frozen=True)
class RouterSteps:
    """What follows the logits of one token, in this order.

    Args:
        num_experts: E.
        top_k: K.
        score: applied to all logits.
        bias: whether a bias ``[E]`` is added to the scores for the selection only.
        groups: equal groups of neighbouring experts; 1 means none.
        keep_groups: how many groups stay; experts of the others score minus infinity for the selection.
        group_score: a group's score, from the biased scores.
        normalise: ``sum`` divides the chosen scores by their sum plus ``eps``, ``clamp`` by the larger of the
            sum and ``eps``.
        scale: multiplies the weights at the end.
    """

    num_experts: int
    top_k: int
    score: Literal["softmax", "sigmoid", "sqrtsoftplus"] = "softmax"
    bias: bool = False
    groups: int = 1
    keep_groups: int = 1
    group_score: Literal["max", "top2_sum"] = "top2_sum"
    normalise: Literal["none", "sum", "clamp"] = "none"
    eps: float = 0.0
    scale: float = 1.0


def check(steps: RouterSteps) -> Decline | None:
    """Why the kernel leaves these steps to plain MLX, or None when it takes them."""
    e, k = steps.num_experts, steps.top_k
    if not 1 <= e <= MAX_EXPERTS:
        return Decline("experts", f"1 to {MAX_EXPERTS}", str(e), "More experts are routed by plain MLX.")
    if not 1 <= k <= min(MAX_TOP_K, e):
        return Decline("top_k", f"1 to {min(MAX_TOP_K, e)}", str(k), "A larger top-k is routed by plain MLX.")
    if not 1 <= steps.groups <= 32 or e % steps.groups:
        return Decline("groups", "1 to 32 equal groups", str(steps.groups), "Check the family's group count.")
    if steps.groups > 1:
        each = e // steps.groups
        if not 1 <= steps.keep_groups <= steps.groups or steps.keep_groups * each < k:
            return Decline(
                "keep_groups",
                f"groups that hold {k} experts between them",
                f"{steps.keep_groups} of {each} experts",
                "Check the family's kept groups.",
            )
        if steps.group_score == "top2_sum" and each < 2:
            return Decline("group_score", "two experts a group", "one", "Use the group's maximum.")
    return None


def router_settings(steps: RouterSteps, logit: str = "me_value(logits[i])") -> str:
    """What ``router.h`` is told: the steps, and logit ``i`` as a C expression."""
    return defines(
        {
            "E": steps.num_experts,
            "K": steps.top_k,
            "LOGIT(i)": logit,
            "SCORE_KIND": _SCORES[steps.score],
            "BIAS": "me_value(bias[e])" if steps.bias else "0.0f",
            "GROUPS": steps.groups,
            "KEEP": steps.keep_groups,
            "GROUP_TOP2": int(steps.group_score == "top2_sum"),
            "NORMALISE": _NORMALISE[steps.normalise],
            "ROUTE_EPS": f"{float(steps.eps)!r}f",
            "ROUTE_SCALE": f"{float(steps.scale)!r}f",
        }
    )


def launch(backend: Backend, steps: RouterSteps) -> Launch:
    """The router's launch. Inputs ``logits`` (and ``bias``); outputs ``chosen``, ``share``."""
    settings = router_settings(steps)
    return Launch(
        label="router",
        inputs=("logits", "bias") if steps.bias else ("logits",),
        outputs=("chosen", "share"),
        header=text(backend.prelude) + settings,
        source=backend.opening + text("router.h"),
        groups=1,
        warps=1,
    )


def prepare(steps: RouterSteps, device: Device, **options: Any) -> RoutedRun | Decline:
    """The router of one layer as ``run(logits, bias) -> (indices, weights)`` for one token.

    ``logits`` is ``[..., E]`` with one row and ``bias`` ``[E]`` or None, each in any float type, which the
    kernel widens; a kernel is made for each combination of types. The results are ``[..., K]``: uint32 in
    falling order of the biased score (ties: the lower index first), and float32.
    """
    objection = check(steps)
    if objection is not None:
        return objection
    if device == "cpu":
        return cpu_router.prepare(steps)
    backend, made = BACKENDS[device], launch(BACKENDS[device], steps)
    kernels: dict[tuple[object, ...], Callable] = {}

    def run(logits: mx.array, bias: mx.array | None = None) -> tuple[mx.array, mx.array]:
        inputs = [logits] if bias is None else [logits, bias]
        dtypes = [array.dtype for array in inputs]
        key = (logits.shape, *dtypes)
        kernel = kernels.get(key)
        if kernel is None:
            shape = (*logits.shape[:-1], max(steps.top_k, _FEWEST))
            dtypes += [mx.uint32, mx.float32]
            kernel = kernels[key] = made.make(backend, dtypes, [shape, shape], **options)
        chosen, share = kernel(inputs)
        if steps.top_k < _FEWEST:
            return chosen[..., : steps.top_k], share[..., : steps.top_k]
        return chosen, share

    return run
