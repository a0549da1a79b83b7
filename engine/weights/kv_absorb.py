"""Turns latent attention's `kv_b_proj` into the two matrices that attend to latents directly.

Legend: h heads, n key width, v value width, c latent width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlx_experts.engine.layers.options import read_options
from mlx_experts.engine.weights.quantization import Format, stored_format
from mlx_experts.engine.weights.tensor_tree import (
    Tensors,
    Tree,
    module_tensors,
    put,
    take,
)
from mlx_experts.plugins.hookspecs import hookimpl
from mlx_experts.registry.errors import QuantizationError, TensorError
from mlx_experts.registry.spec.path_pattern import PathPattern
from mlx_experts.registry.spec.values import Spec


class AbsorbOptions(Spec):
    """The conversion takes no options: the sizes are those of the module tree."""


@dataclass(frozen=True)
class AbsorbOperation:
    """``kv_b_proj`` [h * (n + v), c] becomes ``embed_q`` [h, c, n] and ``unembed_out`` [h, v, c].

    Quantised tensors are unpacked and, where the new rows can be cut into groups, packed again in the
    format that they had, as mlx-lm does; so what is saved are the two matrices. Full-precision
    matrices are joined again on the way back.

    Args:
        source: module path of ``kv_b_proj``.
    """

    source: PathPattern

    def forward(self, tensors: Tensors, tree: Tree) -> bool:
        """Split every ``kv_b_proj`` that is there.

        Raises:
            TensorError: the model has no latent attention there, or the matrix has another shape.
            QuantizationError: its quantised tensors fit no format.
        """
        done = False
        for at in self.source.in_layers(tree.num_layers):
            module = self.source.fill(at)
            if not module_tensors(tensors, module).keys() - {"bias"}:
                continue
            embed, unembed = _targets(module)
            h, c, n, v = _sizes(module, tree)
            found = take(tensors, module)
            if "bias" in found:
                # No place for it: whoever audits the load decides.
                put(tensors, module, {"bias": found.pop("bias")})
            weight, packing = _unpacked(found, c, module)
            if weight.shape != (h * (n + v), c):
                raise TensorError(
                    "the keys' and values' up-projection does not fit the heads",
                    where=module,
                    expected=f"shape {[h * (n + v), c]}",
                    found=f"shape {list(weight.shape)}",
                )
            keys, values = mx.split(weight.reshape(h, n + v, c), [n], axis=1)
            # Contiguous copies, so that the whole matrix can be released.
            put(tensors, embed, _packed(mx.contiguous(keys.swapaxes(-1, -2)), packing))
            put(tensors, unembed, _packed(mx.contiguous(values), packing))
            done = True
        return done

    def backward(self, tensors: Tensors, tree: Tree) -> None:
        """Join full-precision pairs; quantised ones keep the tree's names, which load as they are."""
        for at in self.source.in_layers(tree.num_layers):
            module = self.source.fill(at)
            targets = _targets(module)
            if any(set(module_tensors(tensors, target)) != {"weight"} for target in targets):
                continue
            keys, values = (take(tensors, target)["weight"] for target in targets)
            joined = mx.concatenate([keys.swapaxes(-1, -2), values], axis=1)
            put(tensors, module, {"weight": joined.flatten(0, 1)})

    def modules(self, path: str, tree: Tree) -> list[str]:
        """The two matrices that ``kv_b_proj`` becomes."""
        return list(_targets(path)) if self.source.matches(path) else [path]


def _targets(module: str) -> tuple[str, str]:
    parent = module.rpartition(".")[0]
    return f"{parent}.embed_q", f"{parent}.unembed_out"


def _sizes(module: str, tree: Tree) -> tuple[int, int, int, int]:
    embed, unembed = (tree.shapes.get(f"{target}.weight") for target in _targets(module))
    if embed is None or unembed is None:
        raise TensorError(
            "the checkpoint has latent attention where the model has none",
            where=module,
            hint="check that config.json belongs to these weights",
        )
    h, c, n = embed
    return h, c, n, unembed[1]


def _unpacked(found: dict[str, mx.array], width: int, module: str) -> tuple[mx.array, Format | None]:
    if "scales" not in found:
        return found["weight"], None
    packing = stored_format(found, width) if "weight" in found else None
    if packing is None:
        raise QuantizationError(
            "quantised tensors fit no format that MLX has",
            where=module,
            expected=f"tensors of an input width {width}",
            found=", ".join(f"{suffix} {list(value.shape)}" for suffix, value in found.items()),
        )
    weight = mx.dequantize(
        found["weight"],
        found["scales"],
        found.get("biases"),
        group_size=packing.group_size,
        bits=packing.bits,
        mode=packing.mode,
        global_scale=found.get("global_scale"),
        dtype=None if packing.mode == "affine" else mx.float32,
    )
    # Without the scale of the whole, which no module here has, small values would be lost.
    return weight, None if packing.global_scale else packing


def _packed(weight: mx.array, packing: Format | None) -> dict[str, mx.array]:
    if packing is None or weight.shape[-1] % packing.group_size:
        return {"weight": weight}
    parts = mx.quantize(weight, group_size=packing.group_size, bits=packing.bits, mode=packing.mode)
    return dict(zip(("weight", "scales", "biases"), parts, strict=False))


def make_absorb(source: str, options: Mapping[str, Any]) -> AbsorbOperation:
    """The conversion of one module path."""
    read_options(AbsorbOptions, options, "the layout operation `absorb_kv`")
    return AbsorbOperation(PathPattern(source))


@hookimpl
def register_conversions() -> dict[str, Any]:
    """The conversion `absorb_kv`."""
    return {"absorb_kv": make_absorb}
