"""A token's products in memory give and count what the calls of the modules do, whatever becomes of these."""

import copy
import pickle

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tuner.lora import LoRALinear, LoRASwitchLinear

from mlx_experts.engine.dispatch.expert_dispatch import BoundExperts
from mlx_experts.engine.dispatch.linear_dispatch import LinearDispatch
from mlx_experts.engine.dispatch.trace import linear_trace, trace
from mlx_experts.engine.kernels.cpu import linear
from mlx_experts.engine.layers.decode.whole_layer import WholeLayer
from mlx_experts.engine.layers.moe import MoE
from mlx_experts.engine.models.known_families import catalog
from mlx_experts.engine.tools.family_check import build_tiny
from mlx_experts.registry.resolve.tiny_config import tiny_config

FAMILIES = ["qwen3_moe", "mixtral", "glm4_moe", "qwen2_moe"]  # with and without a shared expert


def tiny(name):
    """A family's smallest model in 4 bits, whose experts and linear layers have been called once."""
    family = catalog().load(name)
    model = build_tiny(family, tiny_config(family))
    model.set_dtype(mx.float32)
    nn.quantize(model, group_size=32, bits=4)
    model.eval()
    tokens(model)
    return model


def tokens(model, change=None, count=4):
    """Logits of single tokens behind a prompt; ``change`` is made to the model in their middle."""
    cache = make_prompt_cache(model)
    model(mx.arange(5)[None], cache=cache)
    made = []
    for i in range(count):
        if change is not None and i == count // 2:
            change(model)
        made.append(model(mx.array([[7 + i]]), cache=cache))
    mx.eval(made)
    return mx.concatenate(made, axis=1)


def by_parts(monkeypatch):
    """From now on, no layer is one call."""
    monkeypatch.setattr(WholeLayer, "__call__", lambda *_: None)


def by_calls(monkeypatch):
    """From now on, every product is a call of its module."""
    by_parts(monkeypatch)
    monkeypatch.setattr(LinearDispatch, "on_row", lambda *_: None)
    monkeypatch.setattr(BoundExperts, "in_memory", lambda *_: None)


@pytest.fixture
def in_memory(monkeypatch):
    """How many products of linear layers and of experts stayed in memory, and layers were one call."""
    counts = {"linear": 0, "experts": 0, "whole": 0}

    def counted(owner, name, part):
        right = getattr(owner, name)

        def asked(self, *given):
            found = right(self, *given)
            counts[part] += found is not None
            return found

        monkeypatch.setattr(owner, name, asked)

    counted(LinearDispatch, "on_row", "linear")
    counted(BoundExperts, "in_memory", "experts")
    counted(WholeLayer, "__call__", "whole")
    return counts


def off(made, wanted):
    return (mx.linalg.norm(made - wanted) / mx.linalg.norm(wanted)).item()


@pytest.mark.parametrize("family", FAMILIES)
def test_values_and_counts_are_those_of_the_calls(family, in_memory, monkeypatch):
    model = tiny(family)
    forms = [layer.one_token() is not None for layer in model.layers]
    layers = sum(has and plan.mlp == "moe" for has, plan in zip(forms, model.plan.layers, strict=True))

    def counted():
        linear_trace.reset()
        trace.reset()
        made = tokens(model)
        return made, linear_trace.snapshot(), trace.snapshot()

    in_memory.update(linear=0, experts=0, whole=0)
    whole = counted()
    assert in_memory["whole"] == 4 * sum(forms) > 0
    assert in_memory["experts"] >= 4 * layers
    assert {(row.path, row.reason) for row in whole[2]} == {("fused", "cpu")}
    by_parts(monkeypatch)
    in_memory.update(linear=0, experts=0, whole=0)
    parts = counted()
    assert in_memory["whole"] == 0
    assert in_memory["experts"] >= 4 * layers
    assert in_memory["linear"] >= 4 * 4 * sum(forms) > 0
    by_calls(monkeypatch)
    in_memory.update(linear=0, experts=0)
    wanted = counted()
    assert in_memory["experts"] == 0

    def told(rows):
        return {(row.layer, row.path, row.rows, row.reason, row.count) for row in rows}

    for made, products, experts in (whole, parts):
        assert mx.array_equal(made, wanted[0])
        assert told(products) == told(wanted[1])
        assert told(experts) == told(wanted[2])


def adapt(model):
    """Adapters on some matrices and experts, whose second halves are not zero."""
    layer = model.layers[1]
    attention, experts = layer.self_attn, layer.mlp.switch_mlp
    attention.q_proj = LoRALinear.from_base(attention.q_proj, r=4)
    attention.o_proj = LoRALinear.from_base(attention.o_proj, r=4)
    experts.up_proj = LoRASwitchLinear.from_base(experts.up_proj, r=4)
    for module in (attention.q_proj, attention.o_proj, experts.up_proj):
        module.lora_b = mx.full(module.lora_b.shape, 0.02)
    model.eval()


def replace(model):
    layer = model.layers[2]
    for module in (layer.self_attn.k_proj, layer.mlp.gate, layer.mlp.switch_mlp.down_proj):
        module.scales = module.scales * 1.5


def change_in_place(model):
    layer = model.layers[2]
    for module in (layer.self_attn.v_proj, layer.mlp.gate, layer.mlp.switch_mlp.gate_proj):
        module.scales[...] = module.scales * 1.5
    layer.self_attn.q_norm.weight[...] = layer.self_attn.q_norm.weight * 1.5


def quantise_again(model):
    """Other modules in the place of some."""
    attention = model.layers[1].self_attn
    module = attention.v_proj
    wide = mx.dequantize(module.weight, module.scales, module.biases, module.group_size, module.bits)
    made = nn.Linear(wide.shape[1], wide.shape[0], bias=False)
    made.weight = wide * 1.5
    attention.v_proj = made


@pytest.mark.parametrize("change", [adapt, replace, change_in_place, quantise_again])
def test_what_is_changed_between_two_tokens_is_used(change, in_memory, monkeypatch):
    model, plain = tiny("qwen3_moe"), tokens(tiny("qwen3_moe"))
    made = tokens(model, change)
    assert in_memory["whole"]
    by_calls(monkeypatch)
    wanted = tokens(tiny("qwen3_moe"), change)
    assert mx.array_equal(made[:, :2], plain[:, :2])
    assert off(made[:, 2:], plain[:, 2:]) > 1e-3
    assert off(made, wanted) < 1e-6


def test_training_and_observers_are_left_to_the_calls(in_memory):
    model, seen = tiny("qwen3_moe"), []

    class Observer:
        def routed(self, indices, weights):
            seen.append("routed")

        def applied(self, outputs, indices, weights):
            seen.append("applied")

    blocks = [module for module in model.modules() if isinstance(module, MoE)]
    for block in blocks:
        block.observe(Observer())
    in_memory.update(linear=0, experts=0)
    tokens(model)
    assert in_memory["experts"] == 0
    assert seen.count("routed") == seen.count("applied") == 5 * len(blocks)
    model.train()
    in_memory.update(linear=0, experts=0, whole=0)
    tokens(model)
    assert in_memory == {"linear": 0, "experts": 0, "whole": 0}


def test_a_layer_between_two_that_is_not_taken_gets_an_array(in_memory):
    """The cache of one layer is of another kind: it computes in MLX between two that do not."""
    from mlx_lm.models.cache import RotatingKVCache

    model = tiny("qwen3_moe")

    def run(second):
        cache = make_prompt_cache(model)
        cache[1] = second or cache[1]
        model(mx.arange(5)[None], cache=cache)
        return mx.concatenate([model(mx.array([[i]]), cache=cache) for i in range(3)], axis=1)

    assert off(run(RotatingKVCache(max_size=64)), run(None)) < 1e-5
    assert in_memory["experts"]


def test_a_copy_holds_no_decision_and_computes_the_same():
    model = tiny("qwen3_moe")
    wanted, twin = tokens(model), copy.deepcopy(model)
    projection = pickle.loads(pickle.dumps(model.layers[0].self_attn.q_proj))
    for module in (projection, twin.layers[0].self_attn.q_proj):
        assert module._dispatch._decided.by_kind == {}
    assert mx.array_equal(tokens(twin), wanted)


def test_a_planted_fault_is_seen(monkeypatch):
    model = tiny("qwen3_moe")
    wanted, right = tokens(model), linear.FusedLinear.on_rows
    by_parts(monkeypatch)
    monkeypatch.setattr(linear.FusedLinear, "on_rows", lambda self, rows: right(self, rows) * 1.01)
    assert off(tokens(model), wanted) > 1e-3
