"""What MLX's host hands over for one layer of a token beside a GPU: launches, views and MLX's own steps.

No kernel runs: a launch is one node of the graph here, as it is there, and so is each of MLX's fused
functions, which on the CPU are many.
"""

from __future__ import annotations

import re
from collections import Counter

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache

from mlx_experts.engine.dispatch import expert_dispatch
from mlx_experts.engine.kernels.gpu import cuda
from mlx_experts.engine.kernels.gpu.source import Launch
from mlx_experts.engine.layers import linear
from mlx_experts.engine.layers.decode import token_pieces
from mlx_experts.engine.models.decoder import Decoder
from mlx_experts.engine.models.known_families import catalog
from mlx_experts.engine.tools.family_check import build_tiny
from mlx_experts.registry.resolve.tiny_config import tiny_config

LAUNCH, FUSED, VIEW = "CustomTransforms", "Depends", "AsStrided"


def node(shapes, dtypes):
    """A function of arrays to arrays of zeros that MLX keeps as one node of a graph."""
    outputs = [mx.zeros(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
    mx.eval(outputs)
    made = mx.custom_function(lambda *arrays: outputs)
    made.vjp(lambda arrays, cotangents, outputs: arrays)
    return lambda arrays: list(made(*arrays))


def fused(like, *arrays):
    """One of MLX's fused functions as one node."""
    zeros = mx.zeros(*like)
    mx.eval(zeros)
    return mx.depends([zeros], [array for array in arrays if isinstance(array, mx.array)])[0]


@pytest.fixture
def beside_a_gpu(monkeypatch):
    """Launches for CUDA are made and never run."""

    def make(self, backend, dtypes, shapes, count=1, **options):
        return node(shapes, dtypes[len(self.inputs) :])

    monkeypatch.setattr(Launch, "make", make)
    monkeypatch.setattr(cuda, "unavailable", lambda: None)
    monkeypatch.setattr(linear, "current_device", lambda: "cuda")
    monkeypatch.setattr(cuda, "capability", lambda: None)
    monkeypatch.setattr(expert_dispatch.verify, "verify_kernel", lambda device, run, *rest: run)
    monkeypatch.setattr(token_pieces, "_distance", lambda step, got, want: mx.zeros(()))


def longer(config, layers):
    """A configuration with so many layers, of which the later ones are of the kinds that are there."""
    count, made = config["num_hidden_layers"], dict(config)
    for key, kinds in config.items():
        if isinstance(kinds, list) and len(kinds) == count:
            # After a first layer of its own kind the rest are one kind.
            more = kinds[-1:] if len(set(kinds[1:])) == 1 else kinds
            made[key] = (kinds + more * layers)[:layers]
    return made | {"num_hidden_layers": layers}


def graph(name, layers, sizes, monkeypatch):
    """The nodes of a second token by kind."""
    family = catalog().load(name)
    model = build_tiny(family, longer(tiny_config(family), layers) | sizes)
    model.eval()
    caches = make_prompt_cache(model)
    mx.eval(model(mx.array([[1, 2, 3]]), cache=caches))
    pieces = model.decoder.token_pieces("cuda", mx.float32)
    monkeypatch.setattr(Decoder, "_pieces_for", lambda self, steps, device, dtype: pieces)
    model.decoder(mx.array([[4]]), [None, *caches])
    memories = [cache for cache in caches if not hasattr(cache, "keys")]
    for cache in caches:
        mx.eval(cache.state)
    with monkeypatch.context() as patch:
        fast = mx.fast
        patch.setattr(fast, "rms_norm", lambda x, *rest: fused((x.shape, x.dtype), x, *rest))
        patch.setattr(fast, "rope", lambda x, *rest, **more: fused((x.shape, x.dtype), x, *more.values()))
        patch.setattr(
            fast,
            "scaled_dot_product_attention",
            lambda q, k, v, mask=None, **more: fused(((*q.shape[:-1], v.shape[-1]), q.dtype), q, k, v, mask),
        )
        row = model.decoder(mx.array([[5]]), [None, *caches])
    return [row, *(array for cache in memories for array in cache.cache)]


def kinds(arrays, folder):
    """How many primitives of each kind the graph of some arrays has, and how many inputs all launches."""
    file = folder / "graph.dot"
    mx.export_to_dot(str(file), *arrays)
    text = file.read_text()
    labels = dict(re.findall(r'(\d+) \[label ="([^"]+)"', text))
    found = Counter(labels.values())
    into = sum(labels[node] == LAUNCH for node in re.findall(r'"\w+" -> (\d+)', text))
    # The zeros that stand for a launch's one output are an input here.
    return found, into - found[LAUNCH]


ROTATED = {"qk_rope_head_dim": 16, "qk_nope_head_dim": 16}
# Of one layer with experts, or a mean of layers: launches, their inputs, views of what a launch left, and
# primitives in all. MLX's own of an attention are five: two writes of the cache, the columns that are there
# of keys and of values, and the attention.
LAYERS = {
    "qwen3_moe": (5, 14, 3, 13, {}),
    "olmoe": (6, 16, 3, 14, {}),
    "mixtral": (5, 14, 3, 13, {}),
    "gpt_oss": (5, 14, 3, 13, {}),
    "deepseek_v3": (9, 25, 2, 20, ROTATED),
    "qwen3_next": (5.5, 15.5, 2.5, 10.5, {"head_dim": 64, "linear_num_key_heads": 2}),
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_of_a_token_takes_the_host_no_more_than_the_table_says(
    name, beside_a_gpu, monkeypatch, tmp_path
):
    *most, sizes = LAYERS[name]
    (few, few_inputs), (many, inputs) = (kinds(graph(name, n, sizes, monkeypatch), tmp_path) for n in (4, 8))
    more = many - few
    found = [each / 4 for each in (more[LAUNCH], inputs - few_inputs, more[VIEW], more.total())]
    assert all(0 < got <= bound for got, bound in zip(found, most, strict=True)), (found, more)
