"""When a router runs as one launch: its declared steps said in the kernel's words, or the reason why not."""

from __future__ import annotations

from mlx_experts.engine.dispatch import policy, tuning_cache
from mlx_experts.engine.kernels import fused_kernel
from mlx_experts.engine.kernels import router_kernel as kernel
from mlx_experts.engine.kernels.request import Decline, Device
from mlx_experts.engine.kernels.router_kernel import RoutedRun
from mlx_experts.registry.spec.family import GroupsSpec, RenormalizeSpec, RouterSpec


def steps_of(spec: RouterSpec, experts: int, top_k: int) -> kernel.RouterSteps | Decline:
    """The steps of a resolved router section, or why the kernel cannot take them.

    Args:
        experts: E, identity experts included.
        top_k: K.
    """
    if spec.select != "topk":
        return Decline("select", "topk", spec.select, "A plugin's selection is run as it is.")
    if spec.score_dtype != "float32":
        return Decline("score_dtype", "float32", spec.score_dtype, "The family scores in the model's type.")
    if spec.expert_scale is not None:
        return Decline("expert_scale", "none", spec.expert_scale, "A learned factor is applied apart.")
    normalised = _normalise(spec.renormalize, top_k)
    if isinstance(normalised, Decline):
        return normalised
    kind, eps = normalised
    groups = _groups(spec.groups)
    if spec.groups is not None and groups[0] > 1 and spec.groups.excluded != "never":
        return Decline("groups", "no expert of another group", "a score of 0", "Plain MLX does it.")
    if spec.groups is not None and spec.groups.enabled and spec.groups.each:
        return Decline("groups", "the best of all groups", "the best of each", "Plain MLX picks them.")
    if spec.order == "topk_then_score" and (spec.selection_bias is not None or groups[0] > 1):
        return Decline(
            "order", "scores before the selection", "a bias or groups on logits", "Plain MLX does it."
        )
    if spec.order == "topk_then_score" and spec.score == "softmax":
        if kind != "none":
            return Decline("order", "a plain softmax over the picked", "more steps", "Plain MLX does them.")
        # A softmax over the picked logits is the softmax over all, divided by the sum of the picked.
        kind = "sum"
    return kernel.RouterSteps(
        num_experts=experts,
        top_k=top_k,
        score=spec.score,  # the router has checked the word
        bias=spec.selection_bias is not None and spec.selection_bias.enabled,
        groups=groups[0],
        keep_groups=groups[1],
        group_score="max" if spec.groups is not None and spec.groups.score == "max" else "top2_sum",
        normalise=kind,  # type: ignore[arg-type]
        eps=eps,
        scale=float(spec.scale),
    )


def _normalise(spec: RenormalizeSpec | None, top_k: int) -> tuple[str, float] | Decline:
    if spec is None or not spec.enabled or (spec.skip_single and top_k == 1):
        return "none", 0.0
    if spec.p != 1.0 or (spec.clamp and spec.eps):
        return Decline("normalise", "a sum", f"a {spec.p}-norm", "Plain MLX divides by other norms.")
    return ("clamp", float(spec.clamp)) if spec.clamp else ("sum", float(spec.eps))


def _groups(spec: GroupsSpec | None) -> tuple[int, int]:
    if spec is None or not spec.enabled or spec.keep >= spec.count:
        return 1, 1
    return spec.count, spec.keep


def prepare(
    spec: RouterSpec, experts: int, top_k: int, device: Device, fused: bool | None
) -> RoutedRun | Decline:
    """What routes one token in one launch on this device, or why it is left to plain MLX.

    Args:
        experts: E, identity experts included.
        top_k: K.
        fused: the argument of ``load``; None leaves the choice to the environment.
    """
    if not policy.resolve(device, fused, tuned=tuning_cache.bound(device)).enabled:
        return Decline("switch", "on", "off", "Fused kernels are switched off.")
    absent = fused_kernel(device).unavailable()
    if absent is not None:
        return absent
    steps = steps_of(spec, experts, top_k)
    if isinstance(steps, Decline):
        return steps
    return kernel.prepare(steps, device)
