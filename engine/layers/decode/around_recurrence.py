"""The pieces of a layer around a mixer that remembers arrays: projections before, what mixes, output after.

Nothing of it is a call: the memory goes through the pieces as values, so that neighbours merge.
Legend: D model width. A token's row is ``[1, 1, D]``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_experts.engine.kernels.gpu.joined import Joined
from mlx_experts.engine.kernels.gpu.pieces import delta_step, row_product
from mlx_experts.engine.kernels.gpu.pieces.row_product import Product, RowProduct
from mlx_experts.engine.kernels.request import Decline, Device
from mlx_experts.engine.layers.base_mixer import RecurrentMixer
from mlx_experts.engine.layers.decode.around_attention import output_of
from mlx_experts.engine.layers.decode.matrices import dense, launched, norm_of, on_gpu, unread
from mlx_experts.engine.layers.decode.steps import Pure, Run
from mlx_experts.engine.layers.decode.watched import Watched
from mlx_experts.engine.layers.module_tree import find


def memory_names(at: int, mixer: RecurrentMixer) -> tuple[str, ...]:
    """Names of the values that a layer remembers, in the order of its cache."""
    return tuple(f"m{at}.{i}" for i in range(len(mixer.make_cache().cache)))


class AroundRecurrence:
    """The steps of one layer's recurrent branch.

    Args:
        at: index of the layer.
        norm: before the mixer, or None.
        mixer: its module.
        post: norm of the branch, or None.
        factor: on the branch when it is added.
        added: factor on the branch ``b`` of the layer before, which is not yet added; None: there is none.
        joined: arrays of the mixer that lie in one.
    """

    def __init__(
        self,
        at: int,
        norm: nn.Module | None,
        mixer: RecurrentMixer,
        post: nn.Module | None,
        factor: float,
        added: float | None,
        joined: Sequence[Joined] = (),
    ) -> None:
        self.norm, self.mixer, self.post, self.factor, self.added = norm, mixer, post, factor, added
        self.joined, self.memory = joined, memory_names(at, mixer)
        self.linears = [find(mixer, path) for path in mixer.inputs]
        self.out = find(mixer, mixer.output)

    def steps(self, device: Device, dtype: mx.Dtype) -> list[Pure]:
        """Before, the mixing, after."""
        branch, stream = ((), ()) if self.added is None else (("b",), ("x",))
        rows = tuple(f"r{i}" for i in range(len(self.linears)))
        norms = [] if self.norm is None else [self.norm]
        posts = [] if self.post is None else [self.post]
        return [
            Pure.of(
                "projections",
                ("x", *branch),
                (*stream, *rows),
                Watched(*norms, *self.linears),
                self._plain_before,
                lambda: on_gpu(device) or self._prepare_before(device, dtype),
            ),
            Pure.of(
                "recurrence",
                (*rows, *self.memory),
                ("a", *self.memory),
                Watched(self.mixer, without=[*self.linears, self.out]),
                self._plain_mix,
                lambda: on_gpu(device) or self._prepare_mix(device, dtype),
            ),
            Pure.of(
                "output",
                ("a", "x"),
                ("x",),
                Watched(self.out, *posts),
                self._plain_after,
                lambda: on_gpu(device) or self._prepare_after(device, dtype),
            ),
        ]

    def _plain_before(self, modules: Sequence[Any], x: mx.array, *rest: mx.array) -> tuple[mx.array, ...]:
        norms, linears = modules[: -len(self.linears)], modules[-len(self.linears) :]
        if self.added is not None:
            x = x + (rest[0] if self.added == 1.0 else rest[0] * self.added)
        n = norms[0](x) if norms else x
        rows = tuple(linear(n) for linear in linears)
        return rows if self.added is None else (x, *rows)

    def _plain_mix(self, modules: Sequence[Any], *given: mx.array) -> tuple[mx.array, ...]:
        count = len(self.linears)
        return tuple(modules[0].step(given[:count], given[count:]))

    def _plain_after(self, modules: Sequence[Any], a: mx.array, x: mx.array) -> tuple[mx.array, ...]:
        out, *post = modules
        y = out(a)
        for norm in post:
            y = norm(y)
        return (x + (y if self.factor == 1.0 else y * self.factor),)

    def _prepare_before(self, device: Device, dtype: mx.Dtype) -> Run | Decline:
        norm = None if self.norm is None else norm_of(self.norm)
        if self.norm is not None and norm is None:
            return Decline("norm", "an RMS norm", type(self.norm).__name__, "It runs in plain MLX.")
        products = []
        for path, linear in zip(self.mixer.inputs, self.linears, strict=True):
            stack = dense(linear)
            if stack is None:
                return unread(path)
            products.append(Product(stack))
        asked = RowProduct(products[0].stack.projection.cols, tuple(products), norm, added=self.added)
        objection = row_product.check(asked)
        if objection is not None:
            return objection
        backend = row_product.backend_of(device)
        product = row_product.build(asked, backend, device, dtype, join=True).reading(self.joined)

        def run(modules: Sequence[Any], x: mx.array, *rest: mx.array) -> tuple[mx.array, ...]:
            made = launched(product, {"x": x, "branch": rest[0] if rest else x})
            rows = tuple(made[f"y{i}"] for i in range(len(products)))
            return rows if self.added is None else (made["stream"], *rows)

        return run

    def _prepare_mix(self, device: Device, dtype: mx.Dtype) -> Run | Decline:
        step = self.mixer.delta_step()
        if step is None:
            return Decline(
                "mixer", "a gated delta net", type(self.mixer).__name__, "MLX compiles what it mixes."
            )
        objection = delta_step.check(step)
        if objection is not None:
            return objection
        piece = delta_step.build(step, row_product.backend_of(device), device, dtype, join=True)
        return lambda modules, *given: tuple(piece(*given))

    def _prepare_after(self, device: Device, dtype: mx.Dtype) -> Run | Decline:
        stack = dense(self.out)
        if stack is None:
            return unread(self.mixer.output)
        asked = RowProduct(stack.projection.cols, (Product(stack),))
        return output_of(asked, device, dtype, self.joined, self.post is not None, self.factor)
