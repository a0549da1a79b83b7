"""Works out from names, shapes and dtypes how each module of a checkpoint is encoded, without reading it.

The engine carries the plan out; `registry inspect` shows it. The tensors decide: every companion of a weight
must be there and fit before the weight is claimed, and bytes that only a missing scale could explain are an
error. Sources of the formats: DeepSeek-V3's fp8 blocks (arXiv:2412.19437, section 3.3), the OCP microscaling
specification 1.0, NVIDIA's NVFP4, and compressed-tensors (github.com/vllm-project/compressed-tensors).
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from mlx_experts.registry.checkpoint.shard_index import listed
from mlx_experts.registry.checkpoint.strict_json import short
from mlx_experts.registry.quantization.awq_gptq import read_transposed
from mlx_experts.registry.quantization.formats import (
    BYTES,
    WORDS,
    Encoded,
    Parts,
    Stored,
    TensorForm,
    describe,
    read_parts,
    refuse,
)
from mlx_experts.registry.quantization.methods import Declared, read_declared

# What follows the name of a weight (`….weight`, or a stack's own name) in the names of its companions; where
# two fit, the longer one stands first.
_COMPANIONS = {
    "_weight_global_scale": "inverse_global_scale",
    "_global_scale": "inverse_global_scale",
    "_weight_scale_inv": "scale",
    "_weight_scale_2": "global_scale",
    "_weight_scale": "scale",
    "_zero_point": "zero_point",
    "_scale_inv": "scale",
    "_scale_2": "global_scale",
    "_scales": "block_scale",
    "_blocks": "blocks",
    "_packed": "packed",
    "_g_idx": "order",
    "_scale": "scale",
    "_shape": "shape",
}
# What AWQ and GPTQ call a module's quantised tensors.
_TRANSPOSED = {"qweight": "qweight", "zero_point": "qzeros", "scale": "scales", "order": "g_idx"}
# Only a quantiser writes these; the other endings may be a parameter of the model.
_CERTAIN = ("_scale_inv", "weight_scale", "weight_scale_2", "weight_global_scale", "weight_packed")
# Scales of activations and of the KV cache: nothing here quantises either.
_DROPPED = re.compile(
    r".*[._](activation_scale|input_scale|input_scale_ub|input_global_scale|input_zero_point|output_scale|prob_scale"
    r"|[qkv]_scale|kv_scale|[kv]_zero_point)"
)


@dataclass(frozen=True)
class EncodingPlan:
    """How a whole checkpoint is encoded.

    Args:
        dropped: tensors that a rule drops.
        entry: MLX's quantisation entry of the result; None if nothing of it is packed.
        notices: what was dropped or does not agree with the config, one sentence each.
    """

    modules: tuple[Encoded, ...]
    dropped: tuple[str, ...]
    entry: dict[str, Any] | None
    notices: tuple[str, ...]

    def apply(self, tensors: Mapping[str, Stored]) -> dict[str, Stored]:
        """The tensors as they will be after decoding."""
        gone = set(self.dropped).union(*(module.sources.values() for module in self.modules))
        result = {name: tensor for name, tensor in tensors.items() if name not in gone}
        for module in self.modules:
            result.update(module.result)
        return result


def shape_tensors(names: Iterable[str]) -> list[str]:
    """Names of the small tensors whose values ``plan_encodings`` can use."""
    return [name for name in names if name.endswith(".weight_shape")]


def plan_encodings(
    tensors: Mapping[str, Stored],
    quantization: Mapping[str, Any] | None,
    *,
    widths: Mapping[str, int] | None = None,
    dense: str = "BF16",
) -> EncodingPlan:
    """Find every encoded module.

    Args:
        tensors: all tensors of the checkpoint.
        quantization: the config's ``quantization`` or ``quantization_config`` entry.
        widths: last value of each tensor of ``shape_tensors``; without it the config's bits decide.
        dense: dtype of weights that are unpacked to floats.

    Raises:
        QuantizationError: a method or format is not supported, a weight lacks its scale or a scale its
            weight, or shapes do not fit together.
    """
    declared = read_declared(quantization)
    modules = []
    for stem, roles in sorted(_companions(tensors).items()):
        if "qweight" in roles:
            roles["weight"] = roles.pop("qweight")
            turned = Parts(stem, roles, {role: tensors[name] for role, name in roles.items()})
            modules.append(read_transposed(turned, declared))
            continue
        parts = _parts(stem, roles, tensors)
        if parts is not None:
            width = (widths or {}).get(parts.sources.get("shape", ""))
            modules.append(read_parts(parts, declared, width, dense))
    gone = {name for module in modules for name in module.sources.values()}
    foreign = bool(modules) or declared.method not in ("none", "mlx")
    dropped = [name for name in tensors if foreign and name not in gone and _DROPPED.fullmatch(name)]
    left = set(tensors) - gone - set(dropped)
    _check_left(left, tensors)
    _check_collisions(modules, left)
    return EncodingPlan(
        tuple(modules),
        tuple(dropped),
        _entry(modules, declared, left),
        tuple(_notices(modules, dropped, declared)),
    )


def _companions(tensors: Iterable[str]) -> dict[str, dict[str, str]]:
    """Names of companions, by the name of the weight that they belong to and their role."""
    found: dict[str, dict[str, str]] = defaultdict(dict)
    names = set(tensors)
    for name in names:
        if _DROPPED.fullmatch(name):
            continue
        suffix = next((suffix for suffix in _COMPANIONS if name.endswith(suffix)), None)
        if suffix is not None:
            roles, role = found[name.removesuffix(suffix)], _COMPANIONS[suffix]
            roles["twice" if role in roles else role] = name
    for name in names:
        # DeepSeek's own files say `w1.weight` and `w1.scale`.
        stem = f"{name.removesuffix('.scale')}.weight"
        if name.endswith(".scale") and stem in names and "scale" not in found[stem]:
            found[stem]["scale"] = name
        if name.endswith(".qweight"):
            module = name.removesuffix(".qweight")
            there = {role: f"{module}.{tensor}" for role, tensor in _TRANSPOSED.items()}
            found[f"{module}.weight"].update((role, each) for role, each in there.items() if each in names)
    return found


def _parts(stem: str, roles: dict[str, str], tensors: Mapping[str, Stored]) -> Parts | None:
    """The weight called ``stem`` with its companions; None if the names only look like companions."""
    weight = roles.pop("packed", None) or roles.pop("blocks", None) or stem
    block_scale = roles.pop("block_scale", None)
    if weight.endswith("_blocks") and block_scale:
        roles["scale"] = block_scale
    if weight not in tensors or tensors[weight].dtype not in (*BYTES, *WORDS):
        certain = next((name for name in roles.values() if name.endswith(_CERTAIN)), None)
        if certain is None:
            return None
        found = describe(tensors[weight]) if weight in tensors else "no such tensor"
        raise refuse(certain, "A scale has no quantised weight.", weight, found)
    if "twice" in roles or roles.keys() >= {"global_scale", "inverse_global_scale"}:
        raise refuse(
            weight, "A weight has two companions of one kind.", "one of each", ", ".join(roles.values())
        )
    if "scale" not in roles:
        if not roles and weight == stem:
            return None
        raise refuse(weight, "A quantised weight has no scale.", f"{stem}_scale or {stem}_scale_inv")
    if "order" in roles:
        raise refuse(roles["order"], "Groups that are not in order (g_idx) are not supported.")
    sources = {"weight": weight, **roles}
    return Parts(stem, sources, {role: _plain(tensors[name]) for role, name in sources.items()})


def _plain(tensor: Stored) -> Stored:
    """F4 counts half bytes; everything else here counts whole ones."""
    if tensor.dtype == "F4" and tensor.shape:
        return TensorForm("U8", (*tensor.shape[:-1], tensor.shape[-1] // 2))
    return tensor


def _check_left(left: set[str], tensors: Mapping[str, Stored]) -> None:
    """No tensor may be left whose bytes mean nothing without a scale."""
    lone = sorted(
        name for name in left if tensors[name].dtype in BYTES and not _explained(name, left, tensors)
    )
    if lone:
        more = f", and {len(lone) - 1} more such tensors" if len(lone) > 1 else ""
        raise refuse(
            lone[0],
            "A quantised tensor has no scale that explains it.",
            "a companion such as weight_scale_inv or weight_scale, complete and of a fitting shape",
            describe(tensors[lone[0]]) + more,
            "Download the whole checkpoint; if it is whole, its encoding is not supported.",
        )


def _explained(name: str, left: set[str], tensors: Mapping[str, Stored]) -> bool:
    """Plain bytes that are a scale of MLX's own, or a vector that no quantiser writes."""
    if tensors[name].dtype != "U8":
        return False
    mlx_scale = name.endswith(".scales") and f"{name.removesuffix('.scales')}.weight" in left
    return mlx_scale or len(tensors[name].shape) < 2


def _check_collisions(modules: Iterable[Encoded], left: set[str]) -> None:
    taken, read = set(left), dict[str, str]()
    for module in modules:
        for name in module.sources.values():
            if name in read:
                raise refuse(
                    name,
                    "A tensor is a part of two encoded modules.",
                    "each tensor in one",
                    f"{read[name]} and {', '.join(module.sources.values())}",
                )
            read[name] = ", ".join(module.sources.values())
        for name in module.result:
            if name in taken:
                raise refuse(
                    name, "A module is stored twice.", "one encoding", ", ".join(module.sources.values())
                )
            taken.add(name)


def _entry(modules: list[Encoded], declared: Declared, left: set[str]) -> dict[str, Any] | None:
    """MLX's entry: the commonest packing as the default, every other module by its path."""
    kinds = {
        module.module: (module.group_size, module.bits, module.mode) for module in modules if module.bits
    }
    if not kinds:
        packed = declared.method == "mlx" or any(name.endswith(".scales") for name in left)
        return dict(declared.entry) if declared.entry and packed else None
    default = Counter(kinds.values()).most_common(1)[0][0]
    keys = ("group_size", "bits", "mode")
    entry: dict[str, Any] = dict(zip(keys, default, strict=True))
    entry.update(
        (name, dict(zip(keys, kind, strict=True))) for name, kind in kinds.items() if kind != default
    )
    return entry


def _notices(modules: list[Encoded], dropped: list[str], declared: Declared) -> Iterable[str]:
    if dropped:
        yield f"Dropped {len(dropped)} scales of activations or caches: {listed(dropped)}."
    own = f"MLX's own packing ({short(declared.entry)})" if declared.method == "mlx" else ""
    odd: dict[str, list[str]] = defaultdict(list)
    for module in modules:
        if said := own or module.overruled:
            odd[f"the config says {said}, the tensors are {module}; the tensors are right"].append(
                module.module
            )
    yield from (f"{remark}: {listed(names)}" for remark, names in odd.items())
