"""The pieces of a layer's second half: norm, router and selection; experts with what follows; dense MLPs.

Legend: D model width, E experts, K experts per token. A token's row is ``[1, 1, D]``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import mlx.core as mx
import mlx.nn as nn

from mlx_experts.engine.dispatch.expert_dispatch import Decision
from mlx_experts.engine.dispatch.router_eligibility import steps_of
from mlx_experts.engine.kernels import activations, gather
from mlx_experts.engine.kernels.gpu.joined import Joined
from mlx_experts.engine.kernels.gpu.launch_pair import FusedPair
from mlx_experts.engine.kernels.gpu.pieces import routed_experts, routing, row_product
from mlx_experts.engine.kernels.gpu.pieces.packed import Value, viewed
from mlx_experts.engine.kernels.gpu.pieces.piece import Piece
from mlx_experts.engine.kernels.gpu.pieces.row_product import Product, RowProduct
from mlx_experts.engine.kernels.request import Decline, Device
from mlx_experts.engine.layers.decode.branch import add
from mlx_experts.engine.layers.decode.matrices import (
    dense,
    launched,
    norm_of,
    on_gpu,
    unread,
)
from mlx_experts.engine.layers.decode.steps import Pure, Run
from mlx_experts.engine.layers.decode.watched import Watched
from mlx_experts.engine.layers.mlp import MLP
from mlx_experts.engine.layers.module_tree import find
from mlx_experts.engine.layers.moe import MoE

_V = TypeVar("_V")


class AroundExperts:
    """The steps of one layer's MoE block.

    Args:
        norm: before the block, or None.
        moe: the block, whose routed sum is the experts' own.
        after: norms of the branch, in order.
        shared: a shared expert that lives in the layer.
        added: factor on the branch ``b`` that is not yet added; None: there is none.
        joined: arrays of these modules that lie in one.
        zeroed: the piece before leaves zeros ``z`` for the routing launch to count with.
    """

    def __init__(
        self,
        norm: nn.Module | None,
        moe: MoE,
        after: Sequence[nn.Module],
        shared: nn.Module | None,
        added: float | None,
        joined: Sequence[Joined] = (),
        zeroed: bool = False,
    ) -> None:
        self.joined, self.zeroed = joined, zeroed
        self.norm, self.moe, self.after, self.lent, self.added = norm, moe, list(after), shared, added
        self.container = find(moe, moe.experts_path)
        self.shared = shared or (find(moe, moe._shared.path) if moe._shared is not None else None)
        self.router = moe._router

    def steps(self, device: Device, dtype: mx.Dtype) -> list[Pure] | Decline:
        """Routing and experts, or why the block runs as a whole."""
        moe, width = self.moe, self.router.dims
        if type(moe) is not MoE or not moe.plain or moe.biased:
            return Decline("block", "experts whose sum is the block's", "more steps", "It runs as it is.")
        if moe.slots is not None:
            return Decline(
                "expert memory", "experts in memory", "slots", "What is picked is looked up first."
            )
        if moe.observed:
            return Decline("observer", "none", "one", "Whoever counts the picks sees them layer by layer.")
        beside = moe.beside(self.shared) if self.shared is not None else None
        sample = mx.zeros((1, 1, width), dtype)
        decide = partial(moe._dispatch.decide, self.container, sample, 1, self.router.top_k, device, beside)
        decision = decide()
        if decision.run is None or decision.tally.key.reason != device:
            found = decision.tally.note or "another kernel"
            return Decline(decision.tally.key.reason, "the fused experts", found, "See the trace.")
        branch, stream = ((), ()) if self.added is None else (("b",), ("x",))
        kept = [m for m in (self.norm, moe) if m is not None]
        lone = [m for m in (self.container, self.shared) if m is not None]
        others = [*([] if self.lent is None else [self.lent]), *self.after]
        both = Pure.of(
            "router and experts",
            ("x", *branch, *(("z",) if self.zeroed else ())),
            (*stream, "b"),
            Watched(*kept, *others),
            partial(self._plain_both, device),
            lambda: self._prepare_both(device, dtype, decide()),
            tallies=(decision.tally,),
        )
        if not isinstance(both.fused, Decline):
            return [both]
        why = both.fused
        route = Pure.of(
            "router",
            ("x", *branch),
            (*stream, "n", "i", "w"),
            Watched(*kept, without=lone),
            partial(self._plain_route, device),
            lambda: why,
        )
        experts = Pure.of(
            "experts",
            ("n", "i", "w"),
            ("b",),
            Watched(moe, *others),
            self._plain_experts,
            lambda: self._prepare_experts(decide()),
            tallies=(decision.tally,),
        )
        return [route, experts]

    def _parts(self, modules: Sequence[Any]) -> tuple[Any, Any]:
        return (None, modules[0]) if self.norm is None else (modules[0], modules[1])

    def _plain_route(self, device: Device, modules: Sequence[Any], x: mx.array, *rest: mx.array) -> Any:
        norm, moe = self._parts(modules)
        x = add(x, rest, self.added)
        n = x if norm is None else norm(x)
        routed = self.router.bind(moe).on(device, n)
        return (n, *routed) if self.added is None else (x, n, *routed)

    def _prepare_route(self, device: Device, dtype: mx.Dtype, state: int = 0) -> Piece | Decline:
        """Norm, router matrix and selection in one launch.

        Args:
            state: words without a value that it leaves for the experts' launch.
        """
        spec = self.router.spec
        if device != "cuda":
            return Decline("device", "cuda", device, "One launch cannot select what others have computed.")
        if spec.input_norm or spec.multiplier != 1.0 or spec.temperature != 1.0 or spec.softcap:
            return Decline("logits", "a product alone", "more steps", "They run in plain MLX.")
        steps = steps_of(spec, self.router.experts, self.router.top_k)
        if isinstance(steps, Decline):
            return steps
        matrix = dense(find(self.moe, spec.path))
        if matrix is None:
            return unread(spec.path)
        norm = None if self.norm is None else norm_of(self.norm)
        if self.norm is not None and norm is None:
            return Decline("norm", "an RMS norm", type(self.norm).__name__, "It runs in plain MLX.")
        objection = routing.check(matrix, norm, steps)
        if objection is not None:
            return objection
        backend = row_product.backend_of(device)
        return routing.build(
            matrix,
            norm,
            steps,
            backend,
            dtype,
            added=self.added,
            join=True,
            joined=self.joined,
            state=state,
        )

    def _prepare_both(self, device: Device, dtype: mx.Dtype, decision: Decision) -> Run | Decline:
        """The experts read what the routing launch wrote as one array."""
        pair, top_k = decision.run, self.router.top_k
        one = pair.one(top_k) if isinstance(pair, FusedPair) else None
        route = self._prepare_route(device, dtype, 0 if one is None else one.words)
        if isinstance(route, Decline):
            return route
        if not isinstance(pair, FusedPair) or route.packed is None:
            return Decline("experts", "two launches of a GPU", "another kernel", "They run apart.")
        if self.shared is not None and not decision.adds_shared:
            return Decline("shared", "an expert that the launches add", "one apart", decision.tally.note)
        bias_path, after = self.router.bias_path, len(self.after)
        pair = replace(pair, joined=self.joined)
        if one is None:
            experts = routed_experts.build(pair, route, top_k)
        else:
            experts = routed_experts.build_one(pair, one, route)

        def run(modules: Sequence[Any], x: Value, *rest: Value) -> tuple[Value, ...]:
            moe = self._parts(modules)[1]
            bias = find(moe, bias_path) if bias_path else None
            zeros = rest[-1] if self.zeroed else routing.zeros(viewed(x))
            given: dict[str, Any] = {"x": x, "branch": rest[0] if rest else None, "bias": bias}
            given["counter"] = zeros
            (routed,) = route.run(*(given[name] for name in route.tokens))
            y = experts(routed)
            for norm in modules[len(modules) - after :]:
                y = norm(viewed(y))
            if self.added is None:
                return (y,)
            return dict(zip(route.outputs, route.values([routed]), strict=True))["stream"], y

        return run

    def _prepare_experts(self, decision: Decision) -> Run | Decline:
        fused, adds_shared = decision.run, decision.adds_shared
        if fused is None:
            return Decline(decision.tally.key.reason, "the fused experts", decision.tally.note, "None.")
        if isinstance(fused, FusedPair):
            fused = replace(fused, joined=self.joined)

        def run(modules: Sequence[Any], n: Value, i: Value, w: Value) -> tuple[Value, ...]:
            n = viewed(n)
            y = fused(n, viewed(i), viewed(w))
            assert not isinstance(y, Decline)
            return (self._finish(modules, y, n, adds_shared),)

        return run

    def _plain_both(
        self, device: Device, modules: Sequence[Any], x: mx.array, *rest: mx.array
    ) -> tuple[mx.array, ...]:
        kept = 1 if self.norm is None else 2
        made = self._plain_route(device, modules[:kept], x, *rest)
        y = self._plain_experts(modules[kept - 1 :], *made[-3:])
        return y if self.added is None else (made[0], *y)

    def _finish(self, modules: Sequence[Any], y: mx.array, n: mx.array, added: bool) -> mx.array:
        moe, rest = modules[0], list(modules[1:])
        lent = rest.pop(0) if self.lent is not None else None
        if self.shared is not None and not added:
            shared = lent if lent is not None else find(moe, moe._shared.path)
            wide = n.astype(mx.float32)
            y = moe.bind_join()(wide, y.astype(mx.float32), shared(wide)).astype(n.dtype)
        for norm in rest:
            y = norm(y)
        return y

    def _plain_experts(
        self, modules: Sequence[Any], n: mx.array, i: mx.array, w: mx.array
    ) -> tuple[mx.array, ...]:
        container = find(modules[0], self.moe.experts_path)
        # With something to add the sum stays in float32, so that the block rounds once.
        rows = n if self.shared is None else n.astype(mx.float32)
        y = gather.experts(container, self.moe.activation, rows, i, w)
        return (self._finish(modules, y, n, False),)


class AroundMLP:
    """The steps of one layer's dense MLP.

    Args:
        norm: before it, or None.
        mlp: its module.
        after: norms of the branch, in order.
        added: factor on the branch ``b`` that is not yet added; None: there is none.
        joined: arrays of these modules that lie in one.
    """

    def __init__(
        self,
        norm: nn.Module | None,
        mlp: MLP,
        after: Sequence[nn.Module],
        added: float | None,
        joined: Sequence[Joined] = (),
    ) -> None:
        self.joined = joined
        self.norm, self.mlp, self.after, self.added = norm, mlp, list(after), added

    def steps(self, device: Device, dtype: mx.Dtype) -> list[Pure]:
        """One piece."""
        branch, stream = ((), ()) if self.added is None else (("b",), ("x",))
        kept = [m for m in (self.norm, self.mlp) if m is not None]
        return [
            Pure.of(
                "mlp",
                ("x", *branch),
                (*stream, "b"),
                Watched(*kept, *self.after),
                self._plain,
                lambda: on_gpu(device) or self._prepare(device, dtype),
            )
        ]

    def _parts(self, modules: Sequence[Any]) -> tuple[Any, Any, list[Any]]:
        if self.norm is None:
            return None, modules[0], list(modules[1:])
        return modules[0], modules[1], list(modules[2:])

    def _result(self, x: _V, y: mx.array, after: Sequence[Any]) -> tuple[_V | mx.array, ...]:
        for norm in after:
            y = norm(y)
        return (y,) if self.added is None else (x, y)

    def _plain(self, modules: Sequence[Any], x: mx.array, *rest: mx.array) -> tuple[mx.array, ...]:
        norm, mlp, after = self._parts(modules)
        x = add(x, rest, self.added)
        return self._result(x, mlp(x if norm is None else norm(x)), after)

    def _prepare(self, device: Device, dtype: mx.Dtype) -> Run | Decline:
        """The launches before and after the activation."""
        mlp, norm = self.mlp, None if self.norm is None else norm_of(self.norm)
        if self.norm is not None and norm is None:
            return Decline("norm", "an RMS norm", type(self.norm).__name__, "It runs in plain MLX.")
        if mlp.scaled:
            return Decline("scale", "the product alone", "a factor on it", "It runs in plain MLX.")
        stacks = {part: dense(module) for part, module in mlp.projections().items()}
        last = stacks.pop("down")
        products = tuple(Product(stack) for stack in stacks.values() if stack is not None)
        if last is None or len(products) < len(stacks):
            return unread("a projection of the MLP")
        width = products[0].stack.projection.cols
        asked = RowProduct(width, products, norm, added=self.added)
        asked_last = RowProduct(last.projection.cols, (Product(last),))
        objection = row_product.check(asked) or row_product.check(asked_last)
        if objection is not None:
            return objection
        backend = row_product.backend_of(device)
        first, second = (
            row_product.build(each, backend, device, dtype, join=True, joined=self.joined)
            for each in (asked, asked_last)
        )

        def run(modules: Sequence[Any], x: Value, *rest: Value) -> tuple[Value, ...]:
            made = launched(first, {"x": x, **({"branch": rest[0]} if rest else {})})
            parts = [viewed(made[f"y{i}"]) for i in range(len(products))]
            if mlp.joined:
                parts = list(mx.split(parts[0], 2, axis=-1))
            gate, up = parts if len(parts) == 2 else (None, parts[0])
            inner = activations.apply(mlp.activation, gate, up)
            y = viewed(launched(second, {"x": inner})["y0"])
            return self._result(made.get("stream", x), y, self._parts(modules)[2])

        return run
