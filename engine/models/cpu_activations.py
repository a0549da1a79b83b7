"""The choice of what the CPU's kernels multiply activations as, for a whole model."""

from __future__ import annotations

import mlx.nn as nn

from mlx_experts.engine.dispatch import policy
from mlx_experts.engine.layers.linear import use_activations
from mlx_experts.engine.layers.moe import MoE


def choose_activations(model: nn.Module, activations: str | None) -> None:
    """Choose for every linear layer and every block of experts of a model.

    Args:
        activations: ``float32``, or ``int8`` for inputs that are rounded to 8 bits; None leaves the choice to
            the environment.

    Raises:
        SettingError: it is no such word.
    """
    policy.activations(activations)
    for module in model.modules():
        if isinstance(module, MoE):
            module.use_activations(activations)
        else:
            use_activations(module, activations)
