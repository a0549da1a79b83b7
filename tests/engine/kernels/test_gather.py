"""The fall-back agrees with the truth for any rows, sorted or not, and keeps gradients."""

import mlx.core as mx
import pytest
from mlx_lm.tuner.lora import LoRASwitchLinear

from mlx_experts.engine.kernels import activations, expert_weights, gather, naive
from mlx_experts.engine.tools.bench_experts import relative_rms

STORED = [
    ("plain", 0, 0),
    ("affine", 4, 64),
    ("affine", 3, 32),
    ("mxfp4", 4, 32),
    ("mxfp8", 8, 32),
    ("nvfp4", 4, 16),
]


@pytest.mark.parametrize("rows", [1, 3, 31, 32, 33])
@pytest.mark.parametrize("kind", STORED, ids=str)
def test_gather_matches_the_truth(container, token, stored, kind, rows):
    # 32 rows of 2 experts are the first call that is sorted.
    activation = activations.make("swiglu")
    c = container(stored=stored(*kind), bias=True)
    call = token(rows=rows)
    truth = naive.experts_in_float32(expert_weights.read(c, activation), *call)
    made = gather.experts(c, activation, *call)
    assert made.shape == call.x.shape
    assert relative_rms(made, truth) < 1e-5


@pytest.mark.parametrize("name", ["relu2", "gelu", "swiglu_oai"])
def test_ungated_containers_and_other_activations_match_the_truth(container, token, name):
    activation = activations.make(name, 1.7, 2.0)
    c = container(name)
    call = token(rows=40)
    truth = naive.experts_in_float32(expert_weights.read(c, activation), *call)
    assert relative_rms(gather.experts(c, activation, *call), truth) < 1e-5


def test_a_global_scale_works_on_the_cpu_where_mlx_has_no_product_for_it(container, token, stored):
    activation = activations.make("swiglu")
    c = container(stored=stored("nvfp4", 4, 16, True), bias=True)
    for rows in (1, 40):
        call = token(rows=rows)
        truth = naive.experts_in_float32(expert_weights.read(c, activation), *call)
        assert relative_rms(gather.experts(c, activation, *call), truth) < 1e-5


def test_the_sum_over_experts_is_float32_where_outputs_cancel():
    outputs = mx.array([[256.0], [-255.0]]).astype(mx.bfloat16)
    weights = mx.array([0.3301, 0.3301])
    assert gather.combine(outputs, weights, mx.float32).item() == pytest.approx(0.3301, rel=1e-4)
    rounded_first = (outputs * weights[:, None].astype(mx.bfloat16)).sum(axis=0).astype(mx.float32)
    assert abs(rounded_first.item() - 0.3301) > 0.05


def test_the_result_has_the_inputs_dtype(container, token):
    call = token(dtype=mx.bfloat16)
    made = gather.experts(container(dtype=mx.bfloat16), activations.make("swiglu"), *call)
    assert made.dtype == mx.bfloat16


def test_no_rows_give_no_rows(container, token):
    call = token(rows=0)
    assert gather.experts(container(), activations.make("swiglu"), *call).shape == (1, 0, 128)


def test_all_rows_on_one_expert_match_the_truth(container, token):
    activation = activations.make("swiglu")
    c = container()
    x, indices, weights = token(rows=40)
    same = mx.full(indices.shape, 3, mx.uint32)
    truth = naive.experts_in_float32(expert_weights.read(c, activation), x, same, weights)
    assert relative_rms(gather.experts(c, activation, x, same, weights), truth) < 1e-5


@pytest.mark.parametrize("rows", [1, 40])
def test_gradients_reach_the_input_the_weights_and_the_experts(container, token, rows):
    c = container()
    x, indices, weights = token(rows=rows)

    def loss(w, x, weights):
        c.up_proj.weight = w
        return gather.experts(c, activations.make("swiglu"), x, indices, weights).square().sum()

    grads = mx.grad(loss, argnums=(0, 1, 2))(c.up_proj.weight, x, weights)
    assert all(mx.abs(g).max().item() > 0 for g in grads)


def test_picks_that_were_made_from_the_input_carry_no_gradient(container, token):
    c = container()
    x, _, weights = token(rows=3)

    def picked(x):
        return mx.argpartition(-x[..., :6], kth=1, axis=-1)[..., :2]

    def loss(x, indices=None):
        indices = picked(x) if indices is None else indices
        return gather.experts(c, activations.make("swiglu"), x, indices, weights).square().sum()

    assert mx.array_equal(mx.grad(loss)(x), mx.grad(loss)(x, picked(x)))


@pytest.mark.parametrize("rows", [3, 40])
def test_an_adapter_is_called_and_not_read(container, token, rows):
    activation = activations.make("swiglu")
    c = container()
    call = token(rows=rows)
    before = gather.experts(c, activation, *call)
    adapter = LoRASwitchLinear.from_base(c.up_proj, r=2)
    adapter.lora_b = mx.random.normal(adapter.lora_b.shape)
    adapter.eval()
    c.up_proj = adapter
    adapted = gather.experts(c, activation, *call)
    c.up_proj = adapter.fuse()
    assert relative_rms(adapted, before) > 1e-2
    assert relative_rms(adapted, gather.experts(c, activation, *call)) < 1e-5
