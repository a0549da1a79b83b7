"""The truth itself, against NumPy in float64."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_experts.engine.kernels import activations, expert_weights, naive


def _affine(stack, expert):
    """Unpack by hand: codes are a stream of bits, low bits first, in 32-bit words."""
    p = stack.projection
    words = np.array(stack.weight[expert])
    stream = np.unpackbits(words.view(np.uint8), axis=-1, bitorder="little")
    codes = stream.reshape(p.rows, p.cols, p.bits) @ (1 << np.arange(p.bits))
    scale, shift = (
        np.repeat(np.array(a[expert].astype(mx.float32)), p.group_size, -1)
        for a in (stack.scales, stack.biases)
    )
    return codes * scale.astype(np.float64) + shift


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_dequantised_matches_the_bit_stream(container, stored, bits):
    experts = expert_weights.read(container(stored=stored("affine", bits, 32)), activations.make("swiglu"))
    for stack in experts.stacks():
        np.testing.assert_allclose(np.array(naive.dequantised(stack, 3)), _affine(stack, 3), atol=1e-6)


def test_experts_follow_the_definition(container, token):
    c = container(bias=True)
    x, indices, weights = token(rows=3)
    wanted = np.zeros((3, 128))
    names = ("gate_proj", "up_proj", "down_proj")
    w = {n: np.array(c[n].weight).astype(np.float64) for n in names}
    b = {n: np.array(c[n].bias).astype(np.float64) for n in names}
    rows = np.array(x).astype(np.float64)[0]
    for t in range(3):
        for e, s in zip(indices[0, t].tolist(), weights[0, t].tolist(), strict=True):
            g = w["gate_proj"][e] @ rows[t] + b["gate_proj"][e]
            u = w["up_proj"][e] @ rows[t] + b["up_proj"][e]
            wanted[t] += s * (w["down_proj"][e] @ (g / (1 + np.exp(-g)) * u) + b["down_proj"][e])
    made = naive.experts_in_float32(expert_weights.read(c, activations.make("swiglu")), x, indices, weights)
    assert made.shape == x.shape
    np.testing.assert_allclose(np.array(made)[0], wanted, atol=2e-6)


def test_the_result_is_rounded_once_to_the_inputs_dtype(container, token):
    experts = expert_weights.read(container(dtype=mx.bfloat16), activations.make("swiglu"))
    call = token(dtype=mx.bfloat16)
    made = naive.experts(experts, *call)
    assert made.dtype == mx.bfloat16
    assert mx.array_equal(made, naive.experts_in_float32(experts, *call).astype(mx.bfloat16))
