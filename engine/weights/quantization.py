"""Reading a checkpoint's quantisation: what is declared, checked against the tensors that are stored.

The declared (bits, group size, mode) is used when it fits the module's input width and the tensors;
otherwise the tensors decide, with a notice; otherwise the tensor is refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn

from mlx_experts.engine.weights.audit import collapse
from mlx_experts.registry.checkpoint.strict_json import short
from mlx_experts.registry.errors import QuantizationError

AFFINE_BITS = (1, 2, 3, 4, 5, 6, 8)
AFFINE_GROUPS = (32, 64, 128)
# Every other mode of MLX allows one pair of bits and group size.
FLOAT_MODES = {"mxfp4": (4, 32), "mxfp8": (8, 32), "nvfp4": (4, 16)}
QUANTISED = ("weight", "scales", "biases", "global_scale")
_SCALARS = ("group_size", "bits", "mode")


@dataclass(frozen=True)
class Format:
    """How one module's tensors are packed."""

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


class Places(Protocol):
    """Where the checkpoint's module paths lie in the module tree."""

    def modules(self, path: str) -> list[str]:
        """Module paths in the tree that a declared one stands for; empty where there is none."""

    def ignores(self, module: str) -> bool:
        """Whether a rule ignores the tensors of a module, as the checkpoint spells it."""


class Reader:
    """Finds the format of every quantised module of one checkpoint.

    Args:
        entry: the config's quantisation entry.
        foreign: another library's method is declared, which the checkpoint's conversion has read.
        places: brings declared module paths to the module tree, as tensor names are brought.
    """

    def __init__(self, entry: Mapping[str, Any], places: Places, foreign: bool = False) -> None:
        self._foreign = foreign
        self.default = {k: entry[k] for k in _SCALARS if entry.get(k) is not None}
        self._overrides: dict[str, tuple[str, Any]] = {}
        self._unmatched: list[str] = []
        self._remarks: dict[str, list[str]] = {}
        self._as_declared, self._packed = True, False
        for key, value in entry.items():
            if key in ("global_scale", *_SCALARS) or places.ignores(key):
                continue
            modules = places.modules(key)
            if not isinstance(value, Mapping | bool):
                if modules:
                    self._note("quantisation entries are ignored, because they are no objects", key)
                continue
            for path in modules:
                # A module's own name wins over other names for it, wherever the two stand.
                if self._overrides.get(path, ("", None))[0] != path:
                    self._overrides[path] = (key, value)
            if not modules:
                self._unmatched.append(key)

    def read(self, path: str, module: nn.Module, tensors: Mapping[str, mx.array]) -> Format | None:
        """The format of one module, or None where its weight is stored in full precision.

        Raises:
            QuantizationError: the tensors fit no format.
        """
        key, override = self._overrides.get(path, ("", None))
        if f"{path}.scales" not in tensors:
            if isinstance(override, Mapping):
                self._note("quantisation entries are ignored, because the tensors are not quantised", key)
            return None
        stored_tensors = {s: tensors.get(f"{path}.{s}") for s in QUANTISED}
        if stored_tensors["weight"] is None:
            raise QuantizationError("scales without a weight", where=f"{path}.scales")
        self._packed = True
        width = module.weight.shape[-1]
        stored, declared = stored_format(stored_tensors, width), self._declared(override)
        if stored is None:
            shapes = ", ".join(f"{s} {_spelled(v)}" for s, v in stored_tensors.items() if v is not None)
            raise QuantizationError(
                "quantised tensors fit no format that MLX has",
                where=path,
                expected=f"tensors of an input width {width}" + (f", {declared}" if declared else ""),
                found=shapes,
                hint="check that config.json belongs to these weights",
            )
        stated = override if isinstance(override, Mapping) else {}
        if stated.get("global_scale") is True and not stored.global_scale:
            raise QuantizationError(
                "the config gives a module a scale of the whole, and the checkpoint has none",
                where=path,
                expected=f"{path}.global_scale",
                hint="get the missing file; without the scale every value is off by the same factor",
            )
        plain = self.default.get("mode") is None and stored.mode == "affine"
        if override is not False and stated.get("mode") is None and (stated or plain):
            # The default's mode is meant, or, as MLX itself reads it, affine; the tensors show which.
            declared = self._declared({**stated, "mode": stored.mode})
            self._as_declared &= stored.mode == "affine"
        if not declared:
            if not self._foreign:
                self._note(
                    f"the config does not say how modules are quantised; the tensors are {stored}", path
                )
            self._as_declared = False
        elif declared != str(stored):
            self._note(f"the config says {declared}, the tensors are {stored}; the tensors are right", path)
        return stored

    def _declared(self, override: Any) -> str:
        """What the config says of a module, in the words of a format; nothing where it says nothing."""
        if override is False:
            return "not quantised"
        entry = {**self.default, **(override if isinstance(override, Mapping) else {})}
        if not entry.keys() & {"bits", "group_size"}:
            return ""
        mode, bits, group = entry.get("mode"), entry.get("bits"), entry.get("group_size")
        if isinstance(mode, str) and type(bits) is int and type(group) is int:
            return str(Format(bits, group, mode))
        if mode is None and type(bits) is int and type(group) is int:
            return f"{bits}-bit group {group} and no mode"
        return f"mode {short(mode)}, bits {short(bits)}, group_size {short(group)}"

    @property
    def as_declared(self) -> bool:
        """Whether the entry says exactly what the modules became."""
        return self._as_declared and not self._unmatched

    def unpacked(self, path: str) -> None:
        """Take note that a module's tensors were unpacked, so that the entry does not hold for it."""
        self._note("unpacked while loading, because the module has no quantised form", path)

    def _note(self, remark: str, name: str) -> None:
        self._as_declared = False
        self._remarks.setdefault(remark, []).append(name)

    def remarks(self) -> list[str]:
        """What did not fit, one sentence for each kind, with the modules it is about."""
        rows = dict(self._remarks)
        if self._unmatched:
            rows["quantisation entries that match no module"] = self._unmatched
        found = [f"{remark}: {', '.join(collapse(names, 'modules'))}" for remark, names in rows.items()]
        declared = self._declared({"mode": self.default.get("mode") or "affine"})
        if declared and not self._packed:
            found.append(f"the config says {declared}, and no tensor is quantised; the tensors are right")
        return found


def _spelled(tensor: mx.array) -> str:
    return f"{str(tensor.dtype).removeprefix('mlx.core.')} {list(tensor.shape)}"


def stored_format(tensors: Mapping[str, mx.array | None], width: int) -> Format | None:
    """The one format that the tensors of a module with this input width can be, or None."""
    weight, scales, biases = tensors.get("weight"), tensors.get("scales"), tensors.get("biases")
    assert weight is not None
    assert scales is not None
    if weight.ndim < 2 or scales.ndim < 2:
        return None
    packed, groups = weight.shape[-1], scales.shape[-1]
    if weight.dtype != mx.uint32 or weight.shape[:-1] != scales.shape[:-1] or not groups or width % groups:
        return None
    group = width // groups
    if packed * 32 % width:
        return None
    bits = packed * 32 // width
    has_global = tensors.get("global_scale") is not None
    if biases is not None:
        fits = biases.shape == scales.shape and bits in AFFINE_BITS and group in AFFINE_GROUPS
        floats = all(mx.issubdtype(each.dtype, mx.floating) for each in (scales, biases))
        return Format(bits, group, "affine") if fits and floats else None
    if scales.dtype != mx.uint8:
        return None
    for mode, pair in FLOAT_MODES.items():
        if pair == (bits, group):
            return Format(bits, group, mode, has_global and mode == "nvfp4")
    return None


def _can_hold(module: nn.Module, found: Format) -> bool:
    """Whether a module has a quantised form for these tensors; a plain one has no room for a global scale."""
    convert = getattr(type(module), "to_quantized", None)
    if convert is None:
        return False
    return not found.global_scale or "global_scale" in inspect.signature(convert).parameters


def quantize_modules(model: nn.Module, tensors: dict[str, mx.array], reader: Reader) -> dict[str, Format]:
    """Replace the modules whose tensors are quantised, and unpack those that a bare matrix receives.

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
        reader.unpacked(path)
        # A bare module may have a parameter of its own with the name of nvfp4's scale of the whole.
        parts = QUANTISED if found.global_scale else [s for s in QUANTISED if s != "global_scale"]
        values = {s: tensors.pop(f"{path}.{s}", None) for s in parts}
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
            global_scale=values.get("global_scale"),
            dtype=None if found.mode == "affine" else mx.float32,
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
