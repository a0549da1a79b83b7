"""Spreads a loaded model over the ranks of a group, by layers or by the width of its matrices."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from mlx_experts.registry.errors import SettingError


def spread(
    model: nn.Module,
    pipeline_group: mx.distributed.Group | None,
    tensor_group: mx.distributed.Group | None,
) -> None:
    """Spread a model that has not been evaluated.

    Args:
        pipeline_group: each rank keeps some of the layers.
        tensor_group: each rank keeps a part of every layer. Both None mean this one, over all ranks.

    Raises:
        SettingError: both are asked for, or the model cannot be spread so.
    """
    if pipeline_group is not None and tensor_group is not None:
        raise SettingError(
            "a model is spread by layers or by widths, not by both",
            found="pipeline_group and tensor_group",
            hint="give one of them",
        )
    if pipeline_group is not None:
        model.pipeline(pipeline_group)
    else:
        model.shard(tensor_group if tensor_group is not None else mx.distributed.init())
