"""The pieces of a layer around latent attention: projections and latents before, values and output after.

Legend: D model width, h heads, r and v widths of a head with position and of values, c latent width. A row of
a token is ``[1, 1, D]``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache

from mlx_experts.engine.kernels.gpu.pieces import head_product, head_turns, row_product
from mlx_experts.engine.kernels.gpu.pieces.head_product import HeadProduct
from mlx_experts.engine.kernels.gpu.pieces.packed import PackedValue, Value, viewed
from mlx_experts.engine.kernels.gpu.pieces.piece import Piece
from mlx_experts.engine.kernels.gpu.pieces.row_product import Heads, Product, RowProduct, Turn
from mlx_experts.engine.kernels.request import Decline, Device
from mlx_experts.engine.layers.decode.around_attention import extended
from mlx_experts.engine.layers.decode.branch import MixerBranch
from mlx_experts.engine.layers.decode.matrices import dense, launched, norm_of, of_each_head, on_gpu, unread
from mlx_experts.engine.layers.decode.steps import Call, Pure, Run, Values
from mlx_experts.engine.layers.decode.watched import Watched
from mlx_experts.engine.layers.forward_context import ForwardState
from mlx_experts.engine.layers.mixers.mla import LatentAttention, remember
from mlx_experts.engine.layers.module_tree import find


def eligible(mixer: LatentAttention) -> Decline | None:
    """Why this mixer runs as a whole and not between two pieces, or None."""
    spec = mixer._spec
    if spec.sources is not None:
        return Decline("latents", "latents of its own", "latents that layers share", "It runs as it is.")
    if spec.learned_frequencies:
        return Decline("rope", "fixed frequencies", "learned ones", "It runs as it is.")
    if mixer._rope is not None and mixer._rope.fixed is None:
        return Decline("rope", "frequencies that no length changes", "others", "It runs as it is.")
    return None


class AroundLatents:
    """The steps of one layer's branch of latent attention.

    Args:
        branch: the attention between its norms.
    """

    def __init__(self, branch: MixerBranch) -> None:
        self.branch, self.at = branch, branch.at
        self.mixer: LatentAttention = branch.mixer
        mixer = self.mixer
        spec = mixer._spec
        self.gate = spec.gate if spec.gate is not None and spec.gate.enabled else None
        # What reads the normed row: queries, latents, and the logits of a gate.
        own = () if self.gate is None or self.gate.path is None else (self.gate.path,)
        self.inputs = ("q_a_proj" if spec.q_rank else "q_proj", "kv_a_proj_with_mqa", *own)
        self.out = find(mixer, spec.out)

    def steps(self, device: Device, dtype: mx.Dtype) -> list[Pure | Call]:
        """Before, the attention itself, after."""
        gate = ("g",) if self.gate is not None else ()
        branch, up = self.branch, self.mixer.unembed_out
        before = Pure.of(
            "projections",
            (*branch.reads, f"p{self.at}"),
            (*branch.stream, "q", "qr", "l", "kr", *gate),
            Watched(*branch.norms, self.mixer, without=[self.out, up]),
            self._plain_before,
            lambda: on_gpu(device) or self._prepare_before(device, dtype),
        )
        after = Pure.of(
            "output",
            ("a", *gate, "x"),
            branch.outputs,
            Watched(self.mixer, *branch.posts, without=self._others()),
            self._plain_after,
            lambda: on_gpu(device) or self._prepare_after(device, dtype),
        )
        return [before, Call(("q", "qr", "l", "kr", "row"), ("a",), self._attend()), after]

    def _others(self) -> list[nn.Module]:
        kept = (self.out, self.mixer.unembed_out)
        return [m for m in self.mixer.values() if isinstance(m, nn.Module) and all(m is not k for k in kept)]

    def _attend(self) -> Any:
        mixer, at, window = self.mixer, self.at, self.mixer._spec.window or None

        usual = window is None and bool(mixer.rope_dim)

        def attend(values: Values, state: ForwardState, caches: Sequence[Any]) -> None:
            cache, mask = caches[at], None
            if usual and type(cache) is KVCache:
                latent, key = extended(cache, values["l"], values["kr"])
            else:
                mask = state.attention_mask(values["row"], cache, window)
                latent, key = remember(cache, values["l"], values["kr"])
            values["a"] = mixer.attend_embedded(values["q"], values["qr"], latent, key, mask)

        return attend

    def _finish(self, q: tuple[mx.array, mx.array, mx.array | None], kv: Any, logits: Any) -> Any:
        """Queries as latents, their rotated part times the scale, latent and key, and the gate's logits."""
        nope, rope, packed = q
        made = (self.mixer.embed_q(nope), rope * self.mixer.scale, *kv)
        return made if self.gate is None else (*made, logits if packed is None else packed)

    def _plain_before(self, modules: Sequence[Any], x: mx.array, *rest: mx.array) -> tuple[mx.array, ...]:
        *norms, mixer = modules
        offset = rest[-1][:1]
        x = self.branch.summed(x, *rest)
        n = norms[0](x) if norms else x
        rows = [find(mixer, path)(n) for path in self.inputs]
        made: tuple[mx.array, ...] = self._finish(
            mixer.queries_of(self._raised(rows[0]), None, offset),
            mixer.latents_of(rows[1], None, offset),
            rows[2] if len(rows) > 2 else None,
        )
        return self.branch.behind(x, made)

    def _raised(self, row: mx.array) -> mx.array:
        """Queries from the first projection's row."""
        if not self.mixer._spec.q_rank:
            return row
        q: mx.array = self.mixer.q_b_proj(self.mixer.query_latent_of(row)[1])
        return q

    def _plain_after(self, modules: Sequence[Any], a: mx.array, *rest: mx.array) -> tuple[mx.array, ...]:
        mixer, *posts = modules
        logits = None
        if self.gate is not None:
            # A packed gate has the queries' order, [1, h, 1, v]; a projected one is a row.
            logits = rest[0].swapaxes(1, 2) if rest[0].ndim == 4 else rest[0]
        return self.branch.joins(rest[-1], mixer.output_of(mixer.unembed_out(a), logits), posts)

    def _heads(self) -> Heads | None:
        """The rotation of queries inside the launch that makes them; None where MLX does more to them.

        The rotated part is what the scale of the scores multiplies, too.
        """
        mixer, spec = self.mixer, self.mixer._spec
        scaled = spec.temperature is not None and spec.temperature.enabled
        if mixer._packed or scaled or spec.position_scale is not None or mixer._rope is None:
            return None
        rope, fixed = mixer._rope, mixer._rope.fixed
        assert fixed is not None
        factor = fixed.factor * mixer.scale
        turn = Turn(fixed.inverse, rope.dims, rope.traditional, factor, first=mixer.nope_dim)
        heads = Heads(mixer.nope_dim + mixer.rope_dim, turn=turn)
        fits = row_product.check_heads(heads, mixer.heads * heads.width) is None
        return heads if fits and heads.width % 16 == 0 and rope.dims == mixer.rope_dim else None

    def _raise(self, heads: Heads | None, device: Device, dtype: mx.Dtype) -> Piece | Decline | None:
        """The launch from a query latent to queries; None where MLX does more between the two matrices."""
        mixer, spec = self.mixer, self.mixer._spec
        if not spec.q_rank or spec.scale_q or spec.raw_latent:
            return None
        norm, stack = norm_of(mixer.q_a_layernorm), dense(mixer.q_b_proj)
        if norm is None or stack is None:
            return None
        product = Product(stack, heads, None if heads is None else heads.width)
        return self.branch.launch(RowProduct(stack.projection.cols, (product,), norm), device, dtype)

    def _latents(self, device: Device, dtype: mx.Dtype) -> Piece | None:
        """The launch that normalises a latent and rotates the key; None where MLX does more to them."""
        mixer, spec = self.mixer, self.mixer._spec
        norm, rope = norm_of(mixer.kv_a_layernorm), mixer._rope
        if norm is None or spec.scale_kv or spec.rope_key_norm is not None or not mixer.rope_dim:
            return None
        turn = None
        if rope is not None:
            assert rope.fixed is not None
            turn = Turn(rope.fixed.inverse, rope.dims, rope.traditional, rope.fixed.factor)
        rows = {
            "l": (Heads(spec.kv_rank, norm), spec.kv_rank),
            "kr": (Heads(mixer.rope_dim, turn=turn), mixer.rope_dim),
        }
        if head_turns.check(rows) is not None:
            return None
        return head_turns.build(rows, row_product.backend_of(device), device, dtype, join=True)

    def _prepare_before(self, device: Device, dtype: mx.Dtype) -> Run | Decline:
        mixer, spec = self.mixer, self.mixer._spec
        branch, norm = self.branch, self.branch.rms_norm()
        if isinstance(norm, Decline):
            return norm
        heads = self._heads()
        products = []
        for i, path in enumerate(self.inputs):
            stack = dense(find(mixer, path))
            if stack is None:
                return unread(path)
            own = heads if i == 0 and not spec.q_rank else None
            products.append(Product(stack, own, None if own is None else own.width))
        width = products[0].stack.projection.cols
        first = branch.launch(RowProduct(width, tuple(products), norm, added=branch.added), device, dtype)
        if isinstance(first, Decline):
            return first
        second = self._raise(heads, device, dtype)
        if isinstance(second, Decline):
            return second
        turned = heads is not None and (second is not None or not spec.q_rank)
        split = self._latents(device, dtype)
        embed = None
        if turned:
            embed = self._of_each_head(mixer.embed_q, mixer.nope_dim + mixer.rope_dim, device, dtype)

        def run(modules: Sequence[Any], x: Value, *rest: Value) -> tuple[Value, ...]:
            position = rest[-1]
            rows = launched(first, {"x": x, "branch": rest[0], "offset": position})
            q = rows["y0"]
            if second is not None:
                q = launched(second, {"x": q, "offset": position})["y0"]
            elif spec.q_rank:
                q = self._raised(viewed(q))
            first_of = viewed(position)[:1]
            row = rows["y1"]
            latents: Any
            if split is not None and isinstance(row, PackedValue):
                parts = {"l": row.part(0, spec.kv_rank), "kr": row.part(spec.kv_rank, mixer.rope_dim)}
                latents = launched(split, {**parts, "offset": position}).values()
            else:
                latents = mixer.latents_of(viewed(row), None, first_of)
            if not turned:
                made = self._finish(mixer.queries_of(viewed(q), None, first_of), latents, rows.get("y2"))
                return branch.behind(rows.get("stream", x), made)
            rope = viewed(q)[..., mixer.nope_dim :]
            if embed is not None:
                q = launched(embed, {"x": q})["y"]
            else:
                q = mixer.embed_q(viewed(q)[..., : mixer.nope_dim])
            made = (q, rope, *latents, *((rows["y2"],) if "y2" in rows else ()))
            return branch.behind(rows.get("stream", x), made)

        return run

    def _prepare_after(self, device: Device, dtype: mx.Dtype) -> Run | Decline:
        mixer, gate = self.mixer, self.gate
        stack = dense(self.out)
        if stack is None:
            return unread(mixer._spec.out)
        asked = RowProduct(
            stack.projection.cols,
            (Product(stack),),
            gate=None if gate is None else gate.function,
            gate_width=1 if gate is None or gate.over == "element" else mixer._spec.v_dim,
        )
        output = self.branch.output(asked, device, dtype)
        if isinstance(output, Decline):
            return output
        values = self._of_each_head(mixer.unembed_out, mixer._spec.kv_rank, device, dtype)

        def run(modules: Sequence[Any], a: Value, *rest: Value) -> tuple[Value, ...]:
            if values is None:
                return output(modules, modules[0].unembed_out(viewed(a)), *rest)
            return output(modules, launched(values, {"x": a})["y"], *rest)

        return run

    def _of_each_head(self, module: nn.Module, pitch: int, device: Device, dtype: mx.Dtype) -> Piece | None:
        """The launch of a linear layer of each head; None where MLX's own takes it."""
        stack = of_each_head(module)
        if stack is None:
            return None
        asked = HeadProduct(stack, pitch)
        if head_product.check(asked) is not None:
            return None
        backend = row_product.backend_of(device)
        return head_product.build(asked, backend, device, dtype, joined=self.branch.joined)
