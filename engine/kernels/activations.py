"""The expert activations by name: one row a name, with the forms that the paths need.

A row holds the MLX function (gather path, dense MLPs), the scalar function that the CPU kernel compiles,
and the C expression that the GPU kernels paste in. All three are float32; only the result is rounded.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import mlx.core as mx

from mlx_experts.engine.kernels.request import Activation
from mlx_experts.plugins.manager import components
from mlx_experts.registry.checks.known_names import CONFIG_NAMES
from mlx_experts.registry.errors import ConfigError, PluginError

ArrayForm = Callable[[mx.array, mx.array, float, float], mx.array]
ScalarForm = Callable[[float, float, float, float], float]

_SQRT_HALF = 0.7071067811865476
_TANH_INNER = 0.7978845608028654  # sqrt(2 / pi)
_TANH_CUBIC = 0.044715


@dataclass(frozen=True)
class ExpertActivation:
    """One expert activation.

    Every form takes ``(gate, up, alpha, limit)``; an ungated one ignores ``gate``.

    Args:
        name: the name that family files use.
        gated: whether there is a gate projection beside the up projection.
        array: the function on float32 MLX arrays.
        scalar: the same on Python floats, written with ``math`` only so that numba compiles it;
            None leaves CPU calls to the gather path.
        c: the same as a C expression in ``g``, ``u``, ``alpha`` and ``limit``. It may call ``me_exp``,
            ``me_tanh``, ``me_erf``, ``me_min`` and ``me_max``, which each prelude defines on floats.
            None leaves GPU calls to the gather path.
    """

    name: str
    gated: bool
    array: ArrayForm
    scalar: ScalarForm | None = None
    c: str | None = None


def _swiglu(g: mx.array, u: mx.array, alpha: float, limit: float) -> mx.array:
    return g * mx.sigmoid(g) * u


def _swiglu_scalar(g: float, u: float, alpha: float, limit: float) -> float:
    return g / (1.0 + math.exp(-g)) * u


def _swiglu_oai(g: mx.array, u: mx.array, alpha: float, limit: float) -> mx.array:
    if limit > 0:
        g, u = mx.minimum(g, limit), mx.clip(u, -limit, limit)
    return g * mx.sigmoid(alpha * g) * (u + 1.0)


def _swiglu_oai_scalar(g: float, u: float, alpha: float, limit: float) -> float:
    if limit > 0.0:
        g = min(g, limit)
        u = max(min(u, limit), -limit)
    return g / (1.0 + math.exp(-alpha * g)) * (u + 1.0)


def _swiglu_clamp_before(g: mx.array, u: mx.array, alpha: float, limit: float) -> mx.array:
    if limit > 0:
        g, u = mx.minimum(g, limit), mx.clip(u, -limit, limit)
    return g * mx.sigmoid(g) * u


def _swiglu_clamp_before_scalar(g: float, u: float, alpha: float, limit: float) -> float:
    if limit > 0.0:
        g = min(g, limit)
        u = max(min(u, limit), -limit)
    return g / (1.0 + math.exp(-g)) * u


def _swiglu_clamp_after(g: mx.array, u: mx.array, alpha: float, limit: float) -> mx.array:
    a = g * mx.sigmoid(g)
    if limit > 0:
        a, u = mx.minimum(a, limit), mx.clip(u, -limit, limit)
    return a * u


def _swiglu_clamp_after_scalar(g: float, u: float, alpha: float, limit: float) -> float:
    a = g / (1.0 + math.exp(-g))
    if limit > 0.0:
        a = min(a, limit)
        u = max(min(u, limit), -limit)
    return a * u


def _situ(g: mx.array, u: mx.array, alpha: float, limit: float) -> mx.array:
    a = alpha * mx.tanh(g / alpha) * mx.sigmoid(g)
    return a * (limit * mx.tanh(u / limit) if limit > 0 else u)


def _situ_scalar(g: float, u: float, alpha: float, limit: float) -> float:
    a = alpha * math.tanh(g / alpha) / (1.0 + math.exp(-g))
    if limit > 0.0:
        u = limit * math.tanh(u / limit)
    return a * u


def _gelu(v: mx.array) -> mx.array:
    return 0.5 * v * (1.0 + mx.erf(v * _SQRT_HALF))


def _gelu_tanh(v: mx.array) -> mx.array:
    return 0.5 * v * (1.0 + mx.tanh(_TANH_INNER * (v + _TANH_CUBIC * v * v * v)))


def _geglu_scalar(g: float, u: float, alpha: float, limit: float) -> float:
    return 0.5 * g * (1.0 + math.erf(g * _SQRT_HALF)) * u


def _geglu_tanh_scalar(g: float, u: float, alpha: float, limit: float) -> float:
    return 0.5 * g * (1.0 + math.tanh(_TANH_INNER * (g + _TANH_CUBIC * g * g * g))) * u


def _gelu_scalar(g: float, u: float, alpha: float, limit: float) -> float:
    return 0.5 * u * (1.0 + math.erf(u * _SQRT_HALF))


def _gelu_tanh_scalar(g: float, u: float, alpha: float, limit: float) -> float:
    return 0.5 * u * (1.0 + math.tanh(_TANH_INNER * (u + _TANH_CUBIC * u * u * u)))


def _relu2_scalar(g: float, u: float, alpha: float, limit: float) -> float:
    return u * u if u > 0.0 else 0.0


def _silu_scalar(g: float, u: float, alpha: float, limit: float) -> float:
    return u / (1.0 + math.exp(-u))


def _reglu_scalar(g: float, u: float, alpha: float, limit: float) -> float:
    return g * u if g > 0.0 else 0.0


def _geglu_plus_one_scalar(g: float, u: float, alpha: float, limit: float) -> float:
    return 0.5 * g * (1.0 + math.erf(g * _SQRT_HALF)) * (u + 1.0)


_G_CLAMPED = "(limit > 0.0f ? me_min(g, limit) : g)"
_U_CLAMPED = "(limit > 0.0f ? me_max(me_min(u, limit), -limit) : u)"
_C_SILU = "(({v}) / (1.0f + me_exp(-({v}))))"
_C_GELU = "(0.5f * {v} * (1.0f + me_erf({v} * 0.70710678f)))"
_C_GELU_TANH = "(0.5f * {v} * (1.0f + me_tanh(0.79788456f * ({v} + 0.044715f * {v} * {v} * {v}))))"

_TABLE: dict[str, ExpertActivation] = {}


def register(activation: ExpertActivation) -> None:
    """Add an activation to the table.

    Raises:
        PluginError: the name is taken.
    """
    if activation.name in _TABLE:
        raise PluginError(
            "Two expert activations have the same name.",
            where=activation.name,
            expected="a name that is not in the table",
            hint="Give the new activation another name.",
        )
    _TABLE[activation.name] = activation


def names() -> list[str]:
    """The known names, sorted."""
    return sorted(_TABLE)


def lookup(name: str) -> ExpertActivation:
    """The activation called ``name``.

    Raises:
        ConfigError: no activation has that name.
    """
    if name not in _TABLE and name in components().names("activation"):
        # Not `register`: another thread may have looked it up meanwhile.
        _TABLE.setdefault(name, components().get("activation", name))
    if name not in _TABLE:
        raise ConfigError(
            "Unknown expert activation.",
            where="an `activation` of the family file, or the config key that it reads (such as hidden_act)",
            expected=", ".join(names()),
            found=name,
            hint="Correct the name, or register the activation from a plugin.",
        )
    return _TABLE[name]


# What a function of one argument is called in a GLU.
_IN_A_GLU = {"silu": "swiglu", "gelu": "geglu", "gelu_tanh": "geglu_tanh"}


def make(name: str, alpha: float = 1.0, limit: float = 0.0, glu: bool = False) -> Activation:
    """The request of the activation called ``name`` with its constants.

    Args:
        glu: take a function of one argument (`silu`, `gelu`) as the one on the gate of a GLU.
    """
    name = CONFIG_NAMES.get(name, name)
    name = _IN_A_GLU.get(name, name) if glu else name
    return Activation(name=name, alpha=alpha, limit=limit, gated=lookup(name).gated)


@lru_cache(maxsize=128)
def _bound(form: ArrayForm, gated: bool, alpha: float, limit: float, on_gpu: bool) -> Callable[..., mx.array]:
    """``form`` with its constants bound, keeping the input's dtype; one operation on a GPU.

    On the CPU ``mx.compile`` starts a C++ compiler, for seconds, to save microseconds.
    """

    def gated_form(gate: mx.array, up: mx.array) -> mx.array:
        return form(gate.astype(mx.float32), up.astype(mx.float32), alpha, limit).astype(up.dtype)

    def ungated_form(up: mx.array) -> mx.array:
        wide = up.astype(mx.float32)
        return form(wide, wide, alpha, limit).astype(up.dtype)

    chosen = gated_form if gated else ungated_form
    return mx.compile(chosen, shapeless=True) if on_gpu else chosen


def apply(activation: Activation, gate: mx.array | None, up: mx.array) -> mx.array:
    """``act(gate, up)``, computed in float32 and rounded once to the dtype of ``up``.

    Args:
        gate: ``[..., F]``, or None when the activation has no gate.
        up: ``[..., F]``.
    """
    entry = lookup(activation.name)
    on_gpu = mx.default_device().type != mx.DeviceType.cpu
    function = _bound(entry.array, entry.gated, activation.alpha, activation.limit, on_gpu)
    return function(gate, up) if entry.gated else function(up)


for _row in (
    ExpertActivation("swiglu", True, _swiglu, _swiglu_scalar, f"{_C_SILU.format(v='g')} * u"),
    # gpt_oss in transformers: clamps before, a slope inside the sigmoid, and one is added to the up half.
    ExpertActivation(
        "swiglu_oai",
        True,
        _swiglu_oai,
        _swiglu_oai_scalar,
        f"{_G_CLAMPED} / (1.0f + me_exp(-alpha * {_G_CLAMPED})) * ({_U_CLAMPED} + 1.0f)",
    ),
    ExpertActivation(
        "swiglu_clamp_before",
        True,
        _swiglu_clamp_before,
        _swiglu_clamp_before_scalar,
        f"{_C_SILU.format(v=_G_CLAMPED)} * {_U_CLAMPED}",
    ),
    ExpertActivation(
        "swiglu_clamp_after",
        True,
        _swiglu_clamp_after,
        _swiglu_clamp_after_scalar,
        f"(limit > 0.0f ? me_min({_C_SILU.format(v='g')}, limit) : {_C_SILU.format(v='g')}) * {_U_CLAMPED}",
    ),
    # alpha is beta, limit is linear_beta: a tanh bound on each half instead of a clamp.
    ExpertActivation(
        "situ",
        True,
        _situ,
        _situ_scalar,
        "alpha * me_tanh(g / alpha) / (1.0f + me_exp(-g)) * (limit > 0.0f ? limit * me_tanh(u / limit) : u)",
    ),
    ExpertActivation(
        "geglu", True, lambda g, u, alpha, limit: _gelu(g) * u, _geglu_scalar, f"{_C_GELU.format(v='g')} * u"
    ),
    ExpertActivation(
        "geglu_tanh",
        True,
        lambda g, u, alpha, limit: _gelu_tanh(g) * u,
        _geglu_tanh_scalar,
        f"{_C_GELU_TANH.format(v='g')} * u",
    ),
    ExpertActivation(
        "reglu",
        True,
        lambda g, u, alpha, limit: mx.maximum(g, 0.0) * u,
        _reglu_scalar,
        "(g > 0.0f ? g * u : 0.0f)",
    ),
    # moondream's: one is added to the up half.
    ExpertActivation(
        "geglu_plus_one",
        True,
        lambda g, u, alpha, limit: _gelu(g) * (u + 1.0),
        _geglu_plus_one_scalar,
        f"{_C_GELU.format(v='g')} * (u + 1.0f)",
    ),
    ExpertActivation(
        "relu2",
        False,
        lambda g, u, alpha, limit: mx.square(mx.maximum(u, 0.0)),
        _relu2_scalar,
        "(u > 0.0f ? u * u : 0.0f)",
    ),
    ExpertActivation("gelu", False, lambda g, u, alpha, limit: _gelu(u), _gelu_scalar, _C_GELU.format(v="u")),
    ExpertActivation(
        "gelu_tanh",
        False,
        lambda g, u, alpha, limit: _gelu_tanh(u),
        _gelu_tanh_scalar,
        _C_GELU_TANH.format(v="u"),
    ),
    ExpertActivation(
        "silu", False, lambda g, u, alpha, limit: u * mx.sigmoid(u), _silu_scalar, _C_SILU.format(v="u")
    ),
):
    register(_row)
