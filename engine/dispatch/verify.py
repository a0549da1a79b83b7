"""Tries a fused kernel once against float32 products before it is trusted.

A driver or a chip that nobody has tried may compute nonsense. Each kind of layer is tried on its own weights
with random tokens, so that the kernel that will run is the one that was compared.
"""

from __future__ import annotations

import functools
import warnings
from dataclasses import replace
from typing import Literal, cast

import mlx.core as mx
import mlx.nn as nn

from mlx_experts.engine.kernels import FusedRun, gather, naive
from mlx_experts.engine.kernels.cpu.stacks import evaluated
from mlx_experts.engine.kernels.expert_weights import SharedExpertWeights
from mlx_experts.engine.kernels.request import Activations, Decline, KernelRequest

_ROWS = 5  # the most token rows that are tried on a CPU
# Room for products in TF32, and for a kernel's rounding of activations and of its output; a wrong kernel is
# off by about the size of what is added up. The distance is measured against that size and not against the
# length of the sum, which may be next to nothing where experts cancel.
_BOUNDS = {mx.float32: 1e-2, mx.bfloat16: 2e-2, mx.float16: 2e-2}
INT8_BOUND = 3e-2  # activations that are rounded to 8 bits are off by half a percent a product


def verify_kernel(
    kernel: str,
    run: FusedRun,
    request: KernelRequest,
    container: nn.Module,
    x: mx.array,
    shared: SharedExpertWeights | None = None,
    activations: Activations = "float32",
) -> FusedRun | Decline:
    """The kernel where it agrees or cannot be tried, else why it is not to be used.

    Args:
        kernel: its name; each kernel is tried once in a process for each kind of layer.
        run: the kernel, prepared for the container's weights.
        request: what it was accepted for.
        x: an input of the call, for its shape and dtype.
        shared: the shared expert that the kernel adds.
        activations: what it multiplies activations as.
    """
    if request.device == "cpu" and request.rows > _ROWS:
        # The kernel is the same for any number of rows, and gathering many takes seconds.
        request, x = replace(request, rows=_ROWS), x.reshape(-1, x.shape[-1])[:_ROWS]
    tried, key = _tried(), (kernel, request, activations)
    verdict = tried.get(key)
    if verdict is None:
        verdict = _compare(kernel, run, request, container, x, shared, activations)
        if verdict is None:
            return run  # not kept: the next layer of this kind may be tried
        tried[key] = verdict
    return verdict if isinstance(verdict, Decline) else run


@functools.cache
def _tried() -> dict[tuple[str, KernelRequest, Activations], Literal["agrees"] | Decline]:
    return {}


def _compare(
    kernel: str,
    run: FusedRun,
    request: KernelRequest,
    container: nn.Module,
    x: mx.array,
    shared: SharedExpertWeights | None,
    activations: Activations,
) -> Literal["agrees"] | Decline | None:
    """None inside a function transformation, which has no values, and for weights that are no numbers."""
    token = mx.random.normal(x.shape, key=mx.random.key(0)).astype(x.dtype)
    shape = (*x.shape[:-1], request.top_k)
    # From the first expert to the last one, in steps as even as can be.
    picks = [k * (request.num_experts - 1) // max(request.top_k - 1, 1) for k in range(request.top_k)]
    indices = mx.broadcast_to(mx.array(picks, dtype=mx.uint32), shape)
    weights = mx.full(shape, 1.0 / request.top_k)
    got = run(token, indices, weights)
    if isinstance(got, Decline):
        return None
    wide = gather.outputs(container, request.activation, token, indices) * weights[..., None]
    terms = [wide[..., k, :] for k in range(request.top_k)]
    if shared is not None:
        rows = token.reshape(-1, x.shape[-1])
        terms.append(mx.stack([naive.shared_in_float32(shared, row) for row in rows]).reshape(x.shape))
    distance = mx.linalg.norm(got.astype(mx.float32) - sum(terms))
    size = mx.sqrt(mx.stack([mx.square(term).sum() for term in terms]).sum())
    if not evaluated(distance, size) or not mx.isfinite(size).item():
        return None
    error = cast(float, (distance / mx.maximum(size, 1e-20)).item())
    bound = max(_BOUNDS[x.dtype], INT8_BOUND if activations == "int8" else 0.0)
    found = f"a distance of {error:.1e} to float32 products, relative to what is added up"
    return judged(error, bound, found, f"The fused kernel '{kernel}'", "gathered products are used instead")


def judged(error: float, bound: float, found: str, kernel: str, instead: str) -> Literal["agrees"] | Decline:
    """What is made of a kernel's distance to truth; one that is too far off is warned of.

    Args:
        found: the distance, in words.
        kernel: which kernel it is, as the warning begins.
        instead: what runs in its place, in words.
    """
    if error <= bound:
        return "agrees"
    report = "what `registry check --device` prints."
    warnings.warn(
        f"{kernel} computes something else on this machine ({found}); {instead}. Please report {report}",
        RuntimeWarning,
        stacklevel=3,
    )
    return Decline("self_check", f"at most {bound:.0e}", found, f"Report {report}")
