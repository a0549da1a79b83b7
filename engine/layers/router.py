"""The router: named steps from logits to experts and weights, once, in plain MLX.

Legend: E experts, K experts per token, N groups.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_experts.engine.dispatch.expert_dispatch import current_device
from mlx_experts.engine.dispatch.router_eligibility import RoutedRun, prepare
from mlx_experts.engine.kernels.request import Decline, Device
from mlx_experts.engine.layers.module_tree import find, place
from mlx_experts.plugins.manager import components
from mlx_experts.registry.spec.family import GroupsSpec, NormaliseSpec, RouterSpec


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
    """``sqrt(log(1 + exp(x)))``, computed without overflow."""
    return mx.sqrt(mx.logaddexp(logits, 0.0))


SCORES: dict[str, Callable[[mx.array], mx.array]] = {
    "softmax": softmax,
    "sigmoid": mx.sigmoid,
    "sqrtsoftplus": sqrtsoftplus,
}


class Router:
    """Builds a router's leaves inside an MoE module and routes with them.

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
        self._runs: dict[Device, RoutedRun | Decline] = {}
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
        self.fused, self._runs = fused, {}

    def build(self, moe: nn.Module) -> None:
        """Place the router's leaves in ``moe``."""
        spec = self.spec
        linear = nn.Linear if spec.form == "linear" else BareLinear
        place(moe, spec.path, linear(self.dims, self.experts, bias=spec.bias))
        if self.bias_path:
            place(moe, self.bias_path, mx.zeros((self.experts,), dtype=mx.float32))
        if spec.input_norm:
            place(moe, spec.input_norm, mx.ones((self.dims,)))
        if spec.expert_scale:
            place(moe, spec.expert_scale, mx.ones((self.experts,)))

    def matrix(self, moe: nn.Module) -> mx.array:
        """The router's float matrix, or its scales where it is quantised."""
        module = find(moe, self.spec.path)
        values: mx.array = module["scales"] if "scales" in module else module["weight"]
        return values

    def logits(self, moe: nn.Module, x: mx.array, *, widen: bool = True) -> mx.array:
        """Router logits ``[..., E]`` for ``x`` ``[..., D]``, in the type that scores are computed in.

        Args:
            widen: False leaves the product's type where nothing else is done to it.
        """
        spec = self.spec
        plain = spec.multiplier == 1.0 and not spec.softcap
        if spec.input_norm:
            scale = find(moe, spec.input_norm)
            x = mx.fast.rms_norm(x, (scale * self.dims**-0.5).astype(x.dtype), self.eps)
        matrix = find(moe, spec.path)
        logits = matrix(x.astype(mx.float32) if spec.dtype == "float32" else x)
        if spec.score_dtype == "float32" and (widen or not plain):
            logits = logits.astype(mx.float32)
        if spec.multiplier != 1.0:
            logits = logits * spec.multiplier
        if spec.temperature != 1.0:
            logits = logits / spec.temperature
        if spec.softcap:
            logits = spec.softcap * mx.tanh(logits / spec.softcap)
        return logits

    def __call__(self, moe: nn.Module, x: mx.array) -> tuple[mx.array, mx.array]:
        """Experts and their weights for each token.

        Returns:
            Indices ``[..., K]`` in no particular order, and weights ``[..., K]`` in float32.
        """
        spec = self.spec
        if x.size == self.dims and not moe.training:
            run = self._one_launch()
            if not isinstance(run, Decline):
                # The launch widens logits itself, which saves an operation.
                logits = self.logits(moe, x, widen=False)
                routed = run(logits, find(moe, self.bias_path) if self.bias_path else None)
                if not isinstance(routed, Decline):
                    return routed
        logits = self.logits(moe, x)
        if self.select is not None:
            indices, weights = self.select(logits=logits, top_k=self.top_k, options=spec.options)
        else:
            bias = find(moe, self.bias_path) if self.bias_path else None
            indices, weights = self.pick(logits, bias)
        weights = normalise(weights, spec.normalise).astype(mx.float32)
        if spec.scale != 1.0:
            weights = weights * spec.scale
        if spec.expert_scale:
            weights = weights * find(moe, spec.expert_scale)[indices].astype(mx.float32)
        return indices, weights

    def _one_launch(self) -> RoutedRun | Decline:
        """The fused router of the device in use, decided once for each."""
        device, runs = current_device(), self._runs
        run = runs.get(device)
        if run is None:
            run = runs[device] = prepare(self.spec, self.experts, self.top_k, device, self.fused)
        return run

    def pick(self, logits: mx.array, bias: mx.array | None) -> tuple[mx.array, mx.array]:
        """Top-k selection; weights are gathered from the scores without the selection bias."""
        spec, k = self.spec, self.top_k
        score = SCORES[spec.score]
        scores = score(logits) if spec.order == "score_then_topk" else logits
        chosen = scores if bias is None else scores.astype(mx.float32) + bias
        if spec.groups is not None:
            chosen = limit_to_groups(chosen, spec.groups)
        indices = mx.stop_gradient(mx.argpartition(-chosen, kth=k - 1, axis=-1)[..., :k])
        weights = mx.take_along_axis(scores, indices, axis=-1)
        return indices, weights if spec.order == "score_then_topk" else score(weights)


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
    grouped = mx.put_along_axis(grouped, dropped[..., None], mx.array(-mx.inf, grouped.dtype), axis=-2)
    return grouped.flatten(-2)


def normalise(weights: mx.array, spec: NormaliseSpec | None) -> mx.array:
    """Weights ``[..., K]`` divided by their norm, where the family does so."""
    if spec is None or not spec.enabled or (spec.skip_single and weights.shape[-1] == 1):
        return weights
    if spec.p == 1.0:
        total = weights.sum(axis=-1, keepdims=True)
    else:
        total = (mx.abs(weights) ** spec.p).sum(axis=-1, keepdims=True) ** (1.0 / spec.p)
    if spec.clamp:
        total = mx.maximum(total, spec.clamp)
    return weights / (total + spec.eps if spec.eps else total)
