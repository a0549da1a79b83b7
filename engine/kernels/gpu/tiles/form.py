"""How a projection's codes meet the inputs on tensor cores: in which parts, steps and columns.

There are two forms. ``pairs`` turns codes into bfloat16 values and takes every format; ``chunk.cu`` says how.
``digits`` takes affine codes of 4 and 8 bits as they are, as bytes, and each group's inputs as two signed
bytes of one scale (``digits.cu``): fewer than half as many instructions, and a sum without rounding.
"""

from __future__ import annotations

from dataclasses import dataclass

from mlx_experts.engine.kernels.gpu.source import text
from mlx_experts.engine.kernels.request import Projection

# Codes of a row that a warp takes in one step, and those of one lane.
STEP, CHUNK = 128, 32
# Bytes of a vector, and of all banks of shared memory.
_VECTOR, _BANKS = 16, 128
# Columns of a product, which its inputs' parts and scale groups share.
_COLUMNS = 8
# Words of one row that a lane reads of a unit at most.
_UNIT_WORDS = 16
_SCALE_TYPES = {
    "bfloat16": "__nv_bfloat16",
    "float16": "__half",
    "float32": "float",
    "uint8": "uint8_t",
}
_CODECS = {
    "affine": "affine",
    "mxfp4": "float",
    "mxfp8": "float",
    "nvfp4": "float",
    "plain": "plain",
}
_DIGIT_BITS = (4, 8)


def tile_text(*names: str) -> str:
    """Files of this folder, one after another."""
    return "".join(text(f"tiles/{name}.cu") for name in names)


def takes(p: Projection) -> bool:
    """Whether a projection's storage fits the tensor-core form, whatever the cut."""
    stored = p.dtype in _SCALE_TYPES if p.format == "affine" else p.bits <= 16
    whole = p.cols % CHUNK == 0 and (not p.group_size or p.cols % p.group_size == 0)
    return p.format in _CODECS and stored and whole


def has_digits(p: Projection) -> bool:
    """Whether a projection's codes can be taken as bytes."""
    return p.format == "affine" and p.bits in _DIGIT_BITS


@dataclass(frozen=True)
class TileForm:
    """One projection's product.

    Args:
        parts: that each input is split into, whose products have columns of their own.
        digits: whether inputs are bytes; there are two of each then.
    """

    projection: Projection
    parts: int
    digits: bool = False

    @classmethod
    def of(cls, p: Projection, parts: int, *, digits: bool) -> TileForm:
        """The form of a projection, in digits where that is asked for and the format allows it."""
        return cls(p, 2, digits=True) if digits and has_digits(p) else cls(p, parts)

    @property
    def wide(self) -> int:
        """Codes a weight: an affine weight of 8 bits is two of 4 in pairs."""
        p = self.projection
        return 2 if p.format == "affine" and p.bits == 8 and not self.digits else 1

    @property
    def code_bits(self) -> int:
        """Bits of one code."""
        return self.projection.bits // self.wide

    @property
    def steps(self) -> int:
        """Steps a row, the last of which may be short."""
        return -(-self.projection.cols * self.wide // STEP)

    @property
    def span(self) -> int:
        """Codes whose products share a column: a group's, but a whole chunk's where groups are smaller."""
        size = self.projection.group_size
        return max(size * self.wide, CHUNK) if size else STEP * self.unit

    @property
    def unit(self) -> int:
        """Steps that a warp sums over at once: as the product has columns and registers have room for."""
        p = self.projection
        if not p.group_size:
            return 1
        columns = _COLUMNS // self.parts * max(p.group_size * self.wide, CHUNK) // STEP
        most = min(4 // self.parts, columns, max(1, _UNIT_WORDS // self.code_bits))
        # A power of two: a lane reads the scales of two neighbouring groups at once.
        return 1 << most.bit_length() - 1

    @property
    def units(self) -> int:
        """Units a row."""
        return -(-self.steps // self.unit)

    @property
    def vectors(self) -> int:
        """Vectors of 16 bytes that a row's inputs take in shared memory."""
        return self.steps * (8 if self.digits else 16) * self.parts

    @property
    def group_words(self) -> int:
        """Words of shared memory for what is known of a row's groups: sums, and the scales of digits."""
        p = self.projection
        groups = -(-p.cols // p.group_size) if p.format == "affine" else 0
        return groups * (2 if self.digits else 1)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row's codes."""
        return self.projection.cols * self.projection.bits // 8

    def apart(self, rows: int) -> int:
        """Bytes of shared memory for each half of so many rows.

        Two rows that are read at once lie in different halves, and so in different banks.
        """
        half, lane_bytes = rows // 2 * self.row_bytes, self.code_bits * CHUNK // 8
        return half + ((_BANKS // 2 if lane_bytes <= _VECTOR else _VECTOR) - half) % _BANKS

    def scale_bytes(self, rows: int) -> int:
        """Bytes of so many rows' scales, and as many of their biases."""
        p = self.projection
        size = {"float": 4, "uint8_t": 1}.get(_SCALE_TYPES.get(p.dtype, "float"), 2)
        return rows * (p.cols // p.group_size) * size if p.group_size else 0

    @property
    def scaled(self) -> int:
        """Arrays beside the codes: scales, and biases."""
        p = self.projection
        return 0 if not p.group_size else 2 if p.format == "affine" else 1

    @property
    def copies_whole(self) -> bool:
        """Whether the copy engine takes its rows, and the scales of eight: whole vectors of 16 bytes."""
        return self.row_bytes % _VECTOR == 0 and self.scale_bytes(8) % _VECTOR == 0

    def ahead(self, held: int) -> int:
        """Units that a warp has on their way, where a lane holds so many words of a row."""
        return max(1, held // (self.unit * self.code_bits))

    def settings(self, held: int) -> dict[str, object]:
        """Names that the texts need; ``held`` as for :meth:`ahead`."""
        p = self.projection
        return {
            "GROUP_SIZE": p.group_size,
            "BITS": self.code_bits,
            "WIDE": self.wide,
            "UNIT": self.unit,
            "SPAN": self.span,
            "AHEAD": self.ahead(held),
            "PER_ROW": p.cols // p.group_size if p.group_size else 0,
            "SUMMED": int(p.format == "affine"),
            "SCALE_TYPE": _SCALE_TYPES.get(p.dtype, "float"),
            "IS_HALF": int(p.format == "plain" and p.dtype == "float16"),
            "HALVES": self.parts,
        }

    @property
    def texts(self) -> str:
        """The texts of the product, which read the names of :meth:`settings`."""
        scales = ["affine_scales"] if self.projection.format == "affine" else []
        if self.digits:
            return tile_text("chunk", "columns", "place", *scales, "codec_digits", "digits")
        codec = _CODECS[self.projection.format]
        form = [f"codec_{codec}", "pairs", *scales, f"fold_{codec}", "pairs_product"]
        return tile_text("chunk", "columns", "place", *form)

    def body(self, name: str, **parts: str) -> str:
        """A launch's text whose lines ``ME_...`` stand for files of one form or of both.

        Args:
            parts: files by such a line; a name with ``{}`` has the form's name there.
        """
        made = tile_text(name)
        for line, file in parts.items():
            made = made.replace(f"{line}\n", tile_text(file.format("digits" if self.digits else "pairs")))
        return made
