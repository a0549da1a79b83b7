"""Reading a checkpoint's quantisation: what is declared, checked against the planes that are stored.

The declared (bits, group size, mode) is used when it fits the module's input width and the planes;
otherwise the planes decide, with a notice; otherwise the tensor is refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_experts.registry.errors import QuantizationError

AFFINE_BITS = (2, 3, 4, 5, 6, 8)
AFFINE_GROUPS = (16, 32, 64, 128)
# Every other mode of MLX allows one pair of bits and group size.
FLOAT_MODES = {"mxfp4": (4, 32), "mxfp8": (8, 32), "nvfp4": (4, 16)}
_SCALARS = ("group_size", "bits", "mode")


@dataclass(frozen=True)
class Format:
    """How one module's planes are packed."""

    bits: int
    group_size: int
    mode: str
    global_scale: bool = False

    def __str__(self) -> str:
        return f"{self.mode} {self.bits}-bit group {self.group_size}"


def settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config's MLX quantisation entry, or an empty one.

    Raises:
        QuantizationError: the entry is not an object.
    """
    for key in ("quantization", "quantization_config"):
        entry = config.get(key)
        if entry is None:
            continue
        if not isinstance(entry, Mapping):
            raise QuantizationError(f"'{key}' is not an object", where="config.json", found=repr(entry)[:80])
        if key == "quantization" or "quant_method" not in entry:
            return dict(entry)
    return {}


class Reader:
    """Finds the format of every quantised module of one checkpoint.

    Args:
        entry: the config's quantisation entry.
        rename: carries a declared module path to the module tree, as tensor names are carried.
    """

    def __init__(self, entry: Mapping[str, Any], rename: Callable[[str], str]) -> None:
        self.default = {k: entry[k] for k in _SCALARS if entry.get(k) is not None}
        self.overrides: dict[str, Any] = {}
        self.spelled: dict[str, str] = {}
        self.notices: list[str] = []
        for key, value in entry.items():
            if isinstance(value, Mapping) or value is False or value is True:
                path = rename(key)
                self.overrides[path] = value
                self.spelled[path] = key
        self._used: set[str] = set()

    def read(self, path: str, module: nn.Module, tensors: Mapping[str, mx.array]) -> Format | None:
        """The format of one module, or None where its weight is stored in full precision.

        Raises:
            QuantizationError: the planes fit no format.
        """
        override = self.overrides.get(path)
        if override is not None:
            self._used.add(path)
        if f"{path}.scales" not in tensors:
            if isinstance(override, Mapping):
                self.notices.append(
                    f"the quantisation entry '{self.spelled[path]}' is ignored: the tensor is not quantised"
                )
            return None
        planes = {p: tensors.get(f"{path}.{p}") for p in ("weight", "scales", "biases", "global_scale")}
        if planes["weight"] is None:
            raise QuantizationError("scales without a weight", where=f"{path}.scales")
        width = module.weight.shape[-1]
        declared = self._declared(override)
        stored = stored_format(planes, width)
        if declared is not None and stored is not None and declared != stored:
            self.notices.append(
                f"{path}: the config says {declared}, the tensors are {stored}; used the tensors"
            )
        if stored is None:
            shapes = ", ".join(f"{p} {list(v.shape)}" for p, v in planes.items() if v is not None)
            raise QuantizationError(
                "quantised planes fit no format that MLX has",
                where=path,
                expected=f"planes of an input width {width}" + (f", {declared}" if declared else ""),
                found=shapes,
                hint="check that config.json belongs to these weights",
            )
        return stored

    def _declared(self, override: Any) -> Format | None:
        entry = {**self.default, **(override if isinstance(override, Mapping) else {})}
        if "bits" not in entry or "group_size" not in entry:
            return None
        bits, group, mode = entry["bits"], entry["group_size"], entry.get("mode", "affine")
        if not isinstance(bits, int) or not isinstance(group, int) or not isinstance(mode, str):
            return None
        return Format(bits, group, mode, bool(entry.get("global_scale", False)))

    def unmatched(self) -> list[str]:
        """Declared entries that no module answers to, as the config spells them."""
        return sorted(self.spelled[path] for path in self.overrides if path not in self._used)


def stored_format(planes: Mapping[str, mx.array | None], width: int) -> Format | None:
    """The one format that the planes of a module with this input width can be, or None."""
    weight, scales, biases = planes.get("weight"), planes.get("scales"), planes.get("biases")
    assert weight is not None
    assert scales is not None
    packed, groups = weight.shape[-1], scales.shape[-1]
    if weight.dtype != mx.uint32 or weight.shape[:-1] != scales.shape[:-1] or not groups or width % groups:
        return None
    group = width // groups
    if packed * 32 % width:
        return None
    bits = packed * 32 // width
    has_global = planes.get("global_scale") is not None
    if biases is not None:
        fits = biases.shape == scales.shape and bits in AFFINE_BITS and group in AFFINE_GROUPS
        return Format(bits, group, "affine") if fits and scales.dtype != mx.uint8 else None
    if scales.dtype != mx.uint8:
        return None
    for mode, pair in FLOAT_MODES.items():
        if pair == (bits, group):
            return Format(bits, group, mode, has_global and mode == "nvfp4")
    return None


def _can_hold(module: nn.Module, found: Format) -> bool:
    """Whether a module has a quantised form for these planes; a plain one has no room for a global scale."""
    convert = getattr(type(module), "to_quantized", None)
    if convert is None:
        return False
    return not found.global_scale or "global_scale" in inspect.signature(convert).parameters


def quantize_modules(model: nn.Module, tensors: dict[str, mx.array], reader: Reader) -> dict[str, Format]:
    """Replace the modules whose planes are quantised, and unpack planes that a bare matrix receives.

    Returns:
        The format of every quantised module, by path.
    """
    formats: dict[str, Format] = {}
    bare: dict[str, Format] = {}
    for path, module in model.named_modules():
        if "weight" not in module or not isinstance(module.weight, mx.array) or module.weight.ndim < 2:
            continue
        found = reader.read(path, module, tensors)
        if found is not None:
            (formats if _can_hold(module, found) else bare)[path] = found
    for path, found in bare.items():
        planes = ("weight", "scales", "biases", "global_scale")
        values = {p: tensors.pop(f"{path}.{p}", None) for p in planes}
        weight, scales = values["weight"], values["scales"]
        assert weight is not None
        assert scales is not None
        tensors[f"{path}.weight"] = mx.dequantize(
            weight,
            scales,
            values["biases"],
            group_size=found.group_size,
            bits=found.bits,
            mode=found.mode,
            global_scale=values["global_scale"],
        )

    def chosen(path: str, module: nn.Module) -> bool | dict[str, Any]:
        found = formats.get(path)
        if found is None:
            return False
        entry = {"group_size": found.group_size, "bits": found.bits, "mode": found.mode}
        return {**entry, "global_scale": True} if found.global_scale else entry

    if formats:
        nn.quantize(model, class_predicate=chosen)
    return formats
