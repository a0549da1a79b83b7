"""Rotary position embeddings by rope type, after transformers' ``modeling_rope_utils``.

Each type gives inverse frequencies and a factor on the rotated slice. Types that depend on the
length (dynamic, longrope) work them out at each call, for every row of a batch by its own length.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_experts.registry.errors import ConfigError
from mlx_experts.registry.spec.rope_plan import ROPE_PLACE, RopePlan

Offset = int | mx.array
# Frequencies are computed before any tensor is read; real heads are a few hundred wide.
MAX_WIDTH = 2**16


class Rope(nn.Module):
    """Rotates the first ``dims`` values of each head.

    Args:
        plan: rotary parameters of the layer.
        dims: rotated width.
        head_dim: width of the head, which proportional rope counts its frequencies by.
    """

    def __init__(self, plan: RopePlan, dims: int, head_dim: int | None = None) -> None:
        super().__init__()
        if not 0 < dims <= (head_dim or MAX_WIDTH) <= MAX_WIDTH or dims % 2:
            raise ConfigError(
                "the rotated width of a head must be a positive even number, no more than the head's",
                where=ROPE_PLACE,
                expected=f"an even number up to {min(head_dim or MAX_WIDTH, MAX_WIDTH)}",
                found=str(dims),
            )
        self.dims = dims
        self.traditional = plan.style == "interleaved"
        builder = _TYPES.get(plan.type)
        if builder is None:
            raise ConfigError(
                "the rope type is not known",
                where=ROPE_PLACE,
                expected=", ".join(sorted(_TYPES)),
                found=plan.type,
            )
        made = builder(plan, dims, head_dim or dims)
        self.fixed = made if isinstance(made, Fixed) else None
        self._frequencies = made.at if isinstance(made, Fixed) else made
        self._plan, self._made_dims, self._head_dim = plan, dims, head_dim
        if plan.type == "proportional":
            self.dims = head_dim or dims

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles are built anew: the frequencies are functions, and there is nothing else."""
        return type(self), (self._plan, self._made_dims, self._head_dim)

    def bound(self) -> Callable[..., mx.array]:
        """The call as one function ``(x, offset=0)``: MLX's own where nothing depends on the length."""
        fixed = self.fixed
        if fixed is None or fixed.factor != 1.0:
            return self
        how: Any = {"dims": self.dims, "traditional": self.traditional, "base": None, "scale": 1.0}
        return partial(mx.fast.rope, **how, freqs=fixed.freqs)

    def __call__(self, x: mx.array, offset: Offset = 0) -> mx.array:
        """``x`` [B, heads, L, head_dim] rotated by positions ``offset`` .. ``offset + L - 1``.

        Args:
            offset: one number for all rows, or an array [B].
        """
        freqs, factor = self._frequencies(offset, x.shape[-2])
        if freqs.ndim == 2:
            return self.turn_rows(x, mx.array(offset), freqs, mx.array(factor))
        if isinstance(factor, mx.array) or factor != 1.0:
            rotated = x[..., : self.dims] * mx.array(factor).astype(x.dtype)
            x = mx.concatenate([rotated, x[..., self.dims :]], axis=-1)
        return mx.fast.rope(
            x, self.dims, traditional=self.traditional, base=None, scale=1.0, offset=offset, freqs=freqs
        )

    def frequencies(self, offset: Offset, length: int) -> tuple[mx.array, Any]:
        """Wavelengths over two pi, ``[dims / 2]`` or ``[B, dims / 2]``, and a factor on the rotated slice."""
        return self._frequencies(offset, length)

    def turn_rows(self, x: mx.array, offset: mx.array, freqs: mx.array, factor: mx.array) -> mx.array:
        """As the call, with ``freqs`` [B, dims / 2] and ``factor`` [B] or [] of each row."""
        positions = (offset[:, None] + mx.arange(x.shape[-2]))[:, None, :, None]
        angles = positions / freqs[:, None, None]
        scale = factor.reshape(-1, 1, 1, 1)
        cos, sin = mx.cos(angles) * scale, mx.sin(angles) * scale
        turned, half = x[..., : self.dims].astype(mx.float32), self.dims // 2
        if self.traditional:
            a, b = turned[..., ::2], turned[..., 1::2]
        else:
            a, b = turned[..., :half], turned[..., half:]
        pair = [a * cos - b * sin, a * sin + b * cos]
        turned = mx.stack(pair, axis=-1).flatten(-2) if self.traditional else mx.concatenate(pair, axis=-1)
        return mx.concatenate([turned.astype(x.dtype), x[..., self.dims :]], axis=-1)


@dataclass(frozen=True, eq=False)
class Fixed:
    """Frequencies ``[dims / 2]`` that no length changes, and the factor on the rotated slice."""

    freqs: mx.array
    factor: float

    @cached_property
    def inverse(self) -> mx.array:
        """The angle of each pair at position 1; one array for all who ask."""
        inverse = 1.0 / self.freqs
        mx.eval(inverse)
        return inverse

    def at(self, offset: Offset, length: int) -> tuple[mx.array, float]:
        """The same for every position."""
        return self.freqs, self.factor


Frequencies = Callable[[Offset, int], tuple[mx.array, Any]] | Fixed


def _wavelengths(theta: float, dims: int) -> mx.array:
    return theta ** (mx.arange(0, dims, 2, dtype=mx.float32) / dims)


def _fixed(freqs: mx.array, factor: float = 1.0) -> Frequencies:
    mx.eval(freqs)
    return Fixed(freqs, factor)


def _default(plan: RopePlan, dims: int, head_dim: int) -> Frequencies:
    return _fixed(_wavelengths(plan.theta, dims))


def _linear(plan: RopePlan, dims: int, head_dim: int) -> Frequencies:
    return _fixed(_wavelengths(plan.theta, dims) * plan.number("factor"))


def _proportional(plan: RopePlan, dims: int, head_dim: int) -> Frequencies:
    """Frequencies spaced by the whole head, of which only a share turns."""
    angles = int(plan.partial * head_dim // 2)
    turning = plan.theta ** (mx.arange(0, 2 * angles, 2, dtype=mx.float32) / head_dim)
    still = mx.full((head_dim // 2 - angles,), mx.inf)
    return _fixed(mx.concatenate([turning * plan.number("factor", 1.0), still]))


def _original_length(plan: RopePlan) -> int:
    length = plan.params.get("original_max_position_embeddings") or plan.max_positions
    if not isinstance(length, int) or length <= 0:
        raise ConfigError(
            f"rope type '{plan.type}' needs the original context length",
            where=ROPE_PLACE,
            expected="original_max_position_embeddings or max_position_embeddings",
        )
    return length


def _dynamic(plan: RopePlan, dims: int, head_dim: int) -> Frequencies:
    """NTK scaling that follows the length past the original one."""
    original, factor = _original_length(plan), plan.number("factor")
    stretch = _stretch(dims)
    exponents = mx.arange(0, dims, 2, dtype=mx.float32) / dims

    def frequencies(offset: Offset, length: int) -> tuple[mx.array, float]:
        seen = mx.maximum(mx.array(offset)[..., None] + length, original).astype(mx.float32)
        base = plan.theta * ((factor * seen / original) - (factor - 1)) ** stretch
        return base**exponents, 1.0

    return frequencies


def _stretch(dims: int) -> float:
    """The exponent by which NTK scaling stretches the base."""
    if dims <= 2:
        raise ConfigError("this rope type needs a rotated width above 2", where=ROPE_PLACE)
    return dims / (dims - 2)


def yarn_mscale(scale: float, mscale: float = 1.0) -> float:
    """YaRN's magnitude correction, `0.1 * mscale * ln(scale) + 1` (Peng et al. 2023, section 3.4)."""
    return 1.0 if scale <= 1 else 0.1 * mscale * math.log(scale) + 1.0


def _yarn(plan: RopePlan, dims: int, head_dim: int) -> Frequencies:
    """Interpolates slow frequencies, keeps fast ones, ramps between (Peng et al. 2023)."""
    p, original = plan.params, _original_length(plan)
    if plan.theta <= 1:
        raise ConfigError("YaRN needs a base above 1", where=ROPE_PLACE, found=str(plan.theta))
    lengths = bool(p.get("original_max_position_embeddings") and plan.max_positions)
    scale = plan.number("factor", (plan.max_positions or original) / original if lengths else None)
    factor = plan.number("attention_factor", 0.0)
    if not factor:
        mscale, all_dim = plan.number("mscale", 0.0), plan.number("mscale_all_dim", 0.0)
        factor = (
            yarn_mscale(scale, mscale) / yarn_mscale(scale, all_dim)
            if mscale and all_dim
            else yarn_mscale(scale)
        )

    def dimension(rotations: float) -> float:
        return dims * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(plan.theta))

    low, high = dimension(plan.number("beta_fast", 32.0)), dimension(plan.number("beta_slow", 1.0))
    if p.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dims - 1)
    if low == high:
        high += 0.001
    ramp = mx.clip((mx.arange(dims // 2, dtype=mx.float32) - low) / (high - low), 0, 1)
    kept = 1.0 / _wavelengths(plan.theta, dims)
    return _fixed(1.0 / (kept / scale * ramp + kept * (1 - ramp)), factor)


def _llama3(plan: RopePlan, dims: int, head_dim: int) -> Frequencies:
    """Llama 3.1's three bands: kept, smoothed and divided frequencies."""
    factor, low, high = (plan.number(n) for n in ("factor", "low_freq_factor", "high_freq_factor"))
    original = _original_length(plan)
    inverse = 1.0 / _wavelengths(plan.theta, dims)
    wavelength = 2 * math.pi / inverse
    smooth = (original / wavelength - low) / (high - low)
    medium = (1 - smooth) * inverse / factor + smooth * inverse
    scaled = mx.where(wavelength > original / low, inverse / factor, inverse)
    between = (wavelength <= original / low) & (wavelength >= original / high)
    return _fixed(1.0 / mx.where(between, medium, scaled))


def _longrope(plan: RopePlan, dims: int, head_dim: int) -> Frequencies:
    """Per-frequency factors, one list up to the original length and one beyond (Ding et al. 2024)."""
    p, original = plan.params, _original_length(plan)
    base = _wavelengths(plan.theta, dims)
    factors = (plan.numbers(name, dims // 2) for name in ("short_factor", "long_factor"))
    short, long = (base * mx.array(each, dtype=mx.float32) for each in factors)
    if p.get("always_short"):
        long = short
    mx.eval(short, long)
    ratio = plan.number("factor", (plan.max_positions or original) / original)
    common = plan.number("attention_factor", 0.0)
    if not common:
        common = 1.0 if ratio <= 1 else math.sqrt(1 + math.log(ratio) / math.log(max(original, 2)))
    below, beyond = plan.number("short_mscale", common), plan.number("long_mscale", common)

    def frequencies(offset: Offset, length: int) -> tuple[mx.array, Any]:
        if isinstance(offset, int):
            return (long, beyond) if offset + length > original else (short, below)
        past = offset + length > original
        return mx.where(past[..., None], long, short), mx.where(past, beyond, below)

    return frequencies


def _ntk_alpha(plan: RopePlan, dims: int, head_dim: int) -> Frequencies:
    """A base that is stretched once by `alpha ** _stretch(dims)`; without alpha, the plain base."""
    alpha = plan.number("alpha", 0.0)
    if not alpha:
        return _dynamic(plan, dims, head_dim) if "factor" in plan.params else _default(plan, dims, head_dim)
    return _fixed(_wavelengths(plan.theta * alpha ** _stretch(dims), dims))


_TYPES: dict[str, Callable[[RopePlan, int, int], Frequencies]] = {
    "default": _default,
    "mrope": _default,
    "linear": _linear,
    "proportional": _proportional,
    "dynamic": _ntk_alpha,
    "yarn": _yarn,
    "deepseek_yarn": _yarn,
    "llama3": _llama3,
    "longrope": _longrope,
    "su": _longrope,
}
