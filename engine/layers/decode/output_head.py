"""The output head: hidden states to logits, and the piece of a token that normalises and multiplies at once.

Legend: D model width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_experts.engine.kernels.expert_weights import Stack, dtype_name
from mlx_experts.engine.kernels.gpu.pieces import row_product
from mlx_experts.engine.kernels.gpu.pieces.packed import Value
from mlx_experts.engine.kernels.gpu.pieces.row_product import Product, RowProduct
from mlx_experts.engine.kernels.gpu.pieces.tensor_rows import TensorCut
from mlx_experts.engine.kernels.request import Decline, Device
from mlx_experts.engine.layers.decode.matrices import dense, launched, norm_of, tied, unread
from mlx_experts.engine.layers.decode.steps import Run


@dataclass(frozen=True, eq=False)
class OutputHead:
    """Hidden states ``[B, L, D]`` behind the final norm to logits ``[B, L, V]``.

    Args:
        name: module path, for the trace.
        matrix: a linear layer, or the embedding that serves as one.
        tied: whether it is the embedding.
        norm: one inside the head, before its product, or None.
        bias: of a tied head, as the module that holds it; None without.
        multiplier: factor on the logits.
        divisor: of the logits.
        softcap: ``cap * tanh(logits / cap)``; 0 for none.
    """

    name: str
    matrix: Any
    tied: bool = False
    norm: Any = None
    bias: Any = None
    multiplier: float = 1.0
    divisor: float = 1.0
    softcap: float = 0.0

    @cached_property
    def _product(self) -> Any:
        return self.matrix.as_linear if self.tied else self.matrix

    @property
    def modules(self) -> list[nn.Module]:
        """The modules whose arrays the logits depend on."""
        return [m for m in (self.matrix, self.norm, self.bias) if m is not None]

    def __call__(self, h: mx.array) -> mx.array:
        """The logits in plain MLX."""
        y: mx.array = self._product(h if self.norm is None else self.norm(h))
        if self.bias is not None:
            y = y + self.bias["bias"]
        if self.multiplier != 1.0:
            y = y * self.multiplier
        if self.divisor != 1.0:
            y = y / self.divisor
        if self.softcap:
            y = mx.tanh(y / self.softcap) * self.softcap
        return y

    def prepare(
        self, final: nn.Module | None, added: float | None, device: Device, dtype: mx.Dtype
    ) -> Run | Decline:
        """One launch from the last layer's row to the logits: ``(h, x[, branch])`` to ``[1, 1, V]``.

        Args:
            final: the norm behind the last layer, or None. ``h`` is the row behind it, which is not read.
            added: factor on the branch that is not yet added; None: there is none.
        """
        if device != "cuda":
            return Decline("device", "an NVIDIA GPU", device, "The head runs in plain MLX.")
        norms = [norm for norm in (final, self.norm) if norm is not None]
        if len(norms) > 1:
            return Decline("norm", "one norm", "two", "The head runs in plain MLX.")
        norm = norm_of(norms[0]) if norms else None
        if norms and norm is None:
            return Decline("norm", "an RMS norm", type(norms[0]).__name__, "The head runs in plain MLX.")
        stack = self._stack()
        if stack is None:
            return unread(self.name)
        p, wanted = stack.projection, dtype_name(dtype)
        stored = p.dtype if p.format in ("affine", "plain") else wanted
        found = {stored} if stack.bias is None else {stored, dtype_name(stack.bias.dtype)}
        if found != {wanted}:
            return Decline("dtype", wanted, ", ".join(sorted(found)), "MLX widens the logits.")
        product = Product(stack, factor=self.multiplier / self.divisor, softcap=self.softcap)
        asked = RowProduct(p.cols, (product,), norm, added=added)
        objection = row_product.check(asked)
        if objection is not None:
            return objection
        if not isinstance(row_product.choose(asked, device, dtype), TensorCut):
            return Decline("size", "a large matrix of 16-bit inputs", p.storage, "MLX's product is as fast.")
        backend = row_product.backend_of(device)
        piece = row_product.build(asked, backend, device, dtype, label="output_head")

        def run(modules: Sequence[Any], h: Value, x: Value, *rest: Value) -> tuple[Value, ...]:
            return (launched(piece, {"x": x, **({"branch": rest[0]} if rest else {})})["y0"],)

        return run

    def _stack(self) -> Stack | None:
        stack = tied(self.matrix) if self.tied else dense(self.matrix)
        return stack if stack is None or self.bias is None else replace(stack, bias=self.bias["bias"])
