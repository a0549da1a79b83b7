"""A model's token through the kernels' own CUDA text, which the CPU plays: every piece of a layer at once."""

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache

from mlx_experts import trace
from mlx_experts.engine.kernels.gpu import cuda
from mlx_experts.engine.kernels.gpu.source import Launch
from mlx_experts.engine.layers import linear
from mlx_experts.engine.models.decoder import Decoder
from mlx_experts.engine.models.known_families import catalog
from mlx_experts.engine.tools.family_check import build_tiny
from mlx_experts.registry.resolve.tiny_config import tiny_config


@pytest.fixture
def played(host_cuda, monkeypatch):
    """Launches run on the CPU, each text compiled once."""
    compiled = {}
    kind = type(host_cuda)
    real = kind.compile

    def compile_once(self, source):
        if source not in compiled:
            compiled[source] = real(self, source)
        return compiled[source]

    def make(self, backend, dtypes, shapes, count=1, **options):
        outputs = list(zip(shapes, dtypes[len(self.inputs) :], strict=True))

        def run(arrays):
            mx.eval(arrays)
            made = host_cuda.run(backend, self, arrays, outputs)
            return [mx.array(m).astype(dtype) for m, (_, dtype) in zip(made, outputs, strict=True)]

        return run

    monkeypatch.setattr(kind, "compile", compile_once)
    monkeypatch.setattr(Launch, "make", make)
    monkeypatch.setattr(cuda, "unavailable", lambda: None)
    # Linear layers are MLX's own there, whose arrays lie in one.
    monkeypatch.setattr(linear, "current_device", lambda: "cuda")
    monkeypatch.setattr(cuda, "capability", lambda: None)
    return compiled


USUAL = "projections: cuda; output: cuda; router and experts: cuda"
LAYERS = {
    "qwen3_moe": ({"num_hidden_layers": 3}, ["projections: cuda; output: cuda; mlp: cuda", USUAL, USUAL]),
    "qwen3_next": (
        {"head_dim": 64, "linear_num_key_heads": 2},
        [USUAL, USUAL.replace("output", "recurrence: cuda; output")] * 2,
    ),
    # Norms over all heads, which take a launch that reads queries and keys in one array.
    "olmoe": ({"num_hidden_layers": 2}, [USUAL] * 2),
    "deepseek_v3": (
        {"num_hidden_layers": 3, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16},
        ["projections: cuda; output: cuda; mlp: cuda", USUAL, USUAL],
    ),
}


def two_ways(name, monkeypatch, change=lambda model: None):
    """The largest relative distance of logits between a plain model and its pieces, after a change of it."""
    sizes, _ = LAYERS[name]
    family = catalog().load(name)
    model = build_tiny(family, {**tiny_config(family), **sizes})
    model.eval()
    caches = [make_prompt_cache(model), make_prompt_cache(model)]
    for cache in caches:
        mx.eval(model(mx.array([[1, 2, 3]]), cache=cache))
    pieces = model.decoder.token_pieces("cuda", mx.float32, compiled=False)
    worst = 0.0
    for token in (4, 5, 6):
        if token == 6:
            change(model)
        ids = mx.array([[token]])
        want = model(ids, cache=caches[0])
        with monkeypatch.context() as patch:
            patch.setattr(Decoder, "_pieces_for", lambda self, steps, device, dtype: pieces)
            got = model(ids, cache=caches[1])
        worst = max(worst, (mx.abs(got - want).max() / mx.abs(want).max()).item())
    return worst


@pytest.mark.parametrize("name", LAYERS)
def test_a_token_through_every_kernel_gives_the_plain_models_logits(name, played, monkeypatch, fresh_trace):
    assert two_ways(name, monkeypatch) < 1e-5
    *layers, head = trace.pieces()
    assert [row.note for row in layers] == LAYERS[name][1]
    assert head.note.startswith("head: plain MLX, size: wanted a large matrix")
    assert len(played) >= 8


def test_arrays_that_are_assigned_later_are_read_beside_those_that_lie_in_one(played, monkeypatch):
    """A norm and a matrix of each layer: other launches find theirs in the joined array as before."""

    def change(model):
        for layer in model.layers:
            layer.input_layernorm.weight = layer.input_layernorm.weight * 1.5
            layer.post_attention_layernorm.weight = layer.post_attention_layernorm.weight + 0.25
            layer.self_attn.k_proj.weight = layer.self_attn.k_proj.weight * -0.5

    assert two_ways("qwen3_moe", monkeypatch, change) < 1e-5


def test_a_launch_that_computes_something_else_is_left_to_mlx_and_what_reads_it_is_not(
    played, host_cuda, monkeypatch, fresh_trace
):
    kind, added = type(host_cuda), "me_value(residual[row]) + "
    right = kind.compile
    monkeypatch.setattr(
        kind, "compile", lambda self, source: right(self, source.replace(added, added.replace("+", "-")))
    )
    with pytest.warns(RuntimeWarning, match="piece 'output' computes something else"):
        assert two_ways("olmoe", monkeypatch) < 1e-5
    for row in trace.pieces()[:-1]:
        assert "projections: cuda; output: plain MLX, self_check" in row.note
        assert row.note.endswith("router and experts: cuda")
