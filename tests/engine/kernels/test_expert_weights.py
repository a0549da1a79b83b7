"""Containers are read into request, and a replaced part is noticed."""

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.tuner.lora import LoRASwitchLinear

from mlx_experts.engine.kernels import activations, expert_weights
from mlx_experts.engine.kernels.request import Projection

SWIGLU = activations.make("swiglu")


def test_plain_and_quantised_projections_are_read(container, stored):
    plain = expert_weights.read(container(dtype=mx.bfloat16, bias=True), SWIGLU)
    assert plain.up.projection == Projection("plain", 16, 0, 192, 128, "bfloat16", bias=True)
    mixed = expert_weights.read(
        container(stored=stored("affine", 4, 64), down=stored("affine", 6, 32)), SWIGLU
    )
    assert mixed.gate.projection == Projection("affine", 4, 64, 192, 128, "float32")
    assert mixed.down.projection == Projection("affine", 6, 32, 128, 192, "float32")
    assert [len(s.arrays()) for s in mixed.stacks()] == [3, 3, 3]
    nvfp4 = expert_weights.read(container(stored=stored("nvfp4", 4, 16, True)), SWIGLU)
    assert nvfp4.up.projection == Projection("nvfp4", 4, 16, 192, 128, "uint8", global_scale=True)


def test_an_ungated_container_has_no_gate(container):
    experts = expert_weights.read(container("relu2"), activations.make("relu2"))
    assert experts.gate is None
    assert [s.projection.rows for s in experts.stacks()] == [192, 128]


def test_a_wrapped_or_foreign_projection_is_not_read(container):
    c = container()
    plain, c.up_proj = c.up_proj, LoRASwitchLinear.from_base(c.up_proj)
    assert expert_weights.read(c, SWIGLU) is None
    request = expert_weights.request_of(None, SWIGLU, rows=1, top_k=2, dtype=mx.float32, device="cpu")
    assert request.adapted

    class Doubled(type(plain)):
        def __call__(self, x, indices, sorted_indices=False):
            return 2 * super().__call__(x, indices, sorted_indices=sorted_indices)

    c.up_proj = Doubled(128, 192, 6, bias=False)
    assert expert_weights.read(c, SWIGLU) is None


def test_facts_name_what_the_arrays_are(container, stored):
    experts = expert_weights.read(container(stored=stored("affine", 8, 32)), SWIGLU)
    request = expert_weights.request_of(
        experts, SWIGLU, rows=3, top_k=2, dtype=mx.bfloat16, device="cpu", training=True
    )
    assert (request.rows, request.top_k, request.num_experts, request.dtype) == (3, 2, 6, "bfloat16")
    assert (request.input_width, request.expert_width, request.training, request.adapted) == (
        128,
        192,
        True,
        False,
    )


@pytest.mark.parametrize("change", ["quantise", "weight", "adapter", "bias added", "load"])
def test_what_is_held_notices_what_is_replaced(container, change):
    c = container()
    seen = expert_weights.Held.of(c)
    assert seen.stands()
    match change:
        case "quantise":
            nn.quantize(c, 64, 4)
        case "weight":
            c.down_proj.weight = c.down_proj.weight * 2
        case "adapter":
            c.gate_proj = LoRASwitchLinear.from_base(c.gate_proj)
        case "bias added":
            c.up_proj.bias = mx.zeros((6, 192))
        case "load":
            c.load_weights([("up_proj.weight", mx.zeros((6, 192, 128)))], strict=False)
    assert not seen.stands()
