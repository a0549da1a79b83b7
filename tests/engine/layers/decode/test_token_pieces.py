"""One token through the pieces gives what it gives layer by layer, for every family, cache and change."""

from importlib.resources import files

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_map
from mlx_lm.models.cache import (
    ArraysCache,
    BatchKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    make_prompt_cache,
)
from mlx_lm.tuner.lora import LoRALinear

from mlx_experts import load_model, trace
from mlx_experts.engine.dispatch import tuning_cache
from mlx_experts.engine.layers.decode.around_attention import extended
from mlx_experts.engine.models.decoder import Decoder
from mlx_experts.engine.models.known_families import catalog
from mlx_experts.engine.tools.family_check import build_tiny
from mlx_experts.engine.tools.routing import blocks_of
from mlx_experts.registry.resolve.tiny_config import tiny_config

NAMES = [name for name in catalog().names() if catalog().load(name).backbone is None]
PROMPT = mx.array([[1, 2, 3]])


@pytest.fixture(autouse=True)
def own_settings(monkeypatch, tmp_path):
    """No setting of the machine that runs the tests."""
    monkeypatch.delenv("MLX_EXPERTS_FUSED", raising=False)
    monkeypatch.setenv(tuning_cache.CACHE_DIR, str(tmp_path))
    trace.reset()


def tiny(name):
    family = catalog().load(name)
    model = build_tiny(family, tiny_config(family))
    model.eval()
    return model


def decoded(model, tokens, caches, pieces=None, monkeypatch=None):
    """Logits of the tokens in turn, layer by layer or through a pieces."""
    rows = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Decoder, "_pieces_for", lambda self, steps, device, dtype: pieces)
        for token in tokens:
            rows.append(model(mx.array([[token]]), cache=caches))
            mx.eval(rows[-1])
    return mx.stack(rows)


def distance(got, want):
    return (mx.abs(got - want).max() / mx.abs(want).max()).item()


def both(model, pieces, tokens=(4, 5, 6), make=make_prompt_cache):
    """The relative distance between the two ways, after one prompt."""
    caches = [make(model), make(model)]
    for cache in caches:
        mx.eval(model(PROMPT, cache=cache))
    want = decoded(model, tokens, caches[0])
    return distance(decoded(model, tokens, caches[1], pieces), want)


@pytest.mark.parametrize("name", NAMES)
def test_every_family_decodes_through_its_pieces_as_layer_by_layer(name):
    model = tiny(name)
    pieces = model.decoder.token_pieces("cpu", mx.float32, compiled=False)
    assert both(model, pieces) < 1e-5


CACHES = {
    "rotating": lambda model: [RotatingKVCache(max_size=4, keep=0) for _ in model.layers],
    "quantised": lambda model: [QuantizedKVCache(group_size=32, bits=8) for _ in model.layers],
    "batch of one": lambda model: [BatchKVCache([0]) for _ in model.layers],
    "padded batch of one": lambda model: [BatchKVCache([1]) for _ in model.layers],
}


@pytest.mark.parametrize("make", CACHES.values(), ids=CACHES)
def test_caches_of_mlx_lm_serve_as_they_are(make):
    model = tiny("qwen3_moe")
    assert both(model, model.decoder.token_pieces("cpu", mx.float32, compiled=False), make=make) < 1e-5


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "deepseek_v3", "qwen3_next", "step3p5"])
def test_weights_that_are_replaced_later_are_used(name):
    model = tiny(name)
    pieces = model.decoder.token_pieces("cpu", mx.float32, compiled=False)
    assert both(model, pieces) < 1e-5
    model.update(tree_map(lambda value: value * 1.1 + 0.01, model.parameters()))
    assert both(model, pieces) < 1e-5


def test_a_change_of_a_part_drops_the_pieces(monkeypatch):
    """A GPU is said to be in use; no token is run there."""
    model = tiny("qwen3_moe")
    monkeypatch.setenv("MLX_EXPERTS_PIECES", "1")
    decoder = model.decoder

    def found():
        return decoder._pieces_for(decoder.steps(), "cuda", mx.float32)

    first = found()
    assert first is not None
    assert found() is first
    attention = model.layers[0].self_attn
    attention.q_proj = LoRALinear.from_base(attention.q_proj)
    assert found() not in (first, None)
    model.train()
    assert found() is None
    model.eval()
    assert found() is not None
    monkeypatch.setenv("MLX_EXPERTS_FUSED", "0")
    model.eval()
    assert found() is None


@pytest.mark.parametrize(("asked", "devices"), [(None, ["cuda"]), ("1", ["cuda", "metal"]), ("0", [])])
def test_pieces_run_with_cuda_elsewhere_when_asked_for_and_never_on_the_cpu(monkeypatch, asked, devices):
    if asked is None:
        monkeypatch.delenv("MLX_EXPERTS_PIECES", raising=False)
    else:
        monkeypatch.setenv("MLX_EXPERTS_PIECES", asked)
    decoder = tiny("qwen3_moe").decoder
    made = {d: decoder._pieces_for(decoder.steps(), d, mx.float32) for d in ("cuda", "metal", "cpu")}
    assert [device for device, pieces in made.items() if pieces is not None] == devices


def test_the_trace_says_for_each_layer_which_pieces_ran_and_why_one_did_not():
    model = tiny("deepseek_v32")
    both(model, model.decoder.token_pieces("cpu", mx.float32, compiled=False))
    *rows, head = trace.pieces()
    assert (head.layer, head.note) == ("lm_head", "head: plain MLX, device: wanted a GPU, got cpu")
    assert [row.layer for row in rows] == [f"model.layers.{i}" for i in range(len(model.layers))]
    for row in rows:
        assert "the mixer as it is, mixer: wanted grouped-query attention" in row.note
    assert "router: plain MLX, device: wanted cuda, got cpu" in rows[-1].note
    assert "experts: cpu" in rows[-1].note


def test_experts_are_counted_as_they_are_layer_by_layer():
    model = tiny("qwen3_moe")
    pieces = model.decoder.token_pieces("cpu", mx.float32, compiled=False)
    cache = make_prompt_cache(model)
    mx.eval(model(PROMPT, cache=cache))
    trace.reset()
    decoded(model, (4, 5, 6), cache, pieces)
    counts = {row.layer: row.count for row in trace.snapshot() if row.path == "fused"}
    assert counts == {f"model.layers.{i}.mlp": 3 for i in model.plan.moe_layers}


def test_a_layer_whose_experts_are_switched_off_runs_as_it_is():
    model = tiny("qwen3_moe")
    model.layers[1].mlp.use_fused(False)
    assert both(model, model.decoder.token_pieces("cpu", mx.float32, compiled=False)) < 1e-5
    notes = {row.layer: row.note for row in trace.pieces()}
    assert notes["model.layers.1"] == "as it is, switch: wanted on, got off"
    assert notes["model.layers.2"].endswith("experts: cpu")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_experts_that_stay_in_files_are_read_between_the_pieces(device):
    """For CUDA the steps are only made: they would look into the slots while they are traced."""
    whole, _ = load_model(str(files("mlx_experts").joinpath("demo")), dtype="float32")
    model, _ = load_model(str(files("mlx_experts").joinpath("demo")), dtype="float32", expert_memory="0.6MB")
    pieces = model.decoder.token_pieces(device, mx.float32, compiled=False)
    assert any("wanted experts in memory, got slots" in note for note in pieces._notes.values())
    arrays = [array for block in blocks_of(model) for leaf in block[1].modules() for array in leaf.values()]
    assert not {id(each) for each in arrays} & {place for j in pieces.joined for place in j.begins}
    if device == "cpu":
        caches = [make_prompt_cache(each) for each in (whole, model)]
        mx.eval([each(PROMPT, cache=cache) for each, cache in zip((whole, model), caches, strict=True)])
        want = decoded(whole, (4, 5, 6), caches[0], None)
        assert distance(decoded(model, (4, 5, 6), caches[1], pieces), want) < 1e-5


@pytest.mark.parametrize("path", ["self_attn.q_proj", "self_attn.o_proj", "mlp.switch_mlp.down_proj"])
def test_adapters_run_in_the_pieces_or_beside_them(path):
    from mlx_lm.tuner.lora import LoRASwitchLinear

    model = tiny("qwen3_moe")
    layer = model.layers[1]
    *above, leaf = path.split(".")
    for name in above:
        layer = layer[name]
    kind = LoRALinear if isinstance(layer[leaf], nn.Linear) else LoRASwitchLinear
    layer[leaf] = kind.from_base(layer[leaf])
    layer[leaf].lora_b = mx.random.normal(layer[leaf].lora_b.shape)
    assert both(model, model.decoder.token_pieces("cpu", mx.float32, compiled=False)) < 1e-5


def test_a_head_that_is_put_in_the_place_of_another_is_used():
    model = tiny("olmoe")
    pieces = model.decoder.token_pieces("cpu", mx.float32, compiled=False)
    cache = make_prompt_cache(model)
    mx.eval(model(PROMPT, cache=cache))
    first = decoded(model, (4, 5), cache, pieces)
    model.lm_head = nn.Linear(model.lm_head.weight.shape[1], 24)
    model.layers[0].input_layernorm.weight = model.layers[0].input_layernorm.weight * 1.5
    assert first.shape[-1] != 24
    assert both(model, pieces) < 1e-5
    assert [row.layer for row in trace.pieces()].count("model.layers.0") == 1
    assert model.hidden_and_logits(mx.array([[7]]), cache)[1].shape == (1, 1, 24)


def test_a_recurrent_mixer_needs_the_memory_of_one_whole_row():
    model = tiny("qwen3_next")
    pieces = model.decoder.token_pieces("cpu", mx.float32, compiled=False)
    caches = make_prompt_cache(model)
    assert not pieces.takes(caches)
    mx.eval(model(PROMPT, cache=caches))
    assert pieces.takes(caches)
    kept = [cache for cache in caches if isinstance(cache, ArraysCache)]
    kept[-1].prepare(lengths=[3])
    assert not pieces.takes(caches)
    kept[-1].finalize()
    assert pieces.takes(caches)
    kept[-1].left_padding = mx.array([1])
    assert not pieces.takes(caches)


def test_a_plain_cache_gets_a_token_as_mlx_lm_writes_it():
    caches = [KVCache(), KVCache()]
    for step in range(2 * KVCache.step + 3):
        k, v = mx.random.normal((1, 2, 1, 8)), mx.random.normal((1, 2, 1, 4))
        want, got = caches[0].update_and_fetch(k, v), extended(caches[1], k, v)
        if step % 50 == 0 or step > 2 * KVCache.step - 3:
            assert all(mx.array_equal(w, g) for w, g in zip(want, got, strict=True))
            assert caches[0].offset == caches[1].offset
            assert all(mx.array_equal(w, g) for w, g in zip(caches[0].state, caches[1].state, strict=True))
