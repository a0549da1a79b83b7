"""The pieces of a layer around its attention: norm, projections and heads before; output and residual after.

Legend: D model width, h query heads, g key-value heads, d head width. A token's row is ``[1, 1, D]``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import scaled_dot_product_attention
from mlx_lm.models.cache import KVCache

from mlx_experts.engine.kernels.expert_weights import Stack
from mlx_experts.engine.kernels.gpu.pieces import head_turns, row_product
from mlx_experts.engine.kernels.gpu.pieces.packed import Value, viewed
from mlx_experts.engine.kernels.gpu.pieces.row_product import Heads, Norm, Product, RowProduct, Turn
from mlx_experts.engine.kernels.request import Decline, Device
from mlx_experts.engine.layers.attention import Attention, query_temperature
from mlx_experts.engine.layers.decode.branch import MixerBranch
from mlx_experts.engine.layers.decode.matrices import dense, launched, norm_of, on_gpu, unread
from mlx_experts.engine.layers.decode.steps import Call, Pure, Run, Values
from mlx_experts.engine.layers.decode.watched import Watched
from mlx_experts.engine.layers.forward_context import ForwardState
from mlx_experts.engine.layers.module_tree import find


def eligible(attention: Any) -> Decline | None:
    """Why this attention runs as a whole and not between two pieces, or None."""
    if type(attention) is not Attention:
        return Decline("mixer", "grouped-query attention", type(attention).__name__, "It runs as it is.")
    spec = attention._spec
    if attention.reuses_kv or spec.reuse_kv_last or spec.share_kv_every:
        return Decline("shared keys", "keys of its own", "keys that layers share", "It runs as it is.")
    return None


class AroundAttention:
    """The steps of one layer's attention branch.

    Args:
        branch: the attention between its norms.
    """

    def __init__(self, branch: MixerBranch) -> None:
        self.branch, self.at = branch, branch.at
        self.attention: Attention = branch.mixer
        attention = self.attention
        spec = attention._spec
        gate = spec.gate if attention._gated else None
        self.gate = gate
        self.out = find(attention, spec.names.o)

    def steps(self, device: Device, dtype: mx.Dtype) -> list[Pure | Call]:
        """Before, the attention itself, after."""
        gate = ("g",) if self.gate is not None else ()
        branch = self.branch
        before = Pure.of(
            "projections",
            (*branch.reads, f"p{self.at}"),
            (*branch.stream, "q", "k", "v", *gate),
            Watched(*branch.norms, self.attention, without=(self.out,)),
            self._plain_before,
            lambda: on_gpu(device) or self._prepare_before(device, dtype),
        )
        others = [
            value
            for value in self.attention.values()
            if isinstance(value, nn.Module) and value is not self.out
        ]
        after = Pure.of(
            "output",
            ("a", *gate, "x"),
            branch.outputs,
            Watched(self.attention, *branch.posts, without=others),
            self._plain_after,
            lambda: on_gpu(device) or self._prepare_after(device, dtype),
        )
        return [before, Call(("q", "k", "v", "row"), ("a",), self._attend()), after]

    def _attend(self) -> Any:
        """The cache and the attention, as they are for any number of tokens."""
        attention, at = self.attention, self.at
        spec, scale = attention._spec, attention.scale
        visible = ForwardState.chunked_mask if spec.chunk else ForwardState.attention_mask
        bound, wide = spec.chunk or attention.window, spec.float32
        sinks = spec.sinks if spec.sinks is not None and spec.sinks_enabled else None

        usual = bound is None and not wide

        def attend(values: Values, state: ForwardState, caches: Sequence[Any]) -> None:
            cache, q = caches[at], values["q"]
            if usual and type(cache) is KVCache:
                # What mlx-lm's own function and mask come to here: one query sees every key.
                k, v = extended(cache, values["k"], values["v"])
                if sinks is None:
                    values["a"] = mx.fast.scaled_dot_product_attention(q, k, v, scale=scale)
                else:
                    weight = attention[sinks].astype(q.dtype)
                    values["a"] = mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, sinks=weight)
                return
            mask = visible(state, values["row"], cache, bound)  # type: ignore[arg-type]
            k, v = extended(cache, values["k"], values["v"])
            q = q.astype(mx.float32) if wide else q
            weight = None if sinks is None else attention[sinks].astype(q.dtype)
            out = scaled_dot_product_attention(q, k, v, cache=cache, scale=scale, mask=mask, sinks=weight)
            values["a"] = out.astype(values["q"].dtype)

        return attend

    def _plain_before(self, modules: Sequence[Any], x: mx.array, *rest: mx.array) -> tuple[mx.array, ...]:
        *norms, attention = modules
        offset = rest[-1][:1]
        x = self.branch.summed(x, *rest)
        n = norms[0](x) if norms else x
        q, k, v, gate = attention.bind_project()(n, None)
        if self.gate is not None and self.gate.path is not None:
            gate = find(attention, self.gate.path)(n)
        q, k = attention.bind_queries()(q, offset), attention.bind_keys()(k, offset)
        made = (q, k, attention.bind_values()(v), *(() if gate is None else (gate,)))
        return self.branch.behind(x, made)

    def _plain_after(self, modules: Sequence[Any], a: mx.array, *rest: mx.array) -> tuple[mx.array, ...]:
        attention, *post = modules
        width = attention.heads * attention.v_head_dim
        out, x = a.reshape(1, 1, width), rest[-1]
        if self.gate is None:
            y = find(attention, attention._spec.names.o)(out)
        else:
            # The gate's logits are made before the attention, where its input is.
            y = attention.bind_output(logits_given=True)(out, x, rest[0])
        return self.branch.joins(x, y, post)

    def _heads(self, attention: Any, width: int, norm: Norm | None, turned: bool) -> Heads | None:
        qk, rope = attention._spec.qk_norm, attention._rope
        turn = None
        if turned and rope is not None:
            fixed = rope.fixed
            turn = Turn(fixed.inverse, rope.dims, rope.traditional, fixed.factor)
        if norm is None and turn is None:
            return None
        late = turned and qk is not None and qk.after_rope
        whole = turned and norm is not None and qk is not None and qk.over == "full"
        return Heads(width, norm, turn, late=late, whole=whole)

    def _products(self, attention: Any) -> dict[str, Product] | Decline:
        """The products before the attention by what they make."""
        spec, names = attention._spec, attention._spec.names
        packed = self.gate is not None and self.gate.path is None
        qk = spec.qk_norm if spec.qk_norm is not None and spec.qk_norm.enabled else None
        norms: list[Norm | None] = [None, None]
        if qk is not None:
            leaves = (attention[leaf] if qk.weight else None for leaf in attention._leaves)
            norms = [Norm(None, attention._eps) if leaf is None else norm_of(leaf) for leaf in leaves]
            if None in norms:
                return Decline("head norm", "an RMS norm", "another", "It runs in plain MLX.")
        q_heads = self._heads(attention, attention.head_dim, norms[0], True)
        k_heads = self._heads(attention, attention.head_dim, norms[1], True)
        v_norm = Norm(None, attention._eps) if spec.value_norm else None
        v_heads = self._heads(attention, attention.v_head_dim, v_norm, False)
        stacks: dict[str, Stack | None]
        if names.qkv is not None:
            joined = dense(find(attention, names.qkv))
            if joined is None:
                return unread(names.qkv)
            q_width = attention.heads * attention.head_dim
            k_width = attention.kv_heads * attention.head_dim
            v_width = attention.kv_heads * attention.v_head_dim
            part = row_product.stack_part
            stacks = {
                "q": part(joined, 0, q_width),
                "k": part(joined, q_width, k_width),
                "v": part(joined, q_width + k_width, v_width),
            }
        elif spec.values_from_keys:
            return Decline("values", "a projection of their own", "the keys'", "It runs in plain MLX.")
        else:
            stacks = {name: dense(attention[f"{name}_proj"]) for name in "qkv"}
        if self.gate is not None and self.gate.path is not None:
            stacks["g"] = dense(find(attention, self.gate.path))
        made = {}
        heads = {"q": q_heads, "k": k_heads, "v": v_heads}
        widths = {"q": attention.head_dim, "k": attention.head_dim, "v": attention.v_head_dim}
        for name, stack in stacks.items():
            if stack is None:
                return unread(name)
            clip = spec.clip if name != "g" else None
            made[name] = Product(
                stack, heads.get(name), widths.get(name), packed=packed and name == "q", clip=clip
            )
        return made

    def _asked(self) -> RowProduct | Decline:
        made = self.branch.rms_norm()
        if isinstance(made, Decline):
            return made
        attention = self.attention
        rope = attention._rope
        if rope is not None and rope.fixed is None:
            return Decline("rope", "frequencies that no length changes", "others", "It runs in plain MLX.")
        products = self._products(attention)
        if isinstance(products, Decline):
            return products
        width = products["q"].stack.projection.cols
        return RowProduct(width, tuple(products.values()), made, added=self.branch.added)

    def _prepare_before(self, device: Device, dtype: mx.Dtype) -> Run | Decline:
        attention = self.attention
        asked = self._asked()
        if isinstance(asked, Decline):
            return asked
        first, apart = _apart(asked)
        names = ("q", "k", "v", "g")
        if apart and any(p.clip is not None for p in asked.products):
            return Decline("clip", "none beside a norm over all heads", "one", "It runs in plain MLX.")
        objection = head_turns.check(_rows(asked, names)) if apart else None
        product = objection or self.branch.launch(first, device, dtype)
        if isinstance(product, Decline):
            return product
        backend = row_product.backend_of(device)
        turns = head_turns.build(_rows(asked, names), backend, device, dtype, join=True) if apart else None
        spec, gated, branch = attention._spec, self.gate is not None, self.branch

        def run(modules: Sequence[Any], x: Value, *rest: Value) -> tuple[Value, ...]:
            position = rest[-1]
            made = launched(product, {"x": x, "branch": rest[0], "offset": position})
            values = {name: made[f"y{i}"] for i, name in enumerate(names) if f"y{i}" in made}
            if "g0" in made:
                values["g"] = made["g0"]
            if turns is not None:
                turned = launched(turns, {**values, "offset": position})
                values |= {name.removeprefix("out_"): y for name, y in turned.items()}
            q, k, v = (values[name] for name in "qkv")
            if spec.temperature is not None and spec.temperature.enabled:
                q = viewed(q)
                q = q * query_temperature(spec.temperature, viewed(position)[:1], 1, q.dtype)
            v = v if spec.value_scale == 1.0 else viewed(v) * spec.value_scale
            result = (q, k, v, *((values["g"],) if gated else ()))
            return branch.behind(made.get("stream", x), result)

        return run

    def _prepare_after(self, device: Device, dtype: mx.Dtype) -> Run | Decline:
        attention, gate = self.attention, self.gate
        stack = dense(find(attention, attention._spec.names.o))
        if stack is None:
            return unread(attention._spec.names.o)
        asked = RowProduct(
            attention.heads * attention.v_head_dim,
            (Product(stack),),
            gate=None if gate is None else gate.function,
            gate_width=1 if gate is None or gate.over == "element" else attention.v_head_dim,
        )
        return self.branch.output(asked, device, dtype)


def extended(cache: Any, k: mx.array, v: mx.array) -> tuple[mx.array, mx.array]:
    """What ``cache.update_and_fetch`` gives for one token, with fewer words to Python where there is room.

    mlx-lm's plain cache is two arrays with room for more tokens and a count of those that are there.
    """
    if type(cache) is not KVCache or cache.keys is None or cache.offset >= cache.keys.shape[2]:
        made: tuple[mx.array, mx.array] = cache.update_and_fetch(k, v)
        return made
    keys, values = cache.keys, cache.values
    token, seen, cache.offset = _columns(cache.offset)
    keys[token], values[token] = k, v
    return keys[seen], values[seen]


@lru_cache(maxsize=16)
def _columns(at: int) -> tuple[Any, Any, int]:
    """The index of a token's column in a cache ``[1, g, T, d]``, that of all up to it, and their number.

    Every layer asks for the same ones, and an index takes Python as long as half of what it is for.
    """
    all_, end = slice(None), at + 1
    return (all_, all_, slice(at, end)), (all_, all_, slice(None, end)), end


def _apart(asked: RowProduct) -> tuple[RowProduct, bool]:
    """The launch without its heads where one of their norms spans all of them, and whether that is so."""
    whole = any(p.heads is not None and p.heads.whole for p in asked.products)
    if not whole:
        return asked, False
    bare = tuple(replace(p, heads=None) for p in asked.products)
    return replace(asked, products=bare), True


def _rows(asked: RowProduct, names: Sequence[str]) -> dict[str, tuple[Heads, int]]:
    """The rows whose heads take a launch of their own."""
    return {
        name: (p.heads, p.rows) for name, p in zip(names, asked.products, strict=False) if p.heads is not None
    }
