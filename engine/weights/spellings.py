"""Other spellings of the same tensors that public checkpoints use, whatever the family.

Declared conversions come first; what they leave over is looked for here, where the model misses a parameter.
"""

from __future__ import annotations

import mlx.core as mx

from mlx_experts.engine.weights.expert_layouts import ExpertStack
from mlx_experts.engine.weights.tensor_tree import SUFFIXES, Tensors, module_tensors
from mlx_experts.registry.resolve.planner import LayerPlan

# What MLX tools call a container of stacked experts.
_CONTAINERS = ("switch_mlp", "switch_glu", "experts")
# What checkpoints call the bias that only the selection sees (arXiv:2408.15664), and where they keep it.
_BIASES = ("e_score_correction_bias", "expert_bias", "correction_bias")
_HOLDERS = ("", "gate", "router", "moe_statics")


def find_experts(stack: ExpertStack, tensors: Tensors) -> None:
    """Rename a layer's stacked experts that stand under another container than the tree's, in place.

    Args:
        tensors: of one layer, after the declared conversions.
    """
    modules = [stack.module(i) for i in range(len(stack.leaves))]
    if any(module_tensors(tensors, module) for module in modules):
        return
    found = {container_of(stack, name) for name in tensors if tensors[name].ndim == 3} - {None}
    for container in found:
        if not all(f"{container}.{leaf}.weight" in tensors for leaf in stack.leaves) or len(found) > 1:
            continue
        for name in [name for name in tensors if container_of(stack, name) == container]:
            tensors[f"{stack.container}{name.removeprefix(str(container))}"] = tensors.pop(name)


def container_of(stack: ExpertStack, name: str) -> str | None:
    """The container that a tensor is of, told by its name; None where it is of none."""
    path, _, suffix = name.rpartition(".")
    container, _, leaf = path.rpartition(".")
    parts = container.removeprefix(f"{stack.layer}.").split(".")
    fits = suffix in SUFFIXES and leaf in stack.leaves and parts[-1] in _CONTAINERS
    return container if fits and name.startswith(f"{stack.layer}.") else None


def find_selection_bias(layer: LayerPlan, at: str, tensors: Tensors) -> None:
    """Rename a router's selection bias that stands under another name than the tree's, in place.

    Args:
        at: module path of the decoder layer.
    """
    bias = layer.moe.router.selection_bias if layer.moe is not None else None
    if layer.moe is None or bias is None or not bias.enabled:
        return
    block = f"{at}.{layer.moe.path}".rstrip(".")
    target = f"{block}.{bias.path}"
    if target in tensors:
        return
    holders = dict.fromkeys((*_HOLDERS, layer.moe.router.path))
    names = [f"{block}.{holder}.{leaf}".replace("..", ".") for holder in holders for leaf in _BIASES]
    found = [name for name in names if name in tensors]
    if len(found) == 1:
        tensors[target] = _flat(tensors.pop(found[0]))


def _flat(bias: mx.array) -> mx.array:
    """A bias with an axis of one entry, as ERNIE's ``moe_statics`` has it, as a vector."""
    return bias[0] if bias.ndim == 2 and bias.shape[0] == 1 else bias
