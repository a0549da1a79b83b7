"""Products of packed weights with several inputs on an Intel processor's matrix unit (AMX), float32-exact.

The unit multiplies bfloat16 and sums in float32. The integers of an affine format, and small floats, are
bfloat16 as they are; an input is the sum of three bfloat16 numbers, without a rest. So three products give
what float32 gives, and a group's scale and bias are applied to the float32 sums. A call takes ``ROWS`` rows
of weights; a *step* is the ``STEP`` weights of a row that one instruction multiplies; a *block* is up to
``TOKENS`` inputs. Up to ``PACKED`` inputs share one tile with all three parts.
Source: Intel's Architecture Instruction Set Extensions reference, chapter 3 (tiles).
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils

from mlx_experts.engine.kernels.cpu import native
from mlx_experts.engine.kernels.cpu.products.rows import F32, I8, I16, I32, I64, Lanes, blocks_of, prefetch
from mlx_experts.engine.kernels.request import Projection

ROWS, STEP, TOKENS, PACKED, PARTS = 32, 32, 16, 5, 3
_LINE, _TILE = 64, 1024  # bytes of a tile's row, and of a tile
_CHUNK = 64  # bytes of a row that are turned at once

_PERMISSION, _TILE_DATA, _ARCH_PRCTL = 0x1023, 18, 158  # Linux: arch_prctl(ARCH_REQ_XCOMP_PERM, tile data)
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


@lru_cache(maxsize=1)
def available() -> bool:
    """Whether this processor has the unit, its code may be made, and the system lets this process use it."""
    if not sys.platform.startswith("linux") or not native.has("amx-tile", "amx-bf16", "avx512bw", "avx512vl"):
        return False
    return ctypes.CDLL(None).syscall(_ARCH_PRCTL, _PERMISSION, _TILE_DATA) == 0


def group_of(projection: Projection) -> int:
    """Weights of a row that are summed before anything is scaled."""
    if projection.format != "plain":
        return projection.group_size
    return next(size for size in (256, 128, 64, 32) if projection.cols % size == 0)


def takes(projection: Projection) -> bool:
    """Whether a storage format has weights that are bfloat16 as they are, in whole steps."""
    p = projection
    exact = p.format in ("affine", "mxfp4", "mxfp8") or (p.format == "plain" and p.dtype == "bfloat16")
    return exact and p.cols % STEP == 0 and group_of(p) % STEP == 0


def _by_table(projection: Projection) -> bool:
    return projection.format == "mxfp4" or (projection.format == "affine" and projection.bits == 4)


def _order(projection: Projection) -> tuple[list[int], list[float]]:
    """Which inputs of a step meet its weights in turn, and what each is multiplied by beforehand."""
    if _by_table(projection):
        return [8 * block + j + 4 * k for block in range(4) for j in range(4) for k in range(2)], [1.0] * STEP
    scales = blocks_of(projection).scales
    return list(range(STEP)), [scales[i % len(scales)] for i in range(STEP)]


@lru_cache(maxsize=1)
def configurations() -> np.ndarray:
    """The tiles' shapes, [rows of inputs, 64 bytes]: six tiles of that many rows, two of sixteen."""
    made = np.zeros((TOKENS + 1, 64), np.uint8)
    for rows, config in enumerate(made):
        config[0] = 1
        config[16:32].view(np.uint16)[:] = _LINE
        config[48:56] = [max(rows, 1)] * 6 + [TOKENS] * 2
    return made


class _Tiles:
    """Writes the unit's instructions."""

    def __init__(self, builder: Any) -> None:
        self._builder, self._pointer = builder, I8.as_pointer()

    def _call(self, name: str, kinds: list[Any], arguments: list[Any]) -> None:
        kind = ir.FunctionType(ir.VoidType(), kinds)
        function = cgutils.get_or_insert_function(self._builder.module, kind, f"llvm.x86.{name}")
        self._builder.call(function, arguments)

    def _at(self, address: Any) -> Any:
        return self._builder.inttoptr(address, self._pointer)

    def configure(self, address: Any) -> None:
        self._call("ldtilecfg", [self._pointer], [self._at(address)])

    def release(self) -> None:
        self._call("tilerelease", [], [])

    def zero(self, tile: int) -> None:
        self._call("tilezero", [I8], [I8(tile)])

    def load(self, tile: int, address: Any) -> None:
        self._call("tileloadd64", [I8, self._pointer, I64], [I8(tile), self._at(address), I64(_LINE)])

    def store(self, tile: int, address: Any) -> None:
        self._call("tilestored64", [I8, self._pointer, I64], [I8(tile), self._at(address), I64(_LINE)])

    def multiply(self, name: str, total: int, inputs: int, weights: int) -> None:
        self._call(name, [I8, I8, I8], [I8(total), I8(inputs), I8(weights)])


def split(projection: Projection) -> native.Native:
    """The compiled split of one input into its three parts.

    Returns:
        A function ``(x, steps, inputs, out, sums)``: ``x`` float32 of ``steps`` steps; ``inputs`` of the
        block, which parts of a step are apart; ``out`` where its first part goes; ``sums`` room for the sum
        over each group, which has ``group_of`` weights.
    """
    order, scales = _order(projection)
    per_group = group_of(projection) // STEP

    def write(builder: Any, arguments: list[Any]) -> None:
        x, steps, inputs, out, sums = arguments
        lanes, narrow = Lanes(builder, STEP), ir.VectorType(I16, STEP)
        apart = builder.mul(inputs, I64(_LINE))
        groups = builder.udiv(steps, I64(per_group))
        with cgutils.for_range(builder, groups) as group:
            total = None
            for k in range(per_group):
                step = builder.add(builder.mul(group.index, I64(per_group)), I64(k))
                values = lanes.load(F32, x, builder.mul(step, I64(STEP)))
                total = values if total is None else builder.fadd(total, values)
                rest = lanes.pick(values, order)
                if any(s != 1.0 for s in scales):
                    rest = builder.fmul(rest, ir.Constant(lanes.floats, scales))
                place = builder.add(out, builder.mul(step, builder.mul(apart, I64(PARTS))))
                for part in range(PARTS):
                    bits = lanes.masked(lanes.as_ints(rest), 0xFFFF0000)
                    high = builder.trunc(builder.lshr(bits, lanes.whole(16)), narrow)
                    builder.store(high, builder.inttoptr(place, narrow.as_pointer()), align=4)
                    if part + 1 < PARTS:
                        # Exact: without flags, since a reordered difference would be another number.
                        rest = builder.fsub(rest, lanes.as_floats(bits), flags=())
                        place = builder.add(place, apart)
            at = builder.add(sums, builder.mul(group.index, I64(4)))
            builder.store(lanes.total(total), builder.inttoptr(at, F32.as_pointer()), align=4)

    return native.function("amx_split", 5, write)


def scratch_bytes(projection: Projection) -> int:
    """Room that a call of a product needs."""
    row = 4 * blocks_of(projection).words or 2
    words = _padded(projection.cols // blocks_of(projection).weights * row)
    scales = _padded(projection.cols // group_of(projection) * 4)
    return (words + 2 * scales) * ROWS + group_of(projection) // STEP * 2 * _TILE + 4 * _TILE


@dataclass(frozen=True)
class Functions:
    """What multiplies a stack on the matrix unit.

    Args:
        split: prepares an input.
        product: multiplies rows of weights with prepared inputs.
        input_bytes: bytes of a prepared input.
        numbers: float32 numbers that are kept of an input beside it.
        steps: steps of a row.
    """

    split: native.Native
    product: native.Native
    input_bytes: int
    numbers: int
    steps: int


def functions(projection: Projection) -> Functions:
    """The float32-exact form."""
    steps = projection.cols // STEP
    numbers = projection.cols // group_of(projection)
    return Functions(split(projection), product(projection), steps * PARTS * _LINE, numbers, steps)


def _padded(count: int) -> int:
    return -(-count // _CHUNK) * _CHUNK


def product(projection: Projection) -> native.Native:
    """The compiled product of up to ``ROWS`` rows of weights with blocks of inputs.

    Returns:
        A function ``(weights, scales, biases, row_bytes, scale_bytes, count, inputs, sums, blocks, tokens,
        configs, out, scratch)``: the first six as of ``rows.rows_product``; ``blocks`` blocks of ``tokens``
        inputs as ``split`` writes them; ``configs`` the address of ``configurations``; ``out`` receives
        float32 [blocks * tokens, ROWS].
    """

    def write(builder: Any, arguments: list[Any]) -> None:
        Product(builder, projection, arguments).write()

    return native.function("amx_product", 13, write)


class Product:
    """Writes ``product``.

    A subclass has other parts of inputs, other steps, and other numbers for each group of an input.
    """

    parts, step, instruction, numbers = PARTS, STEP, "tdpbf16ps", 1

    def __init__(self, builder: Any, projection: Projection, arguments: list[Any]) -> None:
        self.builder, self.projection = builder, projection
        (self.w, self.s, self.b, self.row_bytes, self.scale_bytes, self.count, self.inputs, self.sums,
         self.blocks, self.tokens, self.configs, self.out, scratch) = arguments  # fmt: skip
        self.lanes, self.tiles = Lanes(builder, 16), _Tiles(builder)
        self.cut = blocks_of(projection)
        self.group = self.group_of(projection)
        self.steps = self.group // self.step
        self.groups = projection.cols // self.group
        self.stored_groups = projection.cols // (projection.group_size or self.group)
        # The order of what the scratch holds.
        self.products = scratch
        self.decoded = builder.add(scratch, I64(4 * _TILE))
        self.words = builder.add(self.decoded, I64(self.steps * 2 * _TILE))
        row = projection.cols // self.cut.weights * (4 * self.cut.words or 2)
        self.turned_scales = builder.add(self.words, I64(_padded(row) * ROWS))
        self.turned_biases = builder.add(self.turned_scales, I64(_padded(self.stored_groups * 4) * ROWS))
        self.row = row

    @staticmethod
    def group_of(projection: Projection) -> int:
        """Weights of a row that are summed before anything is scaled."""
        return group_of(projection)

    @property
    def scaled(self) -> bool:
        return self.projection.format != "plain"

    @property
    def shifted(self) -> bool:
        return self.projection.format == "affine"

    def write(self) -> None:
        builder, p = self.builder, self.projection
        self._turn(self.w, self.row_bytes, self.row, self.words)
        width = {"affine": 4 if p.dtype == "float32" else 2}.get(p.format, 1)
        if self.scaled:
            self._turn(self.s, self.scale_bytes, self.stored_groups * width, self.turned_scales)
        if self.shifted:
            self._turn(self.b, self.scale_bytes, self.stored_groups * width, self.turned_biases)
        packed = builder.icmp_unsigned("<=", self.tokens, I64(PACKED))
        rows = builder.select(packed, builder.mul(self.tokens, I64(PARTS)), self.tokens)
        if self.parts == 1:
            rows = self.tokens
        self.tiles.configure(builder.add(self.configs, builder.mul(rows, I64(_LINE))))
        self._groups(packed)
        self.tiles.release()

    def _turn(self, begin: Any, stride: Any, size: int, out: Any) -> None:
        """Put ``size`` bytes of each row, words [ROWS, n], as words [n, ROWS]; the last row repeats."""
        builder = self.builder
        whole, rest = divmod(size, _CHUNK)
        last = builder.sub(self.count, I64(1))

        def chunk(index: Any, left: int) -> None:
            skipped = builder.mul(index, I64(_CHUNK))
            for half in range(ROWS // 16):
                loaded = []
                for r in range(16):
                    wanted = I64(half * 16 + r)
                    row = builder.select(builder.icmp_unsigned("<", wanted, last), wanted, last)
                    address = builder.add(builder.add(begin, builder.mul(row, stride)), skipped)
                    loaded.append(self._bytes(address, left))
                for word, vector in enumerate(_transposed(self.lanes, loaded)):
                    place = builder.mul(builder.add(builder.mul(index, I64(16)), I64(word)), I64(ROWS * 4))
                    self._put(vector, builder.add(out, builder.add(place, I64(half * _LINE))))

        if whole:
            with cgutils.for_range(builder, I64(whole)) as loop:
                chunk(loop.index, _CHUNK)
        if rest:
            chunk(I64(whole), rest)

    def _bytes(self, address: Any, left: int) -> Any:
        """The first ``left`` bytes of a line as words; nothing behind them is read."""
        builder, kind = self.builder, ir.VectorType(I8, _CHUNK)
        place = builder.inttoptr(address, kind.as_pointer())
        if left == _CHUNK:
            return builder.bitcast(builder.load(place, align=1), self.lanes.ints)
        mask = ir.Constant(ir.VectorType(ir.IntType(1), _CHUNK), [i < left for i in range(_CHUNK)])
        form = ir.FunctionType(kind, [kind.as_pointer(), I32, mask.type, kind])
        load = cgutils.get_or_insert_function(builder.module, form, "llvm.masked.load.v64i8.p0")
        nothing = ir.Constant(kind, [0] * _CHUNK)
        return builder.bitcast(builder.call(load, [place, I32(1), mask, nothing]), self.lanes.ints)

    def _put(self, vector: Any, address: Any) -> None:
        self.builder.store(vector, self.builder.inttoptr(address, vector.type.as_pointer()), align=4)

    def _get(self, kind: Any, address: Any) -> Any:
        return self.builder.load(self.builder.inttoptr(address, kind.as_pointer()), align=4)

    def _groups(self, packed: Any) -> None:
        """Decode group by group, and add each one's products to the outputs."""
        builder = self.builder
        block_bytes = builder.mul(self.tokens, I64(self.projection.cols // self.step * self.parts * _LINE))
        group_bytes = builder.mul(self.tokens, I64(self.steps * self.parts * _LINE))
        ahead = builder.add(self.w, builder.mul(self.row_bytes, I64(ROWS)))
        lines = -(-self.row * ROWS // self.groups // _LINE)
        with cgutils.for_range(builder, I64(self.groups)) as loop:
            for line in range(lines):
                prefetch(builder, builder.add(ahead, builder.mul(loop.index, I64(lines * _LINE))))
                ahead = builder.add(ahead, I64(_LINE)) if line + 1 < lines else ahead
            for step in range(self.steps):
                self._decode(builder.add(builder.mul(loop.index, I64(self.steps)), I64(step)), step)
            factors = [self._factors(loop.index, half) for half in range(ROWS // 16)]
            with cgutils.for_range(builder, self.blocks) as block:
                inputs = builder.add(self.inputs, builder.mul(block.index, block_bytes))
                inputs = builder.add(inputs, builder.mul(loop.index, group_bytes))
                first = builder.mul(block.index, self.tokens)
                self._multiply(packed, inputs, (loop.index, first), factors)

    def _multiply(self, packed: Any, inputs: Any, at: Any, factors: list[tuple[Any, Any]]) -> None:
        """Add the products of a block's inputs with the decoded group."""
        if self.parts == 1:
            self._few(inputs, at, factors)
            return
        with self.builder.if_else(packed) as (few, many):
            with few:
                self._few(inputs, at, factors)
            with many:
                self._many(inputs, at, factors)

    def _decode(self, step: Any, place: int) -> None:
        """Write the two tiles of one step of the group."""
        builder, per_step = self.builder, self.step // self.cut.weights
        words = self.cut.words
        if self.projection.format == "plain":
            per_step, words = STEP // 2, 1  # a word holds two weights
        for half in range(ROWS // 16):
            rows: list[Any] = []
            for block in range(per_step):
                at = builder.add(builder.mul(step, I64(per_step)), I64(block))
                at = builder.add(self.words, builder.mul(at, I64(words * ROWS * 4)))
                held = [
                    self._get(self.lanes.ints, builder.add(at, I64(j * ROWS * 4 + half * _LINE)))
                    for j in range(words)
                ]
                rows += self.pieces(held)
            for row, words_of_row in enumerate(rows):
                target = (place * 2 + half) * _TILE + row * _LINE
                self._put(words_of_row, builder.add(self.decoded, I64(target)))

    def pieces(self, words: list[Any]) -> list[Any]:
        """The weights of a block as words of what is multiplied: pairs of bfloat16, ordered by ``_order``."""
        builder, lanes, p = self.builder, self.lanes, self.projection
        if p.format == "plain":
            return words
        if _by_table(p):
            values = _E2M1 if p.format == "mxfp4" else tuple(range(16))
            shorts = ir.VectorType(I16, 32)
            table = ir.Constant(shorts, [int(np.float32(v).view(np.uint32)) >> 16 for v in values] * 2)
            form = ir.FunctionType(shorts, [shorts, shorts])
            look_up = cgutils.get_or_insert_function(builder.module, form, "llvm.x86.avx512.permvar.hi.512")
            found = [builder.lshr(words[0], lanes.whole(4 * j)) for j in range(4)]
            return [
                builder.bitcast(builder.call(look_up, [table, builder.bitcast(f, shorts)]), lanes.ints)
                for f in found
            ]

        def value(position: int) -> Any:
            if p.format == "mxfp8":
                return lanes.as_ints(lanes.from_e4m3(builder.lshr(words[0], lanes.whole(8 * position))))
            return lanes.as_ints(lanes.affine_field(p.bits, words, position))

        def pair(position: int) -> Any:
            low = builder.lshr(value(position), lanes.whole(16))
            return builder.or_(low, lanes.masked(value(position + 1), 0xFFFF0000))

        return [pair(position) for position in range(0, self.cut.weights, 2)]

    def _factors(self, group: Any, half: int) -> tuple[Any, Any]:
        """Sixteen rows' scale and bias of a group; None where the format has none."""
        scale = self._stored(self.turned_scales, group, half) if self.scaled else None
        return scale, self._stored(self.turned_biases, group, half) if self.shifted else None

    def _stored(self, turned: Any, group: Any, half: int) -> Any:
        builder, lanes, p = self.builder, self.lanes, self.projection
        each = {"affine": 1 if p.dtype == "float32" else 2}.get(p.format, 4)  # groups a word
        group = builder.udiv(group, I64(self.groups // self.stored_groups)) if self.scaled else group
        place = builder.mul(builder.udiv(group, I64(each)), I64(ROWS * 4))
        word = self._get(lanes.ints, builder.add(turned, builder.add(place, I64(half * _LINE))))
        if each == 1:
            return lanes.as_floats(word)
        bits = 32 // each
        shift = builder.trunc(builder.mul(builder.urem(group, I64(each)), I64(bits)), I32)
        word = lanes.masked(builder.lshr(word, self._spread(shift, lanes.ints)), (1 << bits) - 1)
        if each == 4:
            return lanes.from_e8m0(word)
        return (
            lanes.as_floats(lanes.shifted_left(word, 16)) if p.dtype == "bfloat16" else lanes.from_f16(word)
        )

    def _spread(self, value: Any, kind: Any) -> Any:
        builder = self.builder
        one = builder.insert_element(ir.Constant(kind, ir.Undefined), value, I32(0))
        return builder.shuffle_vector(one, one, ir.Constant(ir.VectorType(I32, kind.count), [0] * kind.count))

    def as_sums(self, words: Any) -> Any:
        """What a tile of sums holds, as float32."""
        return self.lanes.as_floats(words)

    def _few(self, inputs: Any, at: Any, factors: list[tuple[Any, Any]]) -> None:
        """All three parts of a block's inputs in one tile: 0 and 1 sum, 4 holds inputs, 6 and 7 weights."""
        builder, tiles = self.builder, self.tiles
        for total in (0, 1):
            tiles.zero(total)
        step_bytes = builder.mul(self.tokens, I64(self.parts * _LINE))
        for step in range(self.steps):
            tiles.load(4, builder.add(inputs, builder.mul(step_bytes, I64(step))))
            for half in (0, 1):
                tiles.load(6 + half, builder.add(self.decoded, I64((step * 2 + half) * _TILE)))
                tiles.multiply(self.instruction, half, 4, 6 + half)
        for half in (0, 1):
            tiles.store(half, builder.add(self.products, I64(half * _TILE)))
        apart = builder.mul(self.tokens, I64(_LINE))

        def sum_of(token: Any, half: int) -> Any:
            place = builder.add(self.products, builder.mul(token, I64(_LINE)))
            places = [builder.add(place, I64(half * _TILE))]
            places += [builder.add(places[0], builder.mul(apart, I64(part))) for part in range(1, self.parts)]
            total = None
            for place in reversed(places):
                part = self.as_sums(self._get(self.lanes.ints, place))
                total = part if total is None else builder.fadd(part, total)
            return total

        self._add(at, factors, sum_of)

    def _many(self, inputs: Any, at: Any, factors: list[tuple[Any, Any]]) -> None:
        """A tile for each part: 0 and 1 sum the first part, 2 and 3 the others, 4 and 5 hold inputs."""
        builder, tiles = self.builder, self.tiles
        for total in range(4):
            tiles.zero(total)
        part_bytes = builder.mul(self.tokens, I64(_LINE))
        for step in range(self.steps):
            for half in (0, 1):
                tiles.load(6 + half, builder.add(self.decoded, I64((step * 2 + half) * _TILE)))
            for part in range(PARTS):
                held, total = 4 + part % 2, 2 * min(part, 1)
                skipped = builder.mul(part_bytes, I64(step * PARTS + part))
                tiles.load(held, builder.add(inputs, skipped))
                for half in (0, 1):
                    tiles.multiply(self.instruction, total + half, held, 6 + half)
        for total in range(4):
            tiles.store(total, builder.add(self.products, I64(total * _TILE)))

        def sum_of(token: Any, half: int) -> Any:
            place = builder.add(self.products, builder.mul(token, I64(_LINE)))
            high, low = (
                self._get(self.lanes.floats, builder.add(place, I64((half + more) * _TILE)))
                for more in (0, 2)
            )
            return builder.fadd(high, low)

        self._add(at, factors, sum_of)

    def _add(self, at: Any, factors: list[tuple[Any, Any]], sum_of: Callable[[Any, int], Any]) -> None:
        """Add a group's scaled sums to the outputs of a block; the first group sets them."""
        builder, lanes = self.builder, self.lanes
        group, first = at
        fresh = builder.icmp_unsigned("==", group, I64(0))
        with cgutils.for_range(builder, self.tokens) as loop:
            row = builder.add(first, loop.index)
            out = builder.add(self.out, builder.mul(row, I64(ROWS * 4)))
            place = builder.add(builder.mul(row, I64(self.groups)), group)
            place = builder.add(self.sums, builder.mul(place, I64(4 * self.numbers)))
            held = [self._get(F32, builder.add(place, I64(4 * i))) for i in range(self.numbers)]
            total, *own = (self._spread(number, lanes.floats) for number in held)
            for half, (scale, shift) in enumerate(factors):
                value = sum_of(loop.index, half)
                for factor in own:
                    value = builder.fmul(value, factor)
                if scale is not None:
                    value = builder.fmul(value, scale)
                if shift is not None:
                    value = builder.fadd(value, builder.fmul(shift, total))
                place = builder.add(out, I64(half * _LINE))
                before = builder.select(fresh, lanes.real(0.0), self._get(lanes.floats, place))
                self._put(builder.fadd(before, value), place)


def _transposed(lanes: Lanes, rows: list[Any]) -> list[Any]:
    """Sixteen vectors of sixteen words with rows and columns exchanged."""
    for bit in (8, 4, 2, 1):
        turned = list(rows)
        for i in (i for i in range(16) if not i & bit):
            a, b = rows[i], rows[i | bit]
            turned[i] = lanes.merge(a, b, [j if not j & bit else 16 + j - bit for j in range(16)])
            turned[i | bit] = lanes.merge(a, b, [j + bit if not j & bit else 16 + j for j in range(16)])
        rows = turned
    return rows
