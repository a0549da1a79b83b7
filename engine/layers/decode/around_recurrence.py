"""The pieces of a layer around a mixer that remembers arrays: projections before, what mixes, output after.

Nothing of it is a call: the memory goes through the pieces as values, so that neighbours merge.
Legend: D model width. A token's row is ``[1, 1, D]``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from mlx_experts.engine.kernels.gpu.pieces import delta_step, row_product
from mlx_experts.engine.kernels.gpu.pieces.packed import Value
from mlx_experts.engine.kernels.gpu.pieces.row_product import Product, RowProduct
from mlx_experts.engine.kernels.request import Decline, Device
from mlx_experts.engine.layers.base_mixer import RecurrentMixer
from mlx_experts.engine.layers.decode.branch import MixerBranch
from mlx_experts.engine.layers.decode.matrices import dense, launched, on_gpu, unread
from mlx_experts.engine.layers.decode.steps import Pure, Run
from mlx_experts.engine.layers.decode.watched import Watched
from mlx_experts.engine.layers.module_tree import find


def memory_names(at: int, mixer: RecurrentMixer) -> tuple[str, ...]:
    """Names of the values that a layer remembers, in the order of its cache."""
    return tuple(f"m{at}.{i}" for i in range(len(mixer.make_cache().cache)))


class AroundRecurrence:
    """The steps of one layer's recurrent branch.

    Args:
        branch: the mixer between its norms.
    """

    def __init__(self, branch: MixerBranch) -> None:
        self.branch = branch
        self.mixer: RecurrentMixer = branch.mixer
        mixer = self.mixer
        self.memory = memory_names(branch.at, mixer)
        self.linears = [find(mixer, path) for path in mixer.inputs]
        self.out = find(mixer, mixer.output)

    def steps(self, device: Device, dtype: mx.Dtype) -> list[Pure]:
        """Before, the mixing, after."""
        branch = self.branch
        rows = tuple(f"r{i}" for i in range(len(self.linears)))
        return [
            Pure.of(
                "projections",
                branch.reads,
                (*branch.stream, *rows),
                Watched(*branch.norms, *self.linears),
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
                branch.outputs,
                Watched(self.out, *branch.posts),
                self._plain_after,
                lambda: on_gpu(device) or self._prepare_after(device, dtype),
            ),
        ]

    def _plain_before(self, modules: Sequence[Any], x: mx.array, *rest: mx.array) -> tuple[mx.array, ...]:
        norms, linears = modules[: -len(self.linears)], modules[-len(self.linears) :]
        x = self.branch.summed(x, *rest)
        n = norms[0](x) if norms else x
        return self.branch.behind(x, [linear(n) for linear in linears])

    def _plain_mix(self, modules: Sequence[Any], *given: mx.array) -> tuple[mx.array, ...]:
        count = len(self.linears)
        return tuple(modules[0].step(given[:count], given[count:]))

    def _plain_after(self, modules: Sequence[Any], a: mx.array, x: mx.array) -> tuple[mx.array, ...]:
        out, *posts = modules
        return self.branch.joins(x, out(a), posts)

    def _prepare_before(self, device: Device, dtype: mx.Dtype) -> Run | Decline:
        norm = self.branch.rms_norm()
        if isinstance(norm, Decline):
            return norm
        products = []
        for path, linear in zip(self.mixer.inputs, self.linears, strict=True):
            stack = dense(linear)
            if stack is None:
                return unread(path)
            products.append(Product(stack))
        branch, width = self.branch, products[0].stack.projection.cols
        product = branch.launch(RowProduct(width, tuple(products), norm, added=branch.added), device, dtype)
        if isinstance(product, Decline):
            return product

        def run(modules: Sequence[Any], x: Value, *rest: Value) -> tuple[Value, ...]:
            made = launched(product, {"x": x, "branch": rest[0] if rest else x})
            return branch.behind(made.get("stream", x), [made[f"y{i}"] for i in range(len(products))])

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
        return lambda modules, *given: tuple(piece.left(*given).values())

    def _prepare_after(self, device: Device, dtype: mx.Dtype) -> Run | Decline:
        stack = dense(self.out)
        if stack is None:
            return unread(self.mixer.output)
        return self.branch.output(RowProduct(stack.projection.cols, (Product(stack),)), device, dtype)
