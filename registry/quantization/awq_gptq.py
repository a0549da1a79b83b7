"""AWQ and GPTQ: integers that are packed across the matrix, with the input axis first.

Legend: R output rows, C input columns, G groups along C. Both compute (q - z) · s with unsigned q and z.

    GPTQ  qweight [C·bits/32, R] packed along C; qzeros [G, R·bits/32]; scales [G, R]; g_idx [C]
    AWQ   qweight [C, R/8], eight rows in the order 0 2 4 6 1 3 5 7; qzeros [G, R/8] likewise; scales [G, R]
"""

from __future__ import annotations

from mlx_experts.registry.quantization.formats import (
    FLOATS,
    WORDS,
    Encoded,
    Parts,
    TensorForm,
    integer_words,
    refuse,
)
from mlx_experts.registry.quantization.methods import Declared, mlx_group_size


def read_transposed(parts: Parts, declared: Declared) -> Encoded:
    """Tell whether a ``qweight`` is AWQ's or GPTQ's, by the axis that is packed.

    Args:
        parts: roles weight (qweight), zero_point (qzeros), scale (scales) and perhaps order (g_idx).

    Raises:
        QuantizationError: a companion is absent or does not fit.
    """
    name = parts.sources["weight"]
    if "order" in declared.always and "order" not in parts.tensors:
        raise refuse(name, "desc_act is true, and a packed weight has no order of its columns.", "g_idx")
    absent = [role for role in ("zero_point", "scale") if role not in parts.tensors]
    if absent:
        raise refuse(name, "A packed weight has no zero points or scales.", "qweight, qzeros and scales")
    weight, scale, zero = parts.weight, parts.scale, parts.tensors["zero_point"]
    shapes = (weight.shape, scale.shape, zero.shape)
    matrices = all(len(shape) == 2 and 0 not in shape for shape in shapes)
    if not matrices or weight.dtype not in WORDS or zero.dtype not in WORDS or scale.dtype not in FLOATS:
        raise refuse(name, "A weight and its scale fit no encoding.", "matrices of words", parts.words())
    groups, rows = scale.shape
    bits, left = divmod(zero.shape[1] * 32, rows)
    by_row = weight.shape[1] == rows
    columns = weight.shape[0] * 32 // bits if by_row and bits else weight.shape[0]
    if left or zero.shape[0] != groups or (not by_row and weight.shape[1] != zero.shape[1]):
        raise refuse(
            name, "Zero points do not fit their weight.", f"{groups} groups of {rows} rows", str(shapes)
        )
    group = mlx_group_size(columns // groups)
    if columns % groups or group is None or bits not in ((2, 4, 8) if by_row else (4,)):
        raise refuse(
            name,
            "MLX has no such integers.",
            "4 bits (GPTQ: 2, 4 or 8) in groups of a multiple of 32",
            f"{bits} bits, {columns} columns in {groups} groups",
        )
    if "order" in parts.tensors and parts.tensors["order"].shape != (columns,):
        where = parts.sources["order"]
        raise refuse(
            where, "An order of groups does not fit.", str([columns]), str(parts.tensors["order"].shape)
        )
    tensors = TensorForm(scale.dtype, (rows, columns // group))
    return Encoded(
        parts.module,
        "gptq" if by_row else "awq",
        parts.sources,
        {
            f"{parts.module}.weight": TensorForm("U32", (rows, columns * bits // 32)),
            f"{parts.module}.scales": tensors,
            f"{parts.module}.biases": tensors,
        },
        weight.dtype,
        bits=bits,
        group_size=group,
        repeat=(1, columns // groups // group),
        zero_offset=declared.zero_offset if by_row else 0,
        overruled=""
        if (bits, columns // groups) in _sizes(declared, columns)
        else integer_words(declared.integers),
    )


def _sizes(declared: Declared, columns: int) -> list[tuple[int, int]]:
    """The declared pairs, with group size 0 written out as the whole row."""
    return [(bits, size or columns) for bits, size in declared.integers]
