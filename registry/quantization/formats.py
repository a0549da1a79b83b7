"""What one weight and its companions can be: fp8, integers, mxfp4, mxfp8 or nvfp4, told by shape and dtype.

Pure functions of names, shapes and dtypes. Legend of shapes: […, R, C] a matrix or a stack of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from mlx_experts.registry.errors import QuantizationError
from mlx_experts.registry.quantization.methods import MX_ENTRIES, Declared, mlx_group_size

Encoding = Literal["awq", "fp8", "gptq", "integers", "mxfp4", "mxfp8", "nvfp4"]
Shape = tuple[int, ...]
Block = tuple[int, int]

FLOATS = ("BF16", "F16", "F32")
WORDS = ("I32", "U32")
BYTES = (
    "F4",
    "F6_E2M3",
    "F6_E3M2",
    "F8_E4M3",
    "F8_E4M3FNUZ",
    "F8_E5M2",
    "F8_E5M2FNUZ",
    "F8_E8M0",
    "I8",
    "U8",
)
_FP8 = ("F8_E4M3", "F8_E5M2", "U8")
_E8M0 = ("F8_E8M0", "U8")
_DEFAULT_BLOCK = (128, 128)

# Bytes of weight for one byte of scale, which is unlike in each format.
_BYTES_A_SCALE: dict[int, tuple[Literal["mxfp4", "mxfp8", "nvfp4"], tuple[str, ...]]] = {
    8: ("nvfp4", ("F8_E4M3", "U8")),
    16: ("mxfp4", _E8M0),
    32: ("mxfp8", _E8M0),
}
_GLOBAL_SCALES = ("global_scale", "inverse_global_scale")


class Stored(Protocol):
    """A tensor as a header describes it."""

    @property
    def dtype(self) -> str: ...

    @property
    def shape(self) -> Shape: ...


@dataclass(frozen=True, slots=True)
class TensorForm:
    """A tensor by its dtype (spelled as in safetensors) and shape alone."""

    dtype: str
    shape: Shape


@dataclass(frozen=True)
class Parts:
    """A weight and its companions.

    Args:
        stem: name that an unpacked weight gets: `<module>.weight`, or a stack's own name.
        sources: tensor names by role: weight, scale, and where there are such, global_scale,
            inverse_global_scale (divides), zero_point, shape, order.
        tensors: the tensors by role.
    """

    stem: str
    sources: Mapping[str, str]
    tensors: Mapping[str, Stored]

    @property
    def module(self) -> str:
        return self.stem.removesuffix(".weight")

    @property
    def weight(self) -> Stored:
        return self.tensors["weight"]

    @property
    def scale(self) -> Stored:
        return self.tensors["scale"]

    def words(self) -> str:
        """The weight and its scale, for a message."""
        return f"{describe(self.weight)} with scale {describe(self.scale)}"


@dataclass(frozen=True)
class Encoded:
    """One module's encoding and what it becomes.

    Args:
        sources: tensor names by role, as in ``Parts``.
        result: the tensors after decoding, by tensor name.
        weight_dtype: dtype of the stored weight.
        bits: bits of a packed value; 0 where the result is unpacked floats.
        group_size: packed values that share a scale.
        repeat: how often a stored scale is repeated along rows and columns to give the result's.
        block: rows and columns of values that share an fp8 scale; None for a scale that broadcasts.
        scale_shape: shape in which an fp8 scale broadcasts against the weight.
        zero_offset: what is to be added to stored zero points.
        overruled: what the config declares instead, where it does.
    """

    module: str
    encoding: Encoding
    sources: Mapping[str, str]
    result: Mapping[str, TensorForm]
    weight_dtype: str
    bits: int = 0
    group_size: int = 0
    repeat: Block = (1, 1)
    block: Block | None = None
    scale_shape: Shape = ()
    zero_offset: int = 0
    overruled: str = ""

    @property
    def mode(self) -> str:
        """MLX's mode of the result; of no meaning where it is unpacked."""
        return "affine" if self.encoding in ("awq", "gptq", "integers") else self.encoding

    def __str__(self) -> str:
        if self.encoding == "fp8":
            return fp8_words(self.block)
        pair = self.bits, self.group_size * self.repeat[1]
        return integer_words([pair]) if self.mode == "affine" else self.encoding


def integer_words(pairs: Sequence[tuple[int, int]]) -> str:
    """Pairs of bits and group size as a person says them."""
    return " or ".join(f"{bits}-bit in groups of {size or 'a whole row'}" for bits, size in pairs)


def fp8_words(block: Block | None) -> str:
    """The block of values that share an fp8 scale, as a person says it."""
    return "fp8 with a scale for each " + (f"block of {block[0]} x {block[1]}" if block else "tensor or row")


def read_parts(parts: Parts, declared: Declared, width: int | None, dense: str) -> Encoded:
    """Tell the encoding of one weight.

    Args:
        declared: what the config says.
        width: the input width of a packed weight, where its ``weight_shape`` has been read.
        dense: dtype of weights that are unpacked to floats.

    Raises:
        QuantizationError: the shapes and dtypes fit no encoding.
    """
    weight, scale, name = parts.weight, parts.scale, parts.sources["weight"]
    if len(weight.shape) < 2 or not math.prod(weight.shape):
        raise refuse(name, "A quantised weight is no matrix.", "[…, rows, columns]", describe(weight))
    if scale.dtype in FLOATS and (weight.dtype in WORDS or weight.dtype == "I8"):
        return _integers(parts, declared, width)
    if declared.integers and weight.dtype in WORDS:
        raise refuse(
            name,
            "Packed integers have a scale of another kind.",
            f"one of {', '.join(FLOATS)}",
            parts.words(),
        )
    found = _microscaled(parts) if scale.dtype in BYTES else None
    if found is None and scale.dtype in (*FLOATS, *_E8M0) and weight.dtype in _FP8:
        found = _fp8(parts, declared, dense)
    if found is None:
        raise refuse(name, "A weight and its scale fit no encoding.", "", parts.words())
    return found


def _microscaled(parts: Parts) -> Encoded | None:
    """A byte of scale for 16 or 32 values; None where the shapes say otherwise."""
    weight, scale = parts.weight, parts.scale
    shape = weight.shape
    if len(shape) == len(scale.shape) + 1 and shape[-1] == 16:
        # gpt_oss keeps the 16 bytes of each group on an axis of their own.
        shape = (*shape[:-2], shape[-2] * 16)
    columns = shape[-1] * (4 if weight.dtype in WORDS else 1)
    if len(shape) != len(scale.shape) or not scale.shape[-1] or columns % scale.shape[-1]:
        return None
    mode, scale_dtypes = _BYTES_A_SCALE.get(columns // scale.shape[-1], (None, ()))
    by_row = scale.shape[:-1] == shape[:-1]
    # DeepSeek's fp8 with power-of-two scales has one for each tile of 32 × 32.
    by_tile = mode == "mxfp8" and scale.shape[:-1] == (*shape[:-2], -(-shape[-2] // 32))
    if mode is None or scale.dtype not in scale_dtypes or not (by_row or by_tile):
        return None
    # Two values of four bits are no float of eight, and other numbers of eight bits have other values.
    numbers = (*WORDS, "U8", "F8_E4M3" if mode == "mxfp8" else "I8")
    if columns % 4 or weight.dtype not in numbers:
        return None
    return _packed(parts, mode, shape[:-1], columns // 4, scale.shape[-1], (1, 1) if by_row else (32, 1))


def _packed(
    parts: Parts,
    mode: Literal["mxfp4", "mxfp8", "nvfp4"],
    rows: Shape,
    words: int,
    groups: int,
    repeat: Block,
) -> Encoded:
    """MLX's tensors of a microscaled format: 32-bit words and one byte of scale a group."""
    result = {
        f"{parts.module}.weight": TensorForm("U32", (*rows, words)),
        f"{parts.module}.scales": TensorForm("U8", (*rows, groups)),
    }
    role = next((role for role in _GLOBAL_SCALES if role in parts.sources), None)
    if role is None and mode == "nvfp4":
        raise refuse(
            parts.sources["weight"],
            "An nvfp4 weight has no scale for the whole tensor.",
            f"{parts.stem}_scale_2 (ModelOpt) or {parts.stem}_global_scale (compressed-tensors)",
            "no such tensor",
            "Get the missing files; without the scale every value is off by the same unknown factor.",
        )
    if role is not None:
        result[f"{parts.module}.global_scale"] = TensorForm(
            "F32", _global_shape(parts, role, mode, rows[:-1])
        )
    entry = MX_ENTRIES[mode]
    return Encoded(
        parts.module,
        mode,
        parts.sources,
        result,
        parts.weight.dtype,
        bits=entry["bits"],
        group_size=entry["group_size"],
        repeat=repeat,
    )


def _global_shape(parts: Parts, role: str, mode: str, lead: Shape) -> Shape:
    """One scale for a matrix; one, or for a fused gate and up two, for each matrix of a stack."""
    name, shape = parts.sources[role], parts.tensors[role].shape
    if mode != "nvfp4":
        raise refuse(name, "Only nvfp4 has a scale for the whole tensor.", "no such tensor", mode)
    if (dtype := parts.tensors[role].dtype) not in (*FLOATS, "F64"):
        raise refuse(name, "A global scale is no float.", ", ".join(FLOATS), dtype)
    each = math.prod(shape[len(lead) :])
    if shape[: len(lead)] == lead and (each == 1 or (lead and each == 2)):
        return lead if each == 1 else (*lead, 2)
    raise refuse(name, "A global scale does not fit its weight.", str([*lead, 1]), str([*shape]))


def _integers(parts: Parts, declared: Declared, width: int | None) -> Encoded:
    """Signed integers, packed in 32-bit words or one a byte, with a scale for each group or row."""
    weight, scale, name = parts.weight, parts.scale, parts.sources["weight"]
    rows = weight.shape[:-1]
    if len(scale.shape) != len(weight.shape) or scale.shape[:-1] != rows or not scale.shape[-1]:
        raise refuse(name, "A weight and its scale do not fit.", f"a scale [{rows}, groups]", parts.words())
    groups = scale.shape[-1]
    if absent := sorted(declared.always - parts.sources.keys()):
        raise refuse(
            name, "A packed weight lacks what its config announces.", ", ".join(absent), parts.words()
        )
    bits, width = _integer_width(parts, declared, width)
    group = width // groups
    mlx_group = mlx_group_size(group)
    if width % groups or bits not in (2, 4, 8) or mlx_group is None:
        raise refuse(
            name,
            "MLX has no such integers.",
            "2, 4 or 8 bits in groups of a multiple of 32",
            f"{bits} bits, {width} columns in {groups} groups",
        )
    _check_zero_point(parts, bits, groups)
    scales = TensorForm(scale.dtype, (*rows, width // mlx_group))
    return Encoded(
        parts.module,
        "integers",
        parts.sources,
        {
            f"{parts.module}.weight": TensorForm("U32", (*rows, width * bits // 32)),
            f"{parts.module}.scales": scales,
            f"{parts.module}.biases": scales,
        },
        weight.dtype,
        bits=bits,
        group_size=mlx_group,
        repeat=(1, group // mlx_group),
        overruled=""
        if any(_covers(pair, bits, width, groups) for pair in declared.integers)
        else integer_words(declared.integers),
    )


def _integer_width(parts: Parts, declared: Declared, width: int | None) -> tuple[int, int]:
    """Bits and input width, from the weight's own shape first, then from the config."""
    stored, groups, name = parts.weight.shape[-1], parts.scale.shape[-1], parts.sources["weight"]
    if parts.weight.dtype == "I8":
        return 8, stored
    if width is not None:
        bits = stored * 32 // width if width > 0 else 0
        if not bits or bits * width != stored * 32:
            raise refuse(
                name, "A packed weight does not fit its weight_shape.", f"{width} columns", parts.words()
            )
        return bits, width
    for bits, group in declared.integers:
        if stored * 32 % bits == 0 and _covers((bits, group), bits, stored * 32 // bits, groups):
            return bits, stored * 32 // bits
    pairs = [f"{bits} bits in groups of {group or 'a row'}" for bits, group in declared.integers]
    raise refuse(
        name,
        "The bits of a packed weight cannot be told.",
        " or ".join(pairs) or "config_groups",
        parts.words(),
    )


def _covers(pair: tuple[int, int], bits: int, width: int, groups: int) -> bool:
    """Whether a declared pair gives as many scales as there are; group size 0 is the whole row."""
    return pair[0] == bits and (groups == 1 if pair[1] == 0 else width == pair[1] * groups)


def _check_zero_point(parts: Parts, bits: int, groups: int) -> None:
    if "zero_point" not in parts.sources:
        return
    *lead, rows = parts.weight.shape[:-1]
    # Packed weights have zero points packed along the rows.
    rows = -(-rows * bits // 32) if parts.weight.dtype in WORDS else rows
    wanted, found = (*lead, rows, groups), parts.tensors["zero_point"].shape
    if found != wanted:
        where = parts.sources["zero_point"]
        raise refuse(where, "A zero point does not fit its scale.", str([*wanted]), str([*found]))


def _fp8(parts: Parts, declared: Declared, dense: str) -> Encoded:
    """fp8 values with a scale for the tensor, for each expert, row, or block."""
    weight, scale, block = parts.weight, parts.scale, declared.block
    lead, columns = weight.shape[:-2], weight.shape[-1]
    by_block = block is not None and _fits_blocks(weight.shape, scale.shape, block)
    tiles = block in ((32, 32), (1, 32)) and by_block and columns % 32 == 0
    if block and tiles and declared.power_of_two and weight.dtype != "F8_E5M2":
        return _packed(parts, "mxfp8", weight.shape[:-1], columns // 4, columns // 32, (block[0], 1))
    scale_shape: Shape = ()
    overruled = ""
    if math.prod(scale.shape) == 1:
        block = None
    elif by_block:
        pass
    elif scale.shape in (weight.shape[:-1], (*weight.shape[:-1], 1)):
        block, scale_shape = None, (*weight.shape[:-1], 1)
    elif lead and scale.shape in (lead, (*lead, 1), (*lead, 1, 1)):
        block, scale_shape = None, (*lead, 1, 1)
    elif _fits_blocks(weight.shape, scale.shape, _DEFAULT_BLOCK):
        overruled = fp8_words(block) if block is not None else ""
        block = _DEFAULT_BLOCK
    else:
        raise refuse(
            parts.sources["scale"],
            "An fp8 scale does not fit its weight.",
            f"one for the tensor, for each row, or for each block of {block or _DEFAULT_BLOCK}",
            parts.words(),
        )
    return Encoded(
        parts.module,
        "fp8",
        parts.sources,
        {parts.stem: TensorForm(dense, weight.shape)},
        weight.dtype,
        block=block,
        scale_shape=scale_shape,
        overruled=overruled,
    )


def _fits_blocks(weight: Shape, scale: Shape, block: Block) -> bool:
    return scale == (*weight[:-2], -(-weight[-2] // block[0]), -(-weight[-1] // block[1]))


def describe(tensor: Stored) -> str:
    """A tensor's dtype and shape, for a message."""
    return f"{tensor.dtype} {[*tensor.shape]}"


def refuse(where: str, what: str, expected: str = "", found: str = "", hint: str = "") -> QuantizationError:
    """The error about one tensor."""
    return QuantizationError(what, where=where, expected=expected, found=found, hint=hint)
