"""Linear layers with the CPU's kernels: MLX's own in everything but who multiplies."""

import copy
import warnings

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from mlx_lm.tuner.lora import LoRALinear

from mlx_experts.engine.dispatch import linear_dispatch
from mlx_experts.engine.dispatch.trace import linear_trace
from mlx_experts.engine.layers.linear import Embedding, Linear, QuantizedEmbedding, QuantizedLinear, equip


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(96, 64)
        self.up = nn.Linear(64, 128, bias=True)

    def __call__(self, x):
        return self.up(x)


@pytest.fixture
def block():
    mx.random.seed(3)
    made = Block()
    equip(made)
    made.eval()
    linear_trace.reset()
    linear_dispatch._tried.cache_clear()
    return made


def counts():
    return {(r.layer, r.path, r.rows, r.reason): r.count for r in linear_trace.snapshot()}


def test_the_layers_stay_the_objects_and_parameters_that_they_were():
    made = Block()
    before, inner = dict(tree_flatten(made.parameters())), made.up
    equip(made)
    assert made.up is inner
    assert isinstance(made.up, nn.Linear)
    assert type(made.up) is Linear
    assert type(made.embed) is Embedding
    after = dict(tree_flatten(made.parameters()))
    assert after.keys() == before.keys()
    assert all(after[k] is before[k] for k in before)


def test_calls_are_counted_by_layer_and_rows(block):
    for rows in (1, 1, 5):
        x = mx.random.normal((rows, 64))
        assert mx.allclose(block(x), x @ block.up.weight.T + block.up.bias, atol=1e-5)
    assert counts() == {("up", "fused", "1", "cpu"): 2, ("up", "fused", "5-8", "cpu"): 1}


def test_quantising_gives_quantised_layers_with_the_kernel(block):
    nn.quantize(block, group_size=32, bits=4)
    assert type(block.up) is QuantizedLinear
    assert type(block.embed) is QuantizedEmbedding
    assert isinstance(block.up, nn.QuantizedLinear)
    block.eval()
    x = mx.random.normal((1, 64))
    wide = mx.dequantize(block.embed.weight, block.embed.scales, block.embed.biases, 32, 4)
    assert mx.allclose(block.embed.as_linear(x), x @ wide.T, atol=1e-4)
    assert counts() == {("embed", "fused", "1", "cpu"): 1}


def test_a_tied_head_is_a_product_of_the_embedding(block):
    x = mx.random.normal((2, 64))
    assert mx.allclose(block.embed.as_linear(x), x @ block.embed.weight.T, atol=1e-5)
    assert mx.array_equal(block.embed(mx.array([5])), block.embed.weight[5:6])
    assert counts() == {("embed", "fused", "2", "cpu"): 1}


def test_a_weight_that_is_replaced_is_used(block):
    x = mx.random.normal((1, 64))
    block(x)
    block.up.weight = block.up.weight * 2
    assert mx.allclose(block(x), x @ block.up.weight.T + block.up.bias, atol=1e-5)
    block.load_weights([("up.weight", mx.ones((128, 64)))], strict=False)
    assert mx.allclose(block(x), x.sum() + block.up.bias, atol=1e-4)


def test_training_is_left_to_mlx_and_has_gradients(block):
    block.train()
    x = mx.random.normal((3, 64))
    grads = nn.value_and_grad(block, lambda m, x: m(x).sum())(block, x)[1]
    assert mx.allclose(grads["up"]["weight"], mx.broadcast_to(x.sum(axis=0), (128, 64)), atol=1e-4)
    assert counts() == {("up", "mlx", "3-4", "training"): 1}


@pytest.mark.parametrize("transform", [mx.compile, mx.vmap, lambda f: mx.grad(lambda x: f(x).sum())])
def test_inside_a_transformation_mlx_multiplies(block, transform):
    x = mx.random.normal((3, 64))
    mx.eval(transform(block)(x))
    assert {reason for _, path, _, reason in counts()} == {"transformation"}


def test_a_weight_that_is_being_differentiated_is_left_to_mlx(block):
    block.eval()
    nn.value_and_grad(block, lambda m, x: m(x).sum())(block, mx.random.normal((2, 64)))
    assert {(path, reason) for _, path, _, reason in counts()} == {("mlx", "transformation")}


def test_the_switch_leaves_products_to_mlx(monkeypatch):
    made = Block()
    equip(made, fused=False)
    made.eval()
    linear_trace.reset()
    made(mx.zeros((1, 64)))
    assert counts() == {("up", "mlx", "1", "switch"): 1}


def test_an_adapter_calls_the_kernel_within(block):
    adapted = LoRALinear.from_base(block.up, r=4)
    adapted.eval()
    x = mx.random.normal((1, 64))
    assert mx.allclose(adapted(x), x @ block.up.weight.T + block.up.bias, atol=1e-5)
    assert counts() == {("up", "fused", "1", "cpu"): 1}


def test_narrow_activations_keep_the_dtype_of_mlx_and_round_once(block):
    block.set_dtype(mx.bfloat16)
    x = mx.random.normal((4, 64)).astype(mx.bfloat16)
    wide = x.astype(mx.float32) @ block.up.weight.astype(mx.float32).T + block.up.bias.astype(mx.float32)
    made = block(x)
    assert made.dtype == mx.bfloat16
    assert mx.allclose(made, wide.astype(mx.bfloat16), atol=1e-2)
    assert block(x.astype(mx.float32)).dtype == mx.float32


def test_copies_decide_for_themselves(block):
    x = mx.random.normal((1, 64))
    block(x)
    twin = copy.deepcopy(block)
    twin.up.weight = twin.up.weight * 0
    assert mx.allclose(twin(x), twin.up.bias, atol=1e-6)
    assert not mx.allclose(block(x), block.up.bias, atol=1e-3)


def test_a_kernel_that_is_wrong_on_this_machine_is_not_used(block, monkeypatch):
    from mlx_experts.engine.kernels.cpu import linear

    right = linear.FusedLinear.__call__
    monkeypatch.setattr(linear.FusedLinear, "__call__", lambda self, x: right(self, x) * 1.01)
    x = mx.random.normal((1, 64))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        y = block(x)
    assert "something else" in str(said[0].message)
    assert mx.allclose(y, x @ block.up.weight.T + block.up.bias, atol=1e-5)
    assert counts() == {("up", "mlx", "1", "self_check"): 1}
