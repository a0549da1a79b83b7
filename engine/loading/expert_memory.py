"""Loads a model whose experts stay in the checkpoint's files, under a budget of memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx

from mlx_experts.engine.dispatch.trace import trace
from mlx_experts.engine.kernels.memory.slots import ExpertFiles, ExpertSlots, SlottedExperts
from mlx_experts.engine.layers.module_tree import find
from mlx_experts.engine.layers.moe import MoE
from mlx_experts.engine.models.base import LanguageModel
from mlx_experts.engine.weights.in_place.budget import MemoryPlan, plan_memory
from mlx_experts.engine.weights.in_place.located import LocatedLayer, locate
from mlx_experts.registry.checkpoint.checkpoint import Checkpoint
from mlx_experts.registry.errors import ConfigError


def plan_experts(
    model: LanguageModel,
    checkpoint: Checkpoint,
    config: Mapping[str, Any],
    tensors: Mapping[str, mx.array],
    budget: int | None,
) -> tuple[MemoryPlan, list[LocatedLayer]]:
    """The slots of every layer, and where the experts lie.

    Args:
        tensors: what loading would give the model.
        budget: bytes; None for the smallest that runs.

    Raises:
        ConfigError: the model has no experts that could stay in files.
        SettingError: the budget is too small.
        CheckpointError: the experts cannot be read in place.
    """
    if not model.plan.moe_layers:
        raise ConfigError("the model has no experts", where="expert_memory")
    kept = set(_blocks(model))
    cpu = mx.default_device().type == mx.DeviceType.cpu
    layers = locate(model.converter, checkpoint, config, tensors, on_cpu=cpu)
    if strange := [layer.container for layer in layers if layer.container not in kept]:
        raise ConfigError(
            "the experts of this family are called by blocks of mlx-lm, which need them in memory",
            where=strange[0],
            hint="load without expert_memory",
        )
    sizes = [layer.size for layer in layers]
    least = sum(size.least * size.bytes_each for size in sizes)
    return plan_memory(sizes, least if budget is None else budget), layers


def in_slots(plan: MemoryPlan, layers: list[LocatedLayer]) -> list[tuple[int, LocatedLayer]]:
    """The layers that do not stay whole, with their slots."""
    pairs = zip(plan.slots, layers, strict=True)
    return [(slots, layer) for slots, layer in pairs if slots < layer.size.experts]


def put_slots(model: LanguageModel, slotted: list[tuple[int, LocatedLayer]]) -> None:
    """Give layers slots in the place of their experts, empty as yet.

    Raises:
        CheckpointError: a file cannot be opened.
    """
    blocks, files = _blocks(model), ExpertFiles()
    cpu = mx.default_device().type == mx.DeviceType.cpu
    for count, layer in slotted:
        block = blocks[layer.container]
        container = find(block, block.experts_path)
        leaves = {leaf: container[leaf] for leaf in dict.fromkeys(leaf for leaf, _ in layer.views)}
        account = trace.memory_account(block.name)
        slots = ExpertSlots(files, layer.views, leaves, count, account, in_place=cpu)
        block.use_slots(SlottedExperts(leaves, slots))


def has_slots(model: LanguageModel) -> bool:
    """Whether some experts of a model stay in files."""
    return any(block.slots is not None for block in _blocks(model).values())


def _blocks(model: LanguageModel) -> dict[str, MoE]:
    """Every block, by the path of its expert container."""
    return {
        f"{path}.{module.experts_path}": module
        for path, module in model.named_modules()
        if isinstance(module, MoE)
    }
