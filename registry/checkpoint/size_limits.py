"""Refuses sizes that a checkpoint's tensors cannot bear out, before anything of these sizes is made."""

from __future__ import annotations

from collections.abc import Iterator

from mlx_experts.registry.checkpoint.checkpoint import Checkpoint
from mlx_experts.registry.errors import ConfigError
from mlx_experts.registry.resolve.plan import Plan

# Two bits a weight is the narrowest packing there is.
_VALUES_IN_A_BYTE = 4


def check_sizes(plan: Plan, checkpoint: Checkpoint) -> None:
    """Compare what any model of these sizes stores with what the checkpoint stores.

    Raises:
        ConfigError: there are more layers than tensors, or a matrix that every model has is larger than all
            tensors together.
    """
    most = _VALUES_IN_A_BYTE * checkpoint.total_bytes
    bounds = [("decoder layers", len(plan.layers), len(checkpoint.tensors))]
    bounds += [(name, values, most) for name, values in matrices(plan)]
    for name, found, bound in bounds:
        if found > bound:
            raise ConfigError(
                "config.json speaks of a larger model than its tensors can hold",
                where=checkpoint.where,
                expected=f"{name}: at most {bound}",
                found=str(found),
                hint="check that config.json belongs to these weights",
            )


def matrices(plan: Plan) -> Iterator[tuple[str, int]]:
    """Numbers of values that a model of these sizes has at least."""
    width = plan.sizes.hidden_size
    yield "values of the embedding", plan.sizes.vocab_size * width
    for i in plan.moe_layers:
        sizes = plan.layers[i].sizes
        yield f"values of the router of layer {i}", sizes.num_experts * width
        yield f"values of the experts of layer {i}", sizes.num_experts * sizes.expert_width
