"""In bfloat16 a token's logits lie as near to float32 as plain MLX's, by the mean over tokens.

One token says little: a single expert picked otherwise decides its distance. The kernels' CUDA text is played
by the CPU; beside it runs the same model in plain MLX, and the same weights in float32.
"""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.cache import make_prompt_cache

from mlx_experts import trace
from mlx_experts.engine.models.decoder import Decoder
from mlx_experts.engine.models.known_families import catalog
from mlx_experts.engine.tools.family_check import build_tiny
from mlx_experts.registry.resolve.tiny_config import tiny_config
from tests.engine.kernels.pieces.test_layers_on_host import played  # noqa: F401

SIZES = {"hidden_size": 256, "num_hidden_layers": 3, "moe_intermediate_size": 128}
SEQUENCES, TOKENS = 2, 8


def copy_of(model, family, config, dtype):
    """Another model with the same weights in a dtype."""
    made = build_tiny(family, config)
    made.eval()
    weights = [
        (name, value.astype(dtype) if mx.issubdtype(value.dtype, mx.floating) else value)
        for name, value in tree_flatten(model.parameters())
    ]
    made.update(tree_unflatten(weights))
    mx.eval(made.parameters())
    return made


def logits_of(model: nn.Module, ids: mx.array, cache: list[Any]) -> mx.array:
    """Evaluated, in float32."""
    made = model(ids, cache=cache).astype(mx.float32)
    mx.eval(made)
    return made


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_the_mean_distance_is_no_larger_than_plain_mlxs(name, played, monkeypatch, fresh_trace):  # noqa: F811
    family = catalog().load(name)
    config = tiny_config(family) | SIZES
    model = build_tiny(family, config)
    model.eval()
    model.set_dtype(mx.bfloat16)
    plain = copy_of(model, family, config, mx.bfloat16)
    wide = copy_of(model, family, config, mx.float32)
    pieces = model.decoder.token_pieces("cuda", mx.bfloat16, compiled=False)

    def in_plain_mlx(which: nn.Module, ids: mx.array, cache: list[Any]) -> mx.array:
        with monkeypatch.context() as patch:
            patch.setenv("MLX_EXPERTS_FUSED", "0")
            return logits_of(which, ids, cache)

    ours, theirs = [], []
    for seed in range(SEQUENCES):
        random = np.random.default_rng(seed)
        prompt = mx.array(random.integers(0, config["vocab_size"], (1, 8)))
        cache, plain_cache, wide_cache = (make_prompt_cache(each) for each in (model, plain, wide))
        for start, filled in ((plain, cache), (plain, plain_cache), (wide, wide_cache)):
            in_plain_mlx(start, prompt, filled)
        for token in random.integers(0, config["vocab_size"], TOKENS):
            ids = mx.array([[int(token)]])
            truth = in_plain_mlx(wide, ids, wide_cache)
            other = in_plain_mlx(plain, ids, plain_cache)
            with monkeypatch.context() as patch:
                patch.setattr(Decoder, "_pieces_for", lambda self, steps, device, dtype: pieces)
                own = logits_of(model, ids, cache)
            for found, logits in ((ours, own), (theirs, other)):
                found.append((mx.linalg.norm(logits - truth) / mx.linalg.norm(truth)).item())
    assert all("cuda" in row.note for row in trace.pieces()[:-1])
    assert 1e-3 < np.mean(ours) < 1.02 * np.mean(theirs)
