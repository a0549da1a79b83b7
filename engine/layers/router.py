"""The router: named steps from logits to experts and weights, once, in plain MLX.

Legend: E experts, K experts per token, N groups.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_experts.engine.dispatch.expert_dispatch import current_device
from mlx_experts.engine.dispatch.router_eligibility import prepare
from mlx_experts.engine.kernels.cpu.router import NO_TILT, Routed
from mlx_experts.engine.kernels.request import Decline, Device
from mlx_experts.engine.kernels.router_kernel import RoutedRun
from mlx_experts.engine.layers.linear import on_row
from mlx_experts.engine.layers.module_tree import find, place, take_rows
from mlx_experts.plugins.manager import components
from mlx_experts.registry.spec.family import GroupsSpec, RenormalizeSpec, RouterSpec


class BareLinear(nn.Module):
    """A router's matrix outside ``nn.Linear``, so that conversion never quantises it."""

    def __init__(self, dims: int, rows: int, bias: bool) -> None:
        super().__init__()
        self.weight = mx.random.uniform(low=-(dims**-0.5), high=dims**-0.5, shape=(rows, dims))
        if bias:
            self.bias = mx.zeros((rows,))

    def __call__(self, x: mx.array) -> mx.array:
        y = x @ self.weight.T
        return y + self.bias if "bias" in self else y


def softmax(logits: mx.array) -> mx.array:
    """Softmax over the last axis, computed precisely."""
    return mx.softmax(logits, axis=-1, precise=True)


def sqrtsoftplus(logits: mx.array) -> mx.array:
    """``sqrt(log(1 + exp(x)))``, computed without overflow, and without underflow where the root has none."""
    # log(1 + e) is e to the last bit below exp(-15), and denormal, which MLX makes zero, below exp(-87).
    return mx.where(logits < -15, mx.exp(logits * 0.5), mx.sqrt(mx.logaddexp(logits, 0.0)))


SCORES: dict[str, Callable[[mx.array], mx.array]] = {
    "softmax": softmax,
    "sigmoid": mx.sigmoid,
    "sqrtsoftplus": sqrtsoftplus,
}


class Router:
    """Builds a router's leaves inside an MoE module, and binds them for the calls.

    A plain object, because its leaves live in the MoE module under the paths that checkpoints name.

    Args:
        spec: the resolved section.
        dims: width of the input.
        experts: E, identity experts included.
        top_k: K.
        eps: epsilon of the input norm, where there is one.
    """

    def __init__(self, spec: RouterSpec, dims: int, experts: int, top_k: int, eps: float) -> None:
        self.spec, self.top_k, self.dims, self.experts, self.eps = spec, top_k, dims, experts, eps
        self.fused: bool | None = None
        self.runs: dict[Device, RoutedRun | Decline] = {}
        self.select = None if spec.select == "topk" else components().selection(spec.select)
        self.bias_path = (
            spec.selection_bias.path if spec.selection_bias and spec.selection_bias.enabled else None
        )

    def __reduce__(self) -> tuple[Any, ...]:
        # Prepared launches hold functions that cannot be copied; they are made again at first use.
        made = (self.spec, self.dims, self.experts, self.top_k, self.eps)
        return type(self), made, {"fused": self.fused}

    def use_fused(self, fused: bool | None) -> None:
        """Force, forbid or leave to the policy the one-launch form from now on."""
        self.fused, self.runs = fused, {}

    def build(self, moe: nn.Module) -> None:
        """Place the router's leaves in ``moe``."""
        spec = self.spec
        linear = nn.Linear if spec.quantizable else BareLinear
        place(moe, spec.path, linear(self.dims, self.experts, bias=spec.bias))
        if self.bias_path:
            place(moe, self.bias_path, mx.zeros((self.experts,), dtype=mx.float32))
        if spec.input_norm:
            place(moe, spec.input_norm, mx.ones((self.dims,)))
        if spec.expert_scale:
            place(moe, spec.expert_scale, mx.ones((self.experts,)))

    def bind(self, moe: nn.Module) -> BoundRouter:
        """The router's calls with the leaves that are in ``moe`` now."""
        return BoundRouter(self, moe)

    def keep(self, moe: nn.Module, columns: Sequence[int]) -> None:
        """Leave out every row of the leaves in ``moe`` but these, in their order."""
        take_rows(find(moe, self.spec.path), self.experts, columns)
        rows = mx.array(list(columns))
        for path in (self.bias_path, self.spec.expert_scale):
            if path:
                holder, leaf = _holder(moe, path) or (moe, path)
                holder[leaf] = holder[leaf][rows]
        self.experts, self.runs = len(columns), {}

    def one_launch(self, device: Device) -> RoutedRun | Decline:
        """The fused router of a device, decided once for each."""
        try:
            return self.runs[device]
        except KeyError:
            self.runs[device] = run = prepare(self.spec, self.experts, self.top_k, device, self.fused)
            return run

    def pick(self, logits: mx.array, bias: mx.array | None) -> tuple[mx.array, mx.array]:
        """Top-k selection; weights are gathered from the scores without the selection bias."""
        spec, k = self.spec, self.top_k
        score = SCORES[spec.score]
        scores = score(logits) if spec.order == "score_then_topk" else logits
        chosen = scores if bias is None else scores.astype(mx.float32) + bias
        if spec.groups is not None and spec.groups.enabled and spec.groups.each:
            indices = best_of_each_group(chosen, spec.groups.count, k)
        else:
            if spec.groups is not None:
                chosen = limit_to_groups(chosen, spec.groups)
            indices = mx.stop_gradient(mx.argpartition(-chosen, kth=k - 1, axis=-1)[..., :k])
        weights = mx.take_along_axis(scores, indices, axis=-1)
        return indices, weights if spec.order == "score_then_topk" else score(weights)


class BoundRouter:
    """A router's steps with its leaves; made by :meth:`Router.bind`.

    Args:
        router: what the steps are.
        moe: where the leaves are; its training mode is the router's.
    """

    def __init__(self, router: Router, moe: nn.Module) -> None:
        spec = router.spec
        self._router, self._one_row = router, 0 if moe.training else router.dims
        self._matrix = find(moe, spec.path)
        # An array may stand in a leaf of MLX's, whose writes nobody notices, so it is read at each call.
        self._bias = _holder(moe, router.bias_path)
        self._scales = _holder(moe, spec.expert_scale)
        self._before = self._bind_input(_holder(moe, spec.input_norm))
        after: list[_Step] = []
        if spec.multiplier != 1.0:
            after.append(lambda logits: logits * spec.multiplier)
        if spec.temperature != 1.0:
            after.append(lambda logits: logits / spec.temperature)
        if spec.softcap:
            after.append(lambda logits: spec.softcap * mx.tanh(logits / spec.softcap))
        widen: list[_Step] = [_widen] if spec.score_dtype == "float32" else []
        # The launch widens logits itself where nothing else is done to them, which saves an operation.
        plain = spec.multiplier == 1.0 and not spec.softcap
        # Router logits ``[..., E]`` for ``x`` ``[..., D]``, in the type that scores are computed in.
        self.logits = self._product([*widen, *after])
        self._logits_alone = self._product([*([] if plain else widen), *after])
        # Nothing is to be widened of a float32 row.
        bare = not after and self._before in (None, _widen)
        self._bare = bare
        self._logits_on_row = on_row(self._matrix if bare else self._logits_alone)

    def _bind_input(self, norm: tuple[nn.Module, str] | None) -> _Step | None:
        spec, factor, eps = self._router.spec, self._router.dims**-0.5, self._router.eps
        wide = spec.dtype == "float32"
        if norm is None:
            return _widen if wide else None
        holder, leaf = norm

        def normed(x: mx.array) -> mx.array:
            x = mx.fast.rms_norm(x, (holder[leaf] * factor).astype(x.dtype), eps)
            return x.astype(mx.float32) if wide else x

        return normed

    def _product(self, after: list[_Step]) -> _Step:
        matrix, before = self._matrix, self._before
        if before is None and not after:
            alone: _Step = matrix
            return alone

        def product(x: mx.array) -> mx.array:
            logits: mx.array = matrix(x if before is None else before(x))
            for step in after:
                logits = step(logits)
            return logits

        return product

    def __call__(self, x: mx.array) -> tuple[mx.array, mx.array]:
        """Experts and their weights for each token, on the device in use.

        Returns:
            Indices ``[..., K]`` in no particular order, and weights ``[..., K]`` in float32.
        """
        return self.on(current_device(), x)

    def on(self, device: Device, x: mx.array) -> tuple[mx.array, mx.array]:
        """As the call, on a device that is known."""
        bias = None if self._bias is None else self._bias[0][self._bias[1]]
        if x.size == self._one_row:
            run = self._router.one_launch(device)
            if not isinstance(run, Decline):
                routed = run(self._logits_alone(x), bias)
                if not isinstance(routed, Decline):
                    return routed
        return self.plain(self.logits(x), bias)

    def on_row(self, row: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
        """As the call on the CPU for one float32 row [1, D] in memory, to ``[1, K]`` each (uint32, float32).

        None, and nothing counted, where the call has to be made.

        Raises:
            NarrowError: likewise, where the logits are no float32.
        """
        run = self._router.one_launch("cpu") if row.size == self._one_row else None
        if not isinstance(run, Routed):
            return None
        tilt = NO_TILT if self._bias is None else run.tilt(self._bias[0][self._bias[1]])
        return None if tilt is None else run.on_row(self._logits_on_row(row)[0], tilt)

    def in_memory(self) -> tuple[Any, Any, tuple[nn.Module, str] | None]:
        """The matrix where its products are the logits, what picks on the CPU, and where a bias for it is."""
        return self._matrix if self._bare else None, self._router.one_launch("cpu"), self._bias

    def plain(self, logits: mx.array, bias: mx.array | None) -> tuple[mx.array, mx.array]:
        """The steps after the logits in plain MLX, for any number of rows."""
        router, spec = self._router, self._router.spec
        if router.select is not None:
            indices, weights = router.select(logits=logits, top_k=router.top_k, options=spec.options)
        else:
            indices, weights = router.pick(logits, bias)
        weights = normalise(weights, spec.renormalize).astype(mx.float32)
        if spec.scale != 1.0:
            weights = weights * spec.scale
        if self._scales is not None:
            holder, leaf = self._scales
            weights = weights * holder[leaf][indices].astype(mx.float32)
        return indices, weights


_Step = Callable[[mx.array], mx.array]


def _widen(t: mx.array) -> mx.array:
    return t.astype(mx.float32)


def _holder(moe: nn.Module, path: str | None) -> tuple[nn.Module, str] | None:
    """The module that holds an array, and the array's name in it."""
    if not path:
        return None
    above, _, leaf = path.rpartition(".")
    return find(moe, above), leaf


def limit_to_groups(scores: mx.array, spec: GroupsSpec) -> mx.array:
    """Scores ``[..., E]`` with -inf for experts outside the best groups (DeepSeek-V3, section 2.1.2)."""
    if not spec.enabled or spec.count <= 1 or spec.keep >= spec.count:
        return scores
    grouped = mx.unflatten(scores, -1, (spec.count, -1))
    size = grouped.shape[-1]
    best = min(2, size) if spec.score == "top2" else 1
    group = mx.topk(grouped, best, axis=-1).sum(axis=-1) if best < size else grouped.sum(axis=-1)
    if spec.score == "max":
        group = grouped.max(axis=-1)
    count = spec.count - spec.keep
    dropped = mx.stop_gradient(mx.argpartition(group, kth=count - 1, axis=-1)[..., :count])
    excluded = mx.array(-mx.inf if spec.excluded == "never" else 0.0, grouped.dtype)
    grouped = mx.put_along_axis(grouped, dropped[..., None], excluded, axis=-2)
    return grouped.flatten(-2)


def best_of_each_group(scores: mx.array, groups: int, top_k: int) -> mx.array:
    """Indices ``[..., K]`` of the ``K / N`` best of each of N groups (Pangu Pro MoE, arXiv 2505.21411)."""
    grouped, each = mx.unflatten(scores, -1, (groups, -1)), top_k // groups
    size = grouped.shape[-1]
    best = mx.argpartition(-grouped, kth=each - 1, axis=-1)[..., :each]
    first = (mx.arange(groups, dtype=best.dtype) * size)[:, None]
    return mx.stop_gradient((best + first).flatten(-2))


def normalise(weights: mx.array, spec: RenormalizeSpec | None) -> mx.array:
    """Weights ``[..., K]`` divided by their norm, where the family does so; all zero where the norm is."""
    if spec is None or not spec.enabled or (spec.skip_single and weights.shape[-1] == 1):
        return weights
    if spec.p == 1.0:
        total = weights.sum(axis=-1, keepdims=True)
    else:
        total = (mx.abs(weights) ** spec.p).sum(axis=-1, keepdims=True) ** (1.0 / spec.p)
    if spec.clamp:
        total = mx.maximum(total, spec.clamp)
    if spec.eps:
        return weights / (total + spec.eps)
    # All scores may underflow: the originals divide 0 by 0 there.
    return weights / mx.where(total == 0, 1, total)
