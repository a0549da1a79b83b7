"""Says once, when a model is loaded, that no fused kernel takes its experts as they are stored."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from mlx_experts.engine.dispatch import eligibility, policy, tuning_cache
from mlx_experts.engine.dispatch.expert_dispatch import current_device
from mlx_experts.engine.kernels import fused_kernel
from mlx_experts.engine.kernels.request import Decline
from mlx_experts.engine.layers.moe import MoE

# What a checkpoint is, and not what somebody asked for or what was measured.
_OF_THE_WEIGHTS = {
    "dtype", "top_k", "activation", "shapes", "format", "group_size", "scale_dtype", "global_scale", "widths"
}  # fmt: skip


def gathered_notice(model: nn.Module, dtype: mx.Dtype) -> str | None:
    """One sentence about the layers whose experts are gathered for one token of ``dtype``, or None."""
    device = current_device()
    if fused_kernel(device).unavailable() is not None:
        return None
    asked = policy.resolve(device, None, tuned=tuning_cache.bound(device))
    layers = [module for module in model.modules() if isinstance(module, MoE)]
    verdicts = [eligibility.check(layer.request(1, device, dtype), asked) for layer in layers]
    declined = [v for v in verdicts if isinstance(v, Decline) and v.rule in _OF_THE_WEIGHTS]
    if not declined:
        return None
    return (
        f"the experts of {len(declined)} of {len(layers)} layers run on MLX's own operations, as no fused "
        f"kernel takes them: {declined[0]}. {declined[0].hint}"
    )
