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
    "deepseek_v3": (
        {"num_hidden_layers": 3, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16},
        ["projections: cuda; output: cuda; mlp: cuda", USUAL, USUAL],
    ),
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_token_through_every_kernel_gives_the_plain_models_logits(name, played, monkeypatch, fresh_trace):
    family, (sizes, notes) = catalog().load(name), LAYERS[name]
    model = build_tiny(family, {**tiny_config(family), **sizes})
    model.eval()
    caches = [make_prompt_cache(model), make_prompt_cache(model)]
    for cache in caches:
        mx.eval(model(mx.array([[1, 2, 3]]), cache=cache))
    pieces = model.decoder.token_pieces("cuda", mx.float32, compiled=False)
    for token in (4, 5, 6):
        ids = mx.array([[token]])
        want = model(ids, cache=caches[0])
        with monkeypatch.context() as patch:
            patch.setattr(Decoder, "_pieces_for", lambda self, steps, device, dtype: pieces)
            got = model(ids, cache=caches[1])
        assert mx.abs(got - want).max().item() < 1e-5 * mx.abs(want).max().item()
    assert [row.note for row in trace.pieces()] == notes
    assert len(played) >= 8
