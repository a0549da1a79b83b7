"""Says in one paragraph whether this machine's fused kernels may be trusted, by running them."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.switch_layers import SwitchGLU

from mlx_experts.engine.dispatch.expert_dispatch import ExpertDispatch, current_device
from mlx_experts.engine.dispatch.trace import trace
from mlx_experts.engine.kernels import activations, expert_weights, naive

# (mode, bits, group size), each with every activation dtype.
_FORMATS = (
    ("affine", 4, 64),
    ("affine", 8, 64),
    ("affine", 6, 64),
    ("affine", 3, 32),
    ("mxfp4", 4, 32),
    ("mxfp8", 8, 32),
    ("nvfp4", 4, 16),
    ("plain", 0, 0),
)
_DTYPES = ((mx.float32, 1e-5), (mx.bfloat16, 5e-3), (mx.float16, 5e-3))
_WIDTH, _EXPERT_WIDTH, _EXPERTS, _TOP_K = 256, 128, 8, 4


def verdict() -> str:
    """Run every format and activation dtype on the fused path and compare with float32 truth."""
    device = current_device()
    ran, wrong, declined = 0, [], []
    activation = activations.make("swiglu")
    for mode, bits, group in _FORMATS:
        mx.random.seed(bits)
        container = SwitchGLU(_WIDTH, _EXPERT_WIDTH, _EXPERTS)
        container.eval()
        if mode != "plain":
            nn.quantize(container, group_size=group, bits=bits, mode=mode)
        label = mode if mode == "plain" else f"{mode} {bits}-bit"
        for dtype, bound in _DTYPES:
            x = mx.random.normal((1, 1, _WIDTH)).astype(dtype)
            indices = mx.arange(_TOP_K)[None, None]
            weights = mx.softmax(mx.random.normal((1, 1, _TOP_K)), axis=-1)
            trace.reset()
            got = ExpertDispatch("device", activation, True)(container, x, indices, weights)
            mx.eval(got)
            row = trace.snapshot()[0]
            name = f"{label} in {expert_weights.dtype_name(dtype)}"
            if row.path != "fused":
                declined.append(f"{name} ({row.reason})")
                continue
            ran += 1
            experts = expert_weights.read(container, activation)
            assert experts is not None
            truth = np.array(naive.experts_in_float32(experts, x, indices, weights), dtype=np.float64)
            error = np.linalg.norm(np.array(got.astype(mx.float32)) - truth) / np.linalg.norm(truth)
            if not error < bound:
                wrong.append(f"{name}: {error:.1e}")
    trace.reset()
    return _paragraph(device, ran, wrong, declined)


def _paragraph(device: str, ran: int, wrong: list[str], declined: list[str]) -> str:
    total = len(_FORMATS) * len(_DTYPES)
    text = f"Device {device}: {ran} of {total} combinations of format and activation dtype ran fused"
    text += f"; {len(declined)} were left to the gather path: {', '.join(declined)}." if declined else "."
    if wrong:
        return (
            f"{text} DO NOT TRUST IT: these are farther from the float32 truth than allowed: "
            f"{', '.join(wrong)}. Set MLX_EXPERTS_FUSED=0 and report this paragraph."
        )
    if not ran:
        return f"{text} Nothing ran fused, so this machine says nothing about the kernels."
    return (
        f"{text} All of them agree with the float32 truth (relative RMS under 1e-5 in float32 and 5e-3 in "
        "bfloat16 and float16): this machine may trust the fused path. `registry tune` finds its break-even."
    )
