"""A model spread over two ranks gives the logits of a whole one, and keeps about half of it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from importlib.resources import files
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from mlx_lm.generate import generate_step
from mlx_lm.models.switch_layers import SwitchGLU
from mlx_lm.tuner.lora import LoRALinear

from mlx_experts import load
from mlx_experts.engine.layers.base_mixer import Mixer
from mlx_experts.engine.layers.tensor_parallel import share_of, spread_columns, spread_experts, spread_rows
from mlx_experts.engine.models.known_families import catalog
from mlx_experts.engine.tools.family_check import build_tiny
from mlx_experts.registry.errors import SettingError
from mlx_experts.registry.resolve.tiny_config import tiny_config

DEMO = str(files("mlx_experts").joinpath("demo"))
# Biases, sinks and windows; a fused projection; gates; full-width norms; a mix; identity experts; a mixer
# that stays whole; a latent space; quantised weights; an indexer; mlx-lm's own models.
SPREAD = (
    "qwen3_moe",
    "qwen3_moe@4",
    "gpt_oss",
    "gpt_oss@4",
    "dbrx",
    "afmoe",
    "laguna",
    "minimax_m2",
    "Klear",
    "hunyuan_v1_moe",
    "longcat_flash",
    "qwen3_next",
    "nemotron_h",
    "minimax_m3_vl",
    "deepseek_v3@4",
    "deepseek_v2",
    "glm_moe_dsa",
    "kimi_k3@4",
    "deepseek_v41",
)
# Plain and quantised; a window; states; several caches a layer; an indexer that others share; an embedding
# with a cache; keys of earlier layers; index keys; mlx-lm's own model.
PIPED = (
    "qwen3_moe",
    "deepseek_v3@4",
    "gpt_oss",
    "qwen3_next",
    "nemotron_h",
    "longcat_flash",
    "glm_moe_dsa",
    "longcat_flash_ngram",
    "gemma4",
    "minimax_m3_vl",
    "kimi_k3",
)


class TwoRanks:
    """What the divisions below ask of a group, without a second process."""

    def size(self) -> int:
        return 2

    def rank(self) -> int:
        return 1


@pytest.fixture(scope="module")
def spread(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, float]]:
    """What both ranks saw; they must agree."""
    sockets = [socket.socket() for _ in range(2)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    hosts = tmp_path_factory.mktemp("ring") / "hosts.json"
    hosts.write_text(json.dumps([[f"127.0.0.1:{each.getsockname()[1]}"] for each in sockets]))
    for each in sockets:
        each.close()
    script = Path(__file__).with_name("sharded_rank.py")
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), *SPREAD, *(f"{name}|pipeline" for name in PIPED)],
            env={**os.environ, "MLX_RANK": str(rank), "MLX_HOSTFILE": str(hosts)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        answers = [rank.communicate(timeout=400) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for rank, (_, errors) in zip(ranks, answers, strict=True):
        assert rank.returncode == 0, errors[-2000:]
    first, second = (json.loads(out.splitlines()[-1]) for out, _ in answers)
    for name in SPREAD:
        assert first[name] == second[name]
    for name in PIPED:
        # Together they keep every layer once, and what both need twice.
        one, other = (each[f"{name}|pipeline"] for each in (first, second))
        assert one["error"] == other["error"]
        assert max(one["kept"], other["kept"]) < 0.85
        assert one["kept"] + other["kept"] >= 1
    result: dict[str, dict[str, float]] = first
    return result


@pytest.mark.report("DST-03", "DST-08")
@pytest.mark.parametrize("name", SPREAD)
def test_two_ranks_give_the_logits_of_one(name: str, spread: dict[str, dict[str, float]]) -> None:
    assert spread[name]["error"] < 1e-5
    assert spread[name]["kept"] < 0.85


@pytest.mark.report("T4")
@pytest.mark.parametrize("name", PIPED)
def test_two_ranks_of_a_pipeline_give_the_logits_of_one(
    name: str, spread: dict[str, dict[str, float]]
) -> None:
    assert spread[f"{name}|pipeline"]["error"] < 1e-5


@pytest.mark.report("T3", "T4")
@pytest.mark.parametrize("way", ["tensor", "pipeline"])
def test_two_ranks_generate_the_tokens_of_one_process(way: str, spread: dict[str, Any]) -> None:
    """Loaded by what stands in the place of mlx-lm's ``sharded_load``."""
    model, tokenizer = load(DEMO)
    prompt = mx.array(tokenizer.encode("A mixture-of-experts model"))
    tokens = [token for token, _ in generate_step(prompt, model, max_tokens=12)]
    assert spread[f"demo|{way}"] == {"tokens": tokens, "layers": 4 if way == "tensor" else 2}


def test_one_rank_changes_nothing() -> None:
    family = catalog().load("qwen3_moe")
    model = build_tiny(family, tiny_config(family))
    before = model.model.layers[0].self_attn.q_proj
    model.shard()
    assert model.model.layers[0].self_attn.q_proj is before


def test_heads_that_the_ranks_cannot_divide_are_refused() -> None:
    with pytest.raises(SettingError, match="query heads cannot be spread"):
        share_of(3, TwoRanks(), "query heads")


def test_columns_are_cut_between_quantisation_groups_only() -> None:
    parent = nn.Module()
    parent.down_proj = nn.Linear(96, 32, bias=False).to_quantized(group_size=32, bits=4)
    with pytest.raises(SettingError, match="quantisation groups along the columns"):
        spread_columns(parent, "down_proj", TwoRanks())


def test_experts_keep_a_ranks_columns_and_its_part_of_the_bias() -> None:
    container = SwitchGLU(32, 64, 4, bias=True)
    down = container.down_proj
    weight, bias = down.weight, mx.arange(128, dtype=mx.float32).reshape(4, 32)
    down.bias = bias
    up_bias = container.up_proj.bias = mx.arange(256, dtype=mx.float32).reshape(4, 64)
    spread_experts(container, TwoRanks(), "experts")
    assert mx.array_equal(down.weight, weight[..., 32:]).item()
    assert mx.array_equal(down.bias, bias / 2).item()
    assert mx.array_equal(container.up_proj.bias, up_bias[:, 32:]).item()


def test_scale_of_a_whole_expert_is_kept_by_every_rank() -> None:
    container = SwitchGLU(32, 64, 4, bias=False)
    for leaf in ("gate_proj", "up_proj", "down_proj"):
        container[leaf] = container[leaf].to_quantized(group_size=16, bits=4, mode="nvfp4", global_scale=True)
    scales = [container[leaf].global_scale for leaf in ("up_proj", "down_proj")]
    spread_experts(container, TwoRanks(), "experts")
    assert container.up_proj.weight.shape[-2] == 32
    kept = [container[leaf].global_scale for leaf in ("up_proj", "down_proj")]
    assert all(mx.array_equal(a, b).item() for a, b in zip(scales, kept, strict=True))


def test_layer_with_an_adapter_is_refused() -> None:
    parent = nn.Module()
    parent.q_proj = LoRALinear.from_base(nn.Linear(32, 32), r=4)
    with pytest.raises(SettingError, match="carries an adapter"):
        spread_rows(parent, "q_proj", TwoRanks())


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3", "minimax_m3_vl", "gpt_oss"])
def test_a_model_that_the_ranks_cannot_divide_is_refused_untouched(name: str) -> None:
    """The experts come first in no layer and the heads cannot be divided by three."""
    family = catalog().load(name)
    model = build_tiny(family, tiny_config(family))
    before = {path: (value.shape, id(value)) for path, value in tree_flatten(model.parameters())}
    heads = [each.heads for each in model.modules() if isinstance(each, Mixer)]
    with pytest.raises(SettingError, match="cannot be spread over the ranks"):
        model.shard(Ranks(3))
    after = {path: (value.shape, id(value)) for path, value in tree_flatten(model.parameters())}
    assert after == before
    assert [each.heads for each in model.modules() if isinstance(each, Mixer)] == heads
    assert model(mx.array([[1, 2, 3]])).shape[:2] == (1, 3)


def test_two_key_value_heads_over_four_ranks_leave_every_layer_whole() -> None:
    family = catalog().load("qwen3_moe")
    model = build_tiny(family, tiny_config(family))
    before = {path: value.shape for path, value in tree_flatten(model.parameters())}
    with pytest.raises(SettingError, match="key-value heads cannot be spread"):
        model.shard(Ranks(4))
    assert {path: value.shape for path, value in tree_flatten(model.parameters())} == before


class Ranks(TwoRanks):
    """As many ranks as are asked for."""

    def __init__(self, count: int) -> None:
        self._count = count

    def size(self) -> int:
        return self._count
