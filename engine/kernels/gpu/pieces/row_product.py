"""One launch for the products of a token's row with several matrices, and for what stands around them.

Before: a sum of two rows, a gate, an RMS norm. After: biases, a clamp, a residual, and for queries and keys
the norm and the rotation of each head. Sums are float32 and every output is rounded once.
Legend: H width of the row, D width of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import mlx.core as mx

from mlx_experts.engine.kernels.expert_weights import Stack
from mlx_experts.engine.kernels.gpu import cuda
from mlx_experts.engine.kernels.gpu.joined import Joined
from mlx_experts.engine.kernels.gpu.pieces import tensor_rows
from mlx_experts.engine.kernels.gpu.pieces.packed import Output, output_text, pack
from mlx_experts.engine.kernels.gpu.pieces.piece import Constants, Piece, bounded, device_text
from mlx_experts.engine.kernels.gpu.pieces.tensor_rows import Matrices, TensorCut
from mlx_experts.engine.kernels.gpu.source import (
    Backend,
    Launch,
    array_names,
    bias_text,
    defines,
    format_number,
    text,
)
from mlx_experts.engine.kernels.request import Decline, Device

# Values of the row that a group holds at once. An Apple GPU's core has 32 KiB of such memory for all groups.
_SEGMENT: dict[Device, int] = {"cuda": 4096, "metal": 2048}
# Blocks that fill an H200, whose 132 multiprocessors hold several each.
_ENOUGH_GROUPS = 120
_GATES = {"sigmoid": "1.0f / (1.0f + me_exp(-v))", "softplus": "me_softplus(v)"}


@dataclass(frozen=True, eq=False)
class Norm:
    """An RMS norm: ``x / sqrt(mean(x^2) + eps) * (weight + offset)``, without a weight the factor alone."""

    weight: mx.array | None
    eps: float
    offset: float = 0.0


@dataclass(frozen=True, eq=False)
class Turn:
    """The rotation of ``dims`` values of a head.

    Args:
        inverse: float32 ``[dims / 2]``, the angle of each pair at position 1; None when each call gives it.
        interleaved: pairs are neighbours; otherwise the halves of ``dims``.
        factor: multiplies the rotated values.
        first: the first of them.
    """

    inverse: mx.array | None
    dims: int
    interleaved: bool = False
    factor: float = 1.0
    first: int = 0


@dataclass(frozen=True, eq=False)
class Heads:
    """What is done to each head of a row.

    Args:
        width: D.
        norm: over each head, or over the whole row with ``whole``.
        late: the norm comes after the rotation.
    """

    width: int
    norm: Norm | None = None
    turn: Turn | None = None
    late: bool = False
    whole: bool = False


@dataclass(frozen=True, eq=False)
class Product:
    """One matrix and what becomes of its product.

    Args:
        stack: the matrix; ``stack.first`` and its rows choose a part of the arrays.
        heads: the norm and rotation of each head, or None.
        width: of the heads that the output is split into, ``[1, heads, 1, width]``; None for a row.
        packed: as many rows of a gate follow each head's own; the gate becomes an output of its own.
        clip: values are clamped to plus and minus this.
        factor: multiplies the values.
        softcap: ``cap * tanh(value / cap)`` after it; 0 for none.
    """

    stack: Stack
    heads: Heads | None = None
    width: int | None = None
    packed: bool = False
    clip: float | None = None
    factor: float = 1.0
    softcap: float = 0.0

    @property
    def rows(self) -> int:
        """Rows of the matrix."""
        return self.stack.projection.rows


@dataclass(frozen=True, eq=False)
class RowProduct:
    """A launch in full.

    Args:
        width: H.
        added: the row is ``x + added * branch``; the sum, rounded, is the last output. None: no branch.
        gate: ``sigmoid`` or ``softplus`` of a gate multiplies the row, or None.
        gate_width: values of the row that share one value of the gate.
        residual: the first output is ``residual + multiplier * product``.
    """

    width: int
    products: tuple[Product, ...]
    norm: Norm | None = None
    added: float | None = None
    gate: str | None = None
    gate_width: int = 1
    residual: bool = False
    multiplier: float = 1.0

    @property
    def turns(self) -> Turn | None:
        """The rotation of a product, where one has any: they share frequencies."""
        held = (p.heads.turn for p in self.products if p.heads is not None)
        return next((t for t in held if t is not None), None)


def check(asked: RowProduct) -> Decline | None:
    """Why the kernel leaves this to plain MLX, or None when it takes it."""
    if asked.width % 32:
        return Decline(
            "width", "a multiple of 32", str(asked.width), "Nothing: the row cannot be cut evenly."
        )
    for product in asked.products:
        p = product.stack.projection
        if p.cols != asked.width:
            return Decline(
                "cols", f"matrices over {asked.width} values", str(p.cols), "Check the family's widths."
            )
        if p.group_size and asked.width % p.group_size:
            return Decline(
                "group_size", f"a divisor of {asked.width}", str(p.group_size), "Use another group size."
            )
        objection = (
            None if product.heads is None else check_heads(product.heads, p.rows // (1 + product.packed))
        )
        if objection is not None:
            return objection
        if product.heads is not None and product.heads.whole:
            return Decline(
                "whole", "a norm over one head", "over all heads", "The heads take a launch of their own."
            )
    turned = [p.heads for p in asked.products if p.heads is not None]
    if any(h.width != turned[0].width for h in turned):
        return Decline("head_width", "one width of heads", "several", "The heads take a launch of their own.")
    if turned and turned[0].width % _turn_warps("cuda"):
        return Decline("head_width", "a multiple of 16", str(turned[0].width), "Nothing.")
    return None


def check_heads(heads: Heads, rows: int) -> Decline | None:
    """Why heads of this kind are left to plain MLX, or None."""
    d, turn = heads.width, heads.turn
    if not 8 <= d <= 512 or d % 8 or rows % d:
        return Decline("head_width", "a multiple of 8 up to 512 that divides the row", str(d), "Nothing.")
    if turn is not None and (turn.first + turn.dims > d or turn.dims % 2 or turn.dims < 16):
        return Decline("rotated width", f"an even number from 16 to {d}", str(turn.dims), "Nothing.")
    return None


def _turn_warps(device: Device) -> int:
    return 16 if device == "cuda" else 8


@dataclass(frozen=True)
class Cut:
    """How the rows are shared out: ``rows`` a warp, ``warps`` a group."""

    rows: int
    warps: int

    @property
    def tiles(self) -> int:
        """Parts of a group that have rows of their own."""
        return self.warps

    @property
    def unit(self) -> int:
        """Rows a group."""
        return self.rows * self.warps


def matrices(asked: RowProduct, dtype: mx.Dtype) -> Matrices:
    """A launch as the tensor-core form looks at it."""
    heads = next((p.heads for p in asked.products if p.heads is not None), None)
    weighed = asked.norm is not None and asked.norm.weight is not None
    return Matrices(
        [replace(p.stack.projection, bias=False) for p in asked.products],
        dtype,
        exact=not weighed and asked.added is None and asked.gate is None,
        head=None if heads is None else heads.width,
    )


def choose(asked: RowProduct, device: Device, dtype: mx.Dtype, wide: bool = False) -> Cut | TensorCut:
    """The form and the cut: the tensor cores' for large matrices on CUDA, else a warp a row.

    Args:
        wide: the products are float32, as a router's are, whose nearly equal logits want exact sums.
    """
    how = tensor_rows.chosen(matrices(asked, dtype)) if device == "cuda" and not wide else None
    return how or cut(asked, device)


def cut(asked: RowProduct, device: Device) -> Cut:
    """A warp a row: a group a head where heads are turned, else rows as leave enough groups."""
    heads = next((p.heads for p in asked.products if p.heads is not None), None)
    if heads is not None:
        warps = _turn_warps(device)
        return Cut(heads.width // warps, warps)
    warps, total = 8, sum(p.rows for p in asked.products)
    rows = next((r for r in (8, 4, 2) if total >= r * warps * _ENOUGH_GROUPS), 1)
    return Cut(rows, warps)


def _arguments(part: str, product: Product, words: int) -> tuple[str, str, str]:
    """The arrays of a product from its first row on, as C pointers."""
    p, first = product.stack.projection, product.stack.first
    weight = f"(ME_DEVICE const me_uint*){part}_w" + (f" + {first * words}" if first else "")
    if not p.group_size:
        return weight, "(ME_DEVICE const uint8_t*)0", "(ME_DEVICE const uint8_t*)0"
    past = f" + {first * (p.cols // p.group_size)}" if first else ""
    scales = f"{part}_s{past}"
    return weight, scales, f"{part}_b{past}" if p.format == "affine" else scales


def _value_text(part: str, product: Product, constants: Constants) -> str:
    """``v`` with scale, bias, clamp, factor and cap, as a C expression in ``row``."""
    stack = product.stack
    value = bias_text(part, replace(stack.projection, bias=False), "v", "row")
    if stack.bias is not None:
        whole = product.rows == stack.bias.size
        bias = constants.add(stack.bias if whole else stack.bias[stack.first : stack.first + product.rows])
        value = f"({value} + me_value({bias}[row]))"
    if product.clip is not None:
        value = f"me_min(me_max({value}, {-product.clip!r}f), {product.clip!r}f)"
    if product.factor != 1.0:
        value = f"({float(product.factor)!r}f * {value})"
    if product.softcap:
        cap = f"{float(product.softcap)!r}f"
        value = f"({cap} * me_tanh({value} / {cap}))"
    return value


def turn_text(heads: Heads, weight: str, inverse: str, to: str, given: str, threads: int) -> str:
    """The call that turns one head out of ``ys``; ``weight`` and ``inverse`` as C pointers."""
    turn, norm = heads.turn, heads.norm
    kind = 0 if norm is None else 3 if heads.whole else 2 if heads.late else 1
    weighed = norm is not None and norm.weight is not None
    dims, inter, factor = (turn.dims, turn.interleaved, turn.factor) if turn else (0, False, 1.0)
    first = turn.first if turn else 0
    weight = weight if weighed else "(ME_DEVICE const float*)0"
    position = "float(offset[0])" if turn else "0.0f"
    inverse = inverse if turn else "(ME_DEVICE const float*)0"
    flags = f"{heads.width}, {first}, {dims}, {str(inter).lower()}, {kind}, {str(weighed).lower()}, {threads}"
    eps, offset = (norm.eps, norm.offset) if norm else (0.0, 0.0)
    return (
        f"me_turn<{flags}>(ys, {weight}, {float(offset)!r}f, {float(eps)!r}f, {given}, {inverse}, {position},"
        f" {float(factor)!r}f, {to}, tid, lane);"
    )


def _chain(ends: Sequence[int], name: str, bodies: Sequence[str]) -> str:
    """One body for each range of a number that ends there."""
    parts = [f"if ({name} < {end}) {{ {body} }}" for end, body in zip(ends, bodies, strict=True)]
    return " else ".join(parts) + "\n"


@dataclass
class Text:
    """What follows a launch's own inputs, outputs and text."""

    inputs: dict[str, mx.array | None] = field(default_factory=dict)
    outputs: dict[str, Output] = field(default_factory=dict)
    header: str = ""
    tail: str = ""


def build(
    asked: RowProduct,
    backend: Backend,
    device: Device,
    dtype: mx.Dtype,
    *,
    label: str = "row_product",
    wide: bool = False,
    join: bool = False,
    joined: Sequence[Joined] = (),
    how: Cut | TensorCut | None = None,
    more: Text | None = None,
) -> Piece:
    """The launch as a function of a token's arrays.

    Inputs by name: ``x`` ``[..., H]``; ``branch`` like it with ``added``; ``gate``; ``residual``; ``offset``
    (int32, position of the token first) and ``inverse`` where heads turn.

    Args:
        dtype: of the outputs; ``wide`` makes the products' float32.
        join: makes one array of the norms' weights, biases and frequencies. Not inside a function that MLX
            traces with the weights as its inputs.
        joined: where the launch finds arrays that lie in one; those are not joined again.
        how: another cut than the default (for tests).
        more: inputs, outputs and text that follow the products' own.
    """
    how, more, constants = how or choose(asked, device, dtype, wide), more or Text(), Constants(join, joined)
    segment = min(asked.width, _SEGMENT[device])
    inputs: dict[str, mx.array | None] = {"x": None}
    inputs |= {n: None for n, on in (("branch", asked.added is not None), ("gate", asked.gate)) if on}
    inputs |= {"residual": None} if asked.residual else {}
    norm, turn, inverse = asked.norm, asked.turns, "inverse"
    norm_weight = constants.add(norm.weight) if norm is not None and norm.weight is not None else ""
    if turn is not None:
        inputs |= {"offset": None} | ({"inverse": None} if turn.inverse is None else {})
        inverse = inverse if turn.inverse is None else constants.add(turn.inverse)
    outputs: dict[str, Output] = {}
    arrays: dict[int, str] = {}
    starts, ask, products, places, plain, turned, group = [0], [], [], [], [], [], 0
    for i, product in enumerate(asked.products):
        p, heads = product.stack.projection, product.heads
        # Parts of one joined matrix share its arrays.
        part = arrays.setdefault(id(product.stack.weight), f"p{i}")
        inputs |= array_names(part, replace(product.stack, bias=None))
        words = p.cols * p.bits // 32
        weight, scales, biases = _arguments(part, product, words)
        first = f"(tile - {starts[-1]}) * ME_ROWS"
        places.append(tensor_rows.matrix_text(weight, scales, biases, f"(group - {group})", p.rows))
        held = f"(min({p.rows} - {first}, ME_ROWS))" if p.rows % how.rows else "ME_ROWS"
        ask.append(f"me_ask({weight} + int64_t({first}) * {words}, {held} * {words * 4}, lane);")
        products.append(
            f"me_rows<{format_number(p)}, {p.bits}, {p.group_size}>({weight}, {scales}, {biases}, {first},"
            f" {p.rows - 1}, begin, lane, xs, total);"
        )
        value = _value_text(part, product, constants)
        if asked.residual and i == 0:
            value = f"me_value(residual[row]) + {float(asked.multiplier)!r}f * {value}"
        size = p.rows // (1 + product.packed)
        shape = (1, 1, size) if product.width is None else (1, size // product.width, 1, product.width)
        outputs[f"y{i}"] = Output(shape, mx.float32 if wide else dtype)
        if product.packed:
            outputs[f"g{i}"] = Output.row(size, dtype)
        into, out = f"const int row = {first} + lane;", f"me_set(y{i} + row, {value});"
        guard = f"lane < ME_ROWS && row < {p.rows}"
        if heads is None:
            plain.append(f"{into} if ({guard}) {out}")
            turned.append("")
        else:
            plain.append(f"{into} if (lane < ME_ROWS) ys[warp * ME_ROWS + lane] = {value};")
            weighed = heads.norm.weight if heads.norm is not None else None
            scale = "" if weighed is None else constants.add(weighed)
            d, unit, threads = heads.width, f"(group - {group})", how.warps * 32
            to = f"y{i} + {unit}{' / 2' if product.packed else ''} * {d}"
            call = turn_text(heads, scale, inverse, to, "1.0f", threads)
            gate = f"for (int i = tid; i < {d}; i += {threads}) me_set(g{i} + {unit} / 2 * {d} + i, ys[i]);"
            turned.append(f"if ({unit} % 2 == 0) {{ {call} }} else {{ {gate} }}" if product.packed else call)
        group += -(-p.rows // how.unit)
        starts.append(group * how.tiles)
    if asked.added is not None:
        outputs["stream"] = Output.row(asked.width, dtype)
    inputs |= constants.inputs() | more.inputs
    outputs |= more.outputs
    packed = pack(outputs, device)
    written, found = output_text(outputs, packed)
    settings = defines(
        {
            "H": asked.width,
            "SEGMENT": segment,
            "ROWS": how.rows,
            "WARPS": how.warps,
            "BLOCKS": group,
            "ADDED": int(asked.added is not None),
            "ADD_SCALE": f"{float(asked.added or 0.0)!r}f",
            "GATED": int(asked.gate is not None),
            "GATE_WIDTH": asked.gate_width,
            "OPEN": _GATES.get(asked.gate or "", "v"),
            "NORM": int(norm is not None),
            "NORM_WEIGHT": int(norm_weight != ""),
            "NORM_W": norm_weight,
            "NORM_OFFSET": f"{float(norm.offset if norm else 0.0)!r}f",
            "EPS": f"{float(norm.eps if norm else 0.0)!r}f",
        }
    )
    with_heads = any(p.heads is not None for p in asked.products)
    ends = [start // how.tiles for start in starts[1:]]
    if isinstance(how, TensorCut):
        form = matrices(asked, dtype)
        settings += defines(tensor_rows.settings(form, how))
        body, helpers = tensor_rows.body(_chain(ends, "group", places)), tensor_rows.header(form)
        room, limits = tensor_rows.layout(form, how)[1], bounded(device, how.warps, how.blocks)
    else:
        body, helpers = text("pieces/product.h"), text("rows.h") + text("pieces/rows_of.h")
        body = body.replace("ME_ASK\n", _chain(starts[1:], "tile", ask) if device == "cuda" else "")
        body = body.replace("ME_PRODUCTS\n", _chain(starts[1:], "tile", products))
        room, limits = 0, bounded(device, how.warps)
    memory = f"ME_GROUP_ARRAY(float, ys, {how.unit})\n" if with_heads else ""
    finish = _chain(starts[1:], "tile", plain)
    if isinstance(how, TensorCut):
        finish = f"if (warp < ME_TEAMS) {{\n{finish}}}\n"
    finish += "me_barrier();\n" + _chain(ends, "group", turned) if with_heads else ""
    launch = Launch(
        label=label,
        inputs=tuple(inputs),
        outputs=written,
        header=text(backend.prelude)
        + settings
        + helpers
        + (text("pieces/turn.h") if with_heads else "")
        + (text("pieces/gates.h") if asked.gate is not None else "")
        + device_text(device)
        + more.header
        + limits,
        source=backend.opening + found + "const int e = 0; (void)e;\n" + memory + body + finish + more.tail,
        groups=group,
        warps=how.warps,
        shared=room,
    )
    return Piece(backend, launch, inputs, outputs, packed).reading(joined)


def stack_part(stack: Stack, first: int, rows: int) -> Stack:
    """Some rows of a matrix, as a matrix over the same arrays."""
    return replace(stack, projection=replace(stack.projection, rows=rows), first=stack.first + first)


def backend_of(device: Device) -> Backend:
    """The back-end of a device."""
    from mlx_experts.engine.kernels.gpu import metal

    return cuda.BACKEND if device == "cuda" else metal.BACKEND


def joined(stacks: Sequence[Stack]) -> list[Stack] | None:
    """Matrices of one width and format as parts of one, which makes a launch's inputs fewer.

    The arrays are copies: whoever keeps the single matrices may keep views of these instead
    (rows ``first`` to ``first + rows``), and needs no memory for both.

    Returns:
        The matrices in their order, or None where they are stored in several ways.
    """
    kinds = {replace(s.projection, rows=0, bias=False) for s in stacks}
    if len(kinds) > 1 or any(s.weight.ndim != 2 or s.first or s.global_scale is not None for s in stacks):
        return None
    weight = mx.concatenate([s.weight for s in stacks])
    held = [
        [a for a in arrays if a is not None]
        for arrays in zip(*((s.scales, s.biases) for s in stacks), strict=True)
    ]
    scales, biases = (mx.concatenate(arrays) if arrays else None for arrays in held)
    mx.eval([a for a in (weight, scales, biases) if a is not None])
    parts, first = [], 0
    for stack in stacks:
        bias = stack.bias
        if bias is not None and first:
            # A part's bias is read from its first row on.
            bias = mx.concatenate([mx.zeros((first,), bias.dtype), bias])
        parts.append(replace(stack, weight=weight, scales=scales, biases=biases, bias=bias, first=first))
        first += stack.projection.rows
    return parts
