"""May the fused kernel take this call? Pure functions of a request, so they are tested without a device.

A gate is a list of rules; the first that objects decides. A rule returns a Decline or None, and what no rule
knows is declined, so a format of a later MLX release goes to the gather path. What each device takes is one
row of ``LIMITS``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from mlx_experts.engine.dispatch.policy import SWITCH, WIDTH_BOUND, Bounds, Policy
from mlx_experts.engine.kernels import ManyRowsKernel
from mlx_experts.engine.kernels.activations import ExpertActivation, names
from mlx_experts.engine.kernels.activations import lookup as lookup_activation
from mlx_experts.engine.kernels.request import (
    MAX_TOP_K,
    Accept,
    Activation,
    Decline,
    Device,
    KernelRequest,
    Projection,
    SharedRequest,
    Verdict,
)

_FLOATS = frozenset({"float16", "bfloat16", "float32"})


@dataclass(frozen=True)
class Limits:
    """What one back-end's kernel takes.

    Args:
        bits: the bit widths by format; a format that is missing is not taken.
        groups: the group sizes by format.
        multiple: H and F must be multiples of this (and of the group, when quantised).
        form: which form of the activation the kernel needs.
        rows: the most token rows; None for any number.
        shared: what storage a shared expert may have to be added by the same launches: ``any`` that the
            kernel takes, the ``same`` as the routed experts', or ``none``.
    """

    bits: Mapping[str, frozenset[int]]
    groups: Mapping[str, frozenset[int]]
    multiple: int
    form: Literal["scalar", "c"]
    shared: Literal["any", "same", "none"]
    dtypes: frozenset[str] = _FLOATS
    rows: int | None = 1


_BITS = {
    "affine": frozenset({2, 3, 4, 5, 6, 8}),
    "mxfp4": frozenset({4}),
    "mxfp8": frozenset({8}),
    "nvfp4": frozenset({4}),
    "plain": frozenset({16, 32}),
}
_GROUPS = {
    "affine": frozenset({32, 64, 128}),
    "mxfp4": frozenset({32}),
    "mxfp8": frozenset({32}),
    "nvfp4": frozenset({16}),
    "plain": frozenset({0}),
}

LIMITS: Mapping[Device, Limits] = {
    "cpu": Limits(_BITS, _GROUPS, multiple=1, form="scalar", shared="any", rows=None),
    "cuda": Limits(_BITS, _GROUPS, multiple=32, form="c", shared="same", rows=16),
    # No Metal device has measured whether it pays.
    "metal": Limits(_BITS, _GROUPS, multiple=32, form="c", shared="none", rows=16),
}

Rule = Callable[[KernelRequest, Policy, Limits], Decline | None]


def _switch(request: KernelRequest, policy: Policy, limits: Limits) -> Decline | None:
    """Fused kernels are on."""
    if policy.enabled:
        return None
    return Decline("switch", "on", "off", f"Set by {policy.switched_by}; unset {SWITCH} or pass fused=True.")


def _adapted(request: KernelRequest, policy: Policy, limits: Limits) -> Decline | None:
    """Every projection is mlx-lm's own, so that what it computes is known."""
    if not request.adapted:
        return None
    return Decline(
        "adapted", "plain projections", "wrapped projections", "Fuse the adapter into the weights first."
    )


def _training(request: KernelRequest, policy: Policy, limits: Limits) -> Decline | None:
    """The model is in evaluation mode: the kernels have no gradient."""
    if not request.training:
        return None
    return Decline("training", "evaluation mode", "training mode", "Call model.eval() before generating.")


def _rows(request: KernelRequest, policy: Policy, limits: Limits) -> Decline | None:
    """No more token rows than the kernel takes, and than pay on this device."""
    bounds = [b for b in (limits.rows, _bounds(request, policy).max_rows) if b is not None]
    most = min(bounds, default=request.rows)
    if 1 <= request.rows <= most:
        return None
    wanted = "1 or more" if not bounds else "1" if most == 1 else f"1 to {most}"
    return Decline(
        "rows", wanted, str(request.rows), "More rows are gathered, or multiplied by expert where that pays."
    )


def _bounds(request: KernelRequest, policy: Policy) -> Bounds:
    return policy.bounds({p.storage for _, p in _projections(request)})


def _width_bound(request: KernelRequest, policy: Policy, limits: Limits) -> Decline | None:
    """The expert is not wider than the bound of its storage."""
    bound = _bounds(request, policy).max_width
    if bound is None or request.expert_width <= bound:
        return None
    return Decline(
        "width_bound",
        f"F <= {bound}",
        f"F = {request.expert_width}",
        f"Set by {policy.bound_by}; raise {WIDTH_BOUND} or run `registry tune`.",
    )


def _many_rows(request: KernelRequest, policy: Policy, limits: Limits) -> Decline | None:
    """Enough token rows that the path for many pays on this device."""
    start = _bounds(request, policy).many_from
    if start is None:
        return Decline("rows", "a measured gain for many rows", "none", "Run `registry tune` on this device.")
    if request.rows >= start:
        return None
    return Decline("rows", f"at least {start}", str(request.rows), "Fewer rows are gathered.")


def _dtype(request: KernelRequest, policy: Policy, limits: Limits) -> Decline | None:
    """The activations have a dtype that the kernel reads."""
    if request.dtype in limits.dtypes:
        return None
    return Decline("dtype", _listed(limits.dtypes), request.dtype, "Cast the model to one of these dtypes.")


def _top_k(request: KernelRequest, policy: Policy, limits: Limits) -> Decline | None:
    """A token has between 1 and 32 experts."""
    if 1 <= request.top_k <= MAX_TOP_K:
        return None
    return Decline("top_k", f"1 to {MAX_TOP_K}", str(request.top_k), "Other counts are gathered.")


def _activation(request: KernelRequest, policy: Policy, limits: Limits) -> Decline | None:
    """The activation has the form that this kernel compiles, and is gated as the container is."""
    name = request.activation.name
    if name not in names():
        return Decline("activation", "a known activation", name, "Register the activation from a plugin.")
    entry = lookup_activation(name)
    if _form(entry, limits) is None:
        return Decline(
            "activation",
            f"a {limits.form} form",
            f"{name} without one",
            "Give the activation's registration that form.",
        )
    if not entry.gated == request.activation.gated == (request.gate is not None):
        return Decline(
            "activation",
            "a gate projection exactly when the activation is gated",
            f"{name} {'with' if request.gate else 'without'} a gate projection",
            "Correct the activation or the container.",
        )
    return None


def _form(entry: ExpertActivation, limits: Limits) -> object:
    return {"scalar": entry.scalar, "c": entry.c}[limits.form]


def _shapes(request: KernelRequest, policy: Policy, limits: Limits) -> Decline | None:
    """Gate and up have one shape and down has the opposite one."""
    h, f = request.input_width, request.expert_width
    down = (request.down.rows, request.down.cols)
    gate = (f, h) if request.gate is None else (request.gate.rows, request.gate.cols)
    if h > 0 and f > 0 and gate == (f, h) and down == (h, f):
        return None
    return Decline(
        "shapes",
        f"gate {(f, h)} and down {(h, f)}",
        f"gate {gate} and down {down}",
        "The stacks do not belong to one another.",
    )


def _projections(request: KernelRequest) -> list[tuple[str, Projection]]:
    parts = [("gate", request.gate), ("up", request.up), ("down", request.down)]
    return [(part, p) for part, p in parts if p is not None]


def _format(request: KernelRequest, policy: Policy, limits: Limits) -> Decline | None:
    """Format and bits of every projection are known."""
    for part, p in _projections(request):
        bits = limits.bits.get(p.format, frozenset())
        if p.bits not in bits:
            wanted = f"bits in {_listed(bits)}" if bits else _listed(limits.bits)
            return Decline("format", wanted, f"{part} in {p.format} {p.bits}-bit", "Quantise it otherwise.")
    return None


def _group_size(request: KernelRequest, policy: Policy, limits: Limits) -> Decline | None:
    """The group size is one that the format has."""
    for part, p in _projections(request):
        groups = limits.groups[p.format]
        if p.group_size not in groups:
            return Decline(
                "group_size",
                f"{p.format} groups of {_listed(groups)}",
                f"{part} in groups of {p.group_size}",
                "Quantise it with such a group size.",
            )
    return None


def _scale_dtype(request: KernelRequest, policy: Policy, limits: Limits) -> Decline | None:
    """Scales, or plain weights, are in a float dtype; the microscaling formats keep bytes."""
    for part, p in _projections(request):
        wanted = _FLOATS if p.format in ("affine", "plain") else frozenset({"uint8"})
        if p.dtype not in wanted:
            return Decline(
                "scale_dtype", _listed(wanted), f"{part} in {p.dtype}", "Convert the weights again."
            )
    return None


def _global_scale(request: KernelRequest, policy: Policy, limits: Limits) -> Decline | None:
    """Only nvfp4 has one more scale for each expert."""
    for part, p in _projections(request):
        if p.global_scale and p.format != "nvfp4":
            return Decline(
                "global_scale", "none", f"{part} in {p.format} with one", "Convert the weights again."
            )
    return None


def _widths(request: KernelRequest, policy: Policy, limits: Limits) -> Decline | None:
    """Inputs divide into whole groups and whole steps of the kernel: nothing is read past a row's end."""
    for part, p in _projections(request):
        # Both are powers of two, and a whole group of any format fills whole 32-bit words.
        step = max(p.group_size, limits.multiple)
        if p.cols % step:
            return Decline(
                "widths",
                f"a multiple of {step}",
                f"{part} with {p.cols} inputs",
                "Such widths are left to the gather path.",
            )
    return None


RULES: tuple[Rule, ...] = (
    _switch,
    _adapted,
    _training,
    _rows,
    _width_bound,
    _dtype,
    _top_k,
    _activation,
    _shapes,
    _format,
    _group_size,
    _scale_dtype,
    _global_scale,
    _widths,
)


# What the path for many rows asks for; its kernel says which storages it takes.
MANY_RULES: tuple[Rule, ...] = tuple(
    _many_rows if rule is _rows else rule for rule in RULES if rule is not _width_bound
)


def check_many(request: KernelRequest, policy: Policy) -> Verdict:
    """May the path for many rows take this call? Accept, or the first rule's Decline."""
    limits = LIMITS[request.device]
    for rule in MANY_RULES:
        objection = rule(request, policy, limits)
        if objection is not None:
            return objection
    return Accept(request.device)


def takes_many(request: KernelRequest, policy: Policy, kernel: ManyRowsKernel) -> bool:
    """Whether the path for many rows takes this call, as far as the request tells."""
    return isinstance(check_many(request, policy), Accept) and kernel.declines(request) is None


def check(request: KernelRequest, policy: Policy) -> Verdict:
    """Accept, or the first rule's Decline."""
    limits = LIMITS[request.device]
    for rule in RULES:
        objection = rule(request, policy, limits)
        if objection is not None:
            return objection
    return Accept(request.device)


_LINEAR_RULES: tuple[Rule, ...] = (
    _switch,
    _adapted,
    _training,
    _dtype,
    _format,
    _group_size,
    _scale_dtype,
    _global_scale,
    _widths,
)
_NO_MATRIX = Projection(format="plain", bits=0, group_size=0, rows=0, cols=0, dtype="")


def linear_request(
    projection: Projection | None, *, rows: int, dtype: str, device: Device, training: bool
) -> KernelRequest:
    """What a linear layer asks of the kernel; ``projection`` None means a layer that is not MLX's own."""
    matrix = projection or _NO_MATRIX
    return KernelRequest(
        rows=rows,
        top_k=1,
        num_experts=1,
        gate=None,
        up=matrix,
        down=matrix,
        activation=Activation("none", gated=False),
        dtype=dtype,
        device=device,
        training=training,
        adapted=projection is None,
    )


def check_linear(request: KernelRequest, policy: Policy) -> Verdict:
    """May the kernel take a linear layer? The rules of experts that are about one matrix."""
    for rule in _LINEAR_RULES:
        objection = rule(request, policy, LIMITS[request.device])
        if objection is not None:
            return objection
    return Accept(request.device)


def check_shared(request: KernelRequest, shared: SharedRequest | None, policy: Policy) -> Verdict:
    """May the launches of accepted request add the shared expert too?

    Args:
        shared: None when its projections are not MLX's own.
    """
    limits = LIMITS[request.device]
    if limits.shared == "none":
        return _beside("a measured gain", f"none on {request.device}", "It runs on its own.")
    if shared is None:
        return _beside("plain projections", "wrapped projections", "Fuse the adapter into the weights first.")
    expert = shared.expert
    if expert.activation != request.activation:
        return _beside(str(request.activation), str(expert.activation), "It runs on its own.")
    if expert.input_width != request.input_width:
        return _beside(f"H = {request.input_width}", f"H = {expert.input_width}", "It runs on its own.")
    # The bound says where routed experts cease to gain; alone a shared expert is never the reason to decline.
    alone = check(expert, replace(policy, max_width=None, measured={}, otherwise=Bounds()))
    if isinstance(alone, Decline):
        return alone
    if shared.gate is not None:
        if (shared.gate.rows, shared.gate.cols) != (1, request.input_width):
            wanted, got = f"a gate of {(1, request.input_width)}", f"{(shared.gate.rows, shared.gate.cols)}"
            return _beside(wanted, got, "It runs on its own.")
        as_expert = replace(expert, gate=None, up=shared.gate, down=shared.gate)
        for rule in (_format, _group_size, _scale_dtype, _global_scale, _widths):
            objection = rule(as_expert, policy, limits)
            if objection is not None:
                return objection
    stored, routed = [_storage(f) for f in (expert, request)]
    if limits.shared == "same" and stored != routed:
        return _beside(f"the experts' storage {routed}", f"{stored}", "Quantise both alike.")
    return Accept(request.device)


def _beside(wanted: str, got: str, hint: str) -> Decline:
    return Decline("shared", wanted, got, hint)


def _storage(request: KernelRequest) -> list[tuple[str, int, int, str, bool, bool]]:
    return [
        (p.format, p.bits, p.group_size, p.dtype, p.bias, p.global_scale) for _, p in _projections(request)
    ]


def _listed(values: Mapping[str, object] | frozenset[str] | frozenset[int]) -> str:
    return ", ".join(str(v) for v in sorted(values))
