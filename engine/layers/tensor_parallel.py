"""Tensor parallelism: wide matrices spread over the ranks of a group, the residual stream whole on each.

Megatron-LM's scheme (Shoeybi et al. 2019), as in mlx-lm's ``shard``: a projection into a wide space keeps a
rank's rows, one out of it keeps the columns and is summed over the ranks. Norms, routers, embeddings and
the head stay whole on every rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import mlx.core as mx
import mlx.nn as nn
from mlx.nn.layers.distributed import shard_inplace, shard_linear
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from mlx_experts.engine.layers.module_tree import ZeroCentredRMSNorm, find
from mlx_experts.engine.layers.versioned import VersionedModule
from mlx_experts.registry.errors import SettingError

Group = mx.distributed.Group


@contextmanager
def whole_or_untouched(model: nn.Module) -> Iterator[None]:
    """Where a model is cut: an error in the middle leaves every module with what it had before.

    Args:
        model: a module whose submodules are replaced, or get other arrays, inside the block.
    """
    before = [(module, dict(module), dict(vars(module))) for module in model.modules()]
    whole = False
    try:
        yield
        whole = True
    finally:
        for module, leaves, fields in [] if whole else before:
            # A module of MLX is a dict of its arrays and submodules; its own `update` is another thing.
            dict.clear(module)
            dict.update(module, leaves)
            vars(module).clear()
            vars(module).update(fields)
            if isinstance(module, VersionedModule):
                # What was bound in the meantime holds the new arrays.
                module.written()


@dataclass(frozen=True)
class Cuts:
    """What of a module each rank keeps a part of; everything else stays whole on every rank.

    Args:
        counts: attributes that hold numbers of heads, with the words for messages; each is divided.
        rows: paths of linear layers whose output rows are spread, and how many parts the rows hold, or where
            each part but the first begins.
        columns: paths of linear layers whose input columns are spread; they sum over the ranks.
        heads: paths of layers and vectors whose first axis counts heads.
        norms: norms over a width that is spread.
        experts: path of an expert container whose inner width is spread; the module sums over the ranks.
    """

    counts: Mapping[str, str] = field(default_factory=dict)
    rows: Mapping[str, list[int] | int] = field(default_factory=dict)
    columns: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()
    norms: tuple[str, ...] = ()
    experts: str | None = None


def check_cuts(module: nn.Module, cuts: Cuts, group: Group) -> None:
    """See that the ranks can divide what is to be cut; nothing is changed.

    Raises:
        SettingError: they cannot, or a layer carries an adapter.
    """
    for attribute, what in cuts.counts.items():
        share_of(vars(module)[attribute], group, what)
    for path in cuts.rows:
        share_of(_linear(module, path).weight.shape[0], group, f"the rows of '{path}'")
    for path in cuts.columns:
        _check_columns(_linear(module, path), group, path)
    for path in cuts.norms:
        share_of(find(module, path).weight.shape[0], group, f"the width of '{path}'")
    if cuts.experts is not None:
        _check_experts(find(module, cuts.experts), group, cuts.experts)


def apply_cuts(module: nn.Module, cuts: Cuts, group: Group) -> None:
    """Keep this rank's part of what :func:`check_cuts` has passed."""
    for path, segments in cuts.rows.items():
        spread_rows(module, path, group, segments)
    for path in cuts.columns:
        spread_columns(module, path, group)
    for path in cuts.heads:
        parent, _, leaf = path.rpartition(".")
        holder = find(module, parent) if parent else module
        if isinstance(holder[leaf], mx.array):
            holder[leaf] = _part(holder[leaf], group)
        else:
            shard_inplace(holder[leaf], lambda _, value: 0, group=group)
    for path in cuts.norms:
        _replace(module, path, ShardedRMSNorm(find(module, path), group))
    if cuts.experts is not None:
        spread_experts(find(module, cuts.experts), group, cuts.experts)
    for attribute in cuts.counts:
        setattr(module, attribute, vars(module)[attribute] // group.size())


def _part(value: mx.array, group: Group) -> mx.array:
    count = value.shape[0] // group.size()
    return value[group.rank() * count : (group.rank() + 1) * count]


def share_of(total: int, group: Group, what: str) -> int:
    """What one rank gets of ``total``.

    Raises:
        SettingError: the ranks cannot divide it.
    """
    if total % group.size():
        raise SettingError(
            f"{what} cannot be spread over the ranks",
            expected=f"a multiple of {group.size()}",
            found=str(total),
            hint="use a number of ranks that divides it",
        )
    return total // group.size()


def spread_rows(parent: nn.Module, path: str, group: Group, segments: list[int] | int = 1) -> None:
    """Keep this rank's output rows of the linear layer at ``path``.

    Args:
        segments: how many equal parts the rows hold, or where their parts begin; each is spread alone.

    Raises:
        SettingError: the rows cannot be divided, or the layer carries an adapter.
    """
    module = _linear(parent, path)
    share_of(module.weight.shape[0], group, f"the rows of '{path}'")
    _replace(parent, path, shard_linear(module, "all-to-sharded", segments=segments, group=group))


def spread_columns(parent: nn.Module, path: str, group: Group) -> None:
    """Keep this rank's input columns of the linear layer at ``path``, and sum over the ranks after it.

    Raises:
        SettingError: the columns, or their quantisation groups, cannot be divided, or there is an adapter.
    """
    module = _linear(parent, path)
    _check_columns(module, group, path)
    _replace(parent, path, shard_linear(module, "sharded-to-all", group=group))


def spread_experts(container: nn.Module, group: Group, path: str) -> None:
    """Keep this rank's share of every expert's inner width, in place; the caller sums over the ranks.

    Args:
        container: ``gate_proj, up_proj, down_proj`` or ``fc1, fc2`` of mlx-lm.
        path: the container's module path, for messages.

    Raises:
        SettingError: the width, or its quantisation groups, cannot be divided, or there is an adapter.
    """
    into, out_of = _check_experts(container, group, path)
    down = container[out_of]
    for leaf in into:
        shard_inplace(container[leaf], _rows_of_experts, group=group)
    shard_inplace(down, _columns_of_experts, group=group)
    if "bias" in down:
        # Every rank adds it before the sum over the ranks.
        down.bias = down.bias / group.size()


def _check_experts(container: nn.Module, group: Group, path: str) -> tuple[tuple[str, ...], str]:
    """The leaves into and out of the experts' inner width, which the ranks can divide."""
    into, out_of = (("fc1",), "fc2") if "fc1" in container else (("gate_proj", "up_proj"), "down_proj")
    for leaf in (*into, out_of):
        if type(container[leaf]) not in (SwitchLinear, QuantizedSwitchLinear):
            raise _adapted(f"{path}.{leaf}", container[leaf])
    for leaf in into:
        share_of(container[leaf].weight.shape[-2], group, f"the rows of '{path}.{leaf}'")
    _check_columns(container[out_of], group, f"{path}.{out_of}")
    return into, out_of


def _rows_of_experts(path: str, value: mx.array) -> int | None:
    if path.endswith("global_scale"):
        return None
    return -1 if path.endswith("bias") else -2


def _columns_of_experts(path: str, value: mx.array) -> int | None:
    return None if path.endswith(("bias", "global_scale")) else -1


def _replace(parent: nn.Module, path: str, module: nn.Module) -> None:
    above, _, leaf = path.rpartition(".")
    find(parent, above)[leaf] = module


def _linear(parent: nn.Module, path: str) -> nn.Module:
    module: nn.Module = find(parent, path)
    if vars(type(module)).get("computes", type(module)) not in (nn.Linear, nn.QuantizedLinear):
        raise _adapted(path, module)
    return module


def _adapted(path: str, module: nn.Module) -> SettingError:
    return SettingError(
        "a layer that carries an adapter cannot be spread over ranks",
        where=path,
        found=type(module).__name__,
        hint="fuse the adapter into the weights first",
    )


def _check_columns(module: nn.Module, group: Group, path: str) -> None:
    """Each rank's columns must be whole quantisation groups, and fill whole words."""
    share_of(module.weight.shape[-1], group, f"the columns of '{path}', as they are stored,")
    if "scales" in module:
        share_of(module.scales.shape[-1], group, f"the quantisation groups along the columns of '{path}'")


class ShardedRMSNorm(nn.Module):
    """RMSNorm over a width that is spread over the ranks: the mean square is taken over all of them.

    Args:
        norm: the whole norm.
        group: the ranks.
    """

    def __init__(self, norm: nn.RMSNorm | ZeroCentredRMSNorm, group: Group) -> None:
        super().__init__()
        width = share_of(norm.weight.shape[0], group, "the width of a norm")
        self.weight = norm.weight[group.rank() * width : (group.rank() + 1) * width]
        self.eps = norm.eps
        self._group, self._width = group, norm.weight.shape[0]
        self._centre = 1.0 if isinstance(norm, ZeroCentredRMSNorm) else 0.0

    def __call__(self, x: mx.array) -> mx.array:
        wide = x.astype(mx.float32)
        squares = mx.distributed.all_sum(mx.square(wide).sum(axis=-1, keepdims=True), group=self._group)
        scaled = wide * mx.rsqrt(squares / self._width + self.eps)
        return (scaled * (self._centre + self.weight.astype(mx.float32))).astype(x.dtype)
