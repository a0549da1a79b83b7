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
        _try_to_pass_on(pipeline_group)
        model.pipeline(pipeline_group)
    else:
        model.shard(tensor_group if tensor_group is not None else mx.distributed.init())


def _try_to_pass_on(group: mx.distributed.Group) -> None:
    """Send one value from the last rank to the first, as the layers of a pipeline do.

    Raises:
        SettingError: the ranks cannot send on this device.
    """
    rank, value = group.rank(), mx.array(0.0)
    try:
        if rank < group.size() - 1:
            value = mx.distributed.recv_like(value, rank + 1, group=group)
        if rank > 0:
            value = mx.distributed.send(value, rank - 1, group=group)
        mx.eval(value)
    except RuntimeError as error:
        # MLX says so before anything is sent: on NVIDIA GPUs its ranks only sum and gather.
        if "implementation" not in str(error):
            raise
        raise SettingError(
            "a model cannot be spread by layers here",
            where="pipeline",
            expected="ranks that send to each other",
            found=str(error),
            hint="spread it by widths instead, or use the ring backend",
        ) from error
