"""Reads a quantisation entry of config.json: which method made the checkpoint, and what it promises.

What a method promises is held against the tensors elsewhere; a method that is not known is refused here, by
name, because its tensors would load as something else.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from mlx_experts.registry.checkpoint.strict_json import short
from mlx_experts.registry.errors import QuantizationError

_WHERE = "config.json: quantization_config"

# What mlx-lm calls these formats, and the one (bits, group size) that MLX has for each.
MX_ENTRIES: dict[str, dict[str, Any]] = {
    "mxfp4": {"group_size": 32, "bits": 4, "mode": "mxfp4"},
    "mxfp8": {"group_size": 32, "bits": 8, "mode": "mxfp8"},
    "nvfp4": {"group_size": 16, "bits": 4, "mode": "nvfp4"},
}

# compressed-tensors and ModelOpt name what a module is stored as; the value is the MLX mode it stays in.
_COMPRESSED_FORMATS = {
    "dense": None,
    "naive-quantized": None,
    "int-quantized": "affine",
    "float-quantized": None,
    "pack-quantized": "affine",
    "nvfp4-pack-quantized": "nvfp4",
    "mxfp4-pack-quantized": "mxfp4",
    "mxfp8-quantized": "mxfp8",
    "mixed-precision": None,
}
_MODELOPT_ALGORITHMS = {
    "FP8": None,
    "FP8_PB_WO": None,
    "FP8_PER_CHANNEL_PER_TOKEN": None,
    "NVFP4": "nvfp4",
    "MXFP4": "mxfp4",
    "W4A8_MXFP4_FP8": "mxfp4",
    "MXFP8": "mxfp8",
    "MIXED_PRECISION": None,
}
_METHODS = ("awq", "compressed-tensors", "fbgemm_fp8", "fp8", "gptq", "modelopt", "mxfp4", "mxfp8")


@dataclass(frozen=True)
class Declared:
    """What the config says about the checkpoint's quantisation.

    Args:
        method: the method's name; ``none`` without an entry, ``mlx`` when MLX wrote the checkpoint.
        entry: MLX's own entry, or the one that modules stored in an MLX mode get; None if there is none.
        block: rows and columns that share an fp8 scale.
        power_of_two: the fp8 scales are powers of two.
        integers: the (bits, group size) pairs of packed integers; group size 0 is the whole row.
        zero_offset: what is to be added to stored zero points.
        always: companions that every packed weight of the method has, by role.
    """

    method: str
    entry: dict[str, Any] | None = None
    block: tuple[int, int] | None = None
    power_of_two: bool = False
    integers: tuple[tuple[int, int], ...] = ()
    zero_offset: int = 0
    always: frozenset[str] = frozenset()


def read_declared(entry: Mapping[str, Any] | None) -> Declared:
    """Read the ``quantization`` or ``quantization_config`` entry of a config.

    Raises:
        QuantizationError: the method or its format is not supported, or a value cannot be.
    """
    if not entry:
        return Declared("none")
    method = entry.get("quant_method")
    if method is None and "bits" in entry:
        return Declared("mlx", dict(entry))
    if method is None and isinstance(entry.get("quantization"), Mapping):
        method = "modelopt"
    if method == "fp8":
        return Declared(
            "fp8",
            block=_block(entry.get("weight_block_size"), "weight_block_size"),
            power_of_two=entry.get("scale_fmt") == "ue8m0",
        )
    if method == "fbgemm_fp8":
        return Declared("fbgemm_fp8")
    if method in ("mxfp4", "mxfp8"):
        return Declared(method, dict(MX_ENTRIES[method]))
    if method in ("awq", "gptq"):
        return _transposed(method, entry)
    if method == "compressed-tensors":
        return _compressed(entry)
    if method == "modelopt":
        return _modelopt(entry)
    hint = "Convert the original checkpoint with `mlx_lm.convert`, or take an export in one of these."
    raise _unsupported("quantisation method", "quant_method", _METHODS, method, hint)


def _transposed(method: str, entry: Mapping[str, Any]) -> Declared:
    """AutoAWQ's and GPTQ's entries; the tensors' arrangement has a name in each."""
    key, known = ("version", ("gemm",)) if method == "awq" else ("checkpoint_format", ("gptq", "gptq_v2"))
    arrangement = entry.get(key) or known[0]
    if not isinstance(arrangement, str) or arrangement.lower() not in known:
        raise _unsupported(f"{method} arrangement", key, known, arrangement)
    pair = (
        _whole(entry.get("bits", 4), "bits"),
        max(_whole(entry.get("group_size", 128), "group_size", -1), 0),
    )
    # With desc_act columns are in any order, which only g_idx tells.
    always = {"order"} if method == "gptq" and entry.get("desc_act") is True else set()
    # The first GPTQ format stores zero points less one.
    offset = 1 if arrangement.lower() == "gptq" else 0
    return Declared(method, integers=(pair,), zero_offset=offset, always=frozenset(always))


def _compressed(entry: Mapping[str, Any]) -> Declared:
    groups = entry.get("config_groups") or {}
    if not isinstance(groups, Mapping) or not all(isinstance(group, Mapping) for group in groups.values()):
        raise _wrong("config_groups", "an object of objects", groups)
    formats = [("format", entry.get("format"))]
    integers: list[tuple[int, int]] = []
    always: list[set[str]] = []
    block = None
    for name, group in groups.items():
        formats.append((f"config_groups.{name}.format", group.get("format")))
        weights = group.get("weights")
        if weights is None:
            continue
        if not isinstance(weights, Mapping):
            raise _wrong(f"config_groups.{name}.weights", "an object", weights)
        where = f"config_groups.{name}.weights"
        if weights.get("type", "int") == "int":
            bits = _whole(weights.get("num_bits"), f"{where}.num_bits")
            always.append(
                {
                    role
                    for role, there in {
                        "zero_point": weights.get("symmetric") is False,
                        # compressed-tensors calls the order of GPTQ's desc_act `group`.
                        "order": weights.get("actorder") in (True, "group", "dynamic"),
                    }.items()
                    if there
                }
            )
            integers.append((bits, max(_whole(weights.get("group_size") or 0, f"{where}.group_size", -1), 0)))
        block = _block(weights.get("block_structure"), f"{where}.block_structure") or block
    for key, name in formats:
        if name is not None and (not isinstance(name, str) or name not in _COMPRESSED_FORMATS):
            hint = "Take an export in one of these formats, or the original checkpoint."
            raise _unsupported("compressed-tensors format", key, _COMPRESSED_FORMATS, name, hint)
    mode = _COMPRESSED_FORMATS.get(str(entry.get("format")))
    # What all groups have; which group a weight is of, its name alone would tell.
    shared = frozenset(set.intersection(*always) if always else ())
    return Declared(
        "compressed-tensors", _entry(mode, integers), block, integers=tuple(integers), always=shared
    )


def _modelopt(entry: Mapping[str, Any]) -> Declared:
    settings = entry.get("quantization", entry)
    if not isinstance(settings, Mapping):
        raise _wrong("quantization", "an object", settings)
    algorithm = settings.get("quant_algo")
    if not isinstance(algorithm, str) or algorithm not in _MODELOPT_ALGORITHMS:
        hint = "Take an export in one of these, or the original checkpoint."
        raise _unsupported("ModelOpt algorithm", "quant_algo", _MODELOPT_ALGORITHMS, algorithm, hint)
    return Declared("modelopt", _entry(_MODELOPT_ALGORITHMS[algorithm], []))


def _entry(mode: str | None, integers: list[tuple[int, int]]) -> dict[str, Any] | None:
    if mode == "affine":
        bits, group_size = integers[0] if integers else (4, 32)
        return {"group_size": mlx_group_size(group_size) or 128, "bits": bits, "mode": "affine"}
    return dict(MX_ENTRIES[mode]) if mode else None


def mlx_group_size(group_size: int) -> int | None:
    """The largest group size of MLX that cuts groups of this size evenly, or None if there is none."""
    return next((size for size in (128, 64, 32) if group_size and group_size % size == 0), None)


def _block(value: Any, key: str) -> tuple[int, int] | None:
    if value is None:
        return None
    if isinstance(value, list | tuple) and len(value) == 2:
        return _whole(value[0], key), _whole(value[1], key)
    raise _wrong(key, "two positive whole numbers", value)


def _whole(value: Any, key: str, least: int = 1) -> int:
    # The bound keeps later products far from any native limit.
    if type(value) is int and least <= value <= 2**20:
        return value
    raise _wrong(key, f"a whole number from {least}" if least != 1 else "a positive whole number", value)


def _unsupported(what: str, key: str, known: Iterable[str], found: Any, hint: str = "") -> QuantizationError:
    return QuantizationError(
        f"The checkpoint's {what} is not supported.",
        where=f"{_WHERE}.{key}",
        expected=", ".join(known),
        found=short(found),
        hint=hint,
    )


def _wrong(key: str, expected: str, found: Any) -> QuantizationError:
    return QuantizationError(
        "A quantisation setting cannot be used.",
        where=f"{_WHERE}.{key}",
        expected=expected,
        found=short(found),
    )
