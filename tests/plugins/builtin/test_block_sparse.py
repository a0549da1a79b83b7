"""Block-sparse attention: which blocks are picked, in batches too, and how its family is stored."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.cache import BatchKVCache, CacheList

from mlx_experts import load_model
from mlx_experts.engine.layers.forward_context import ForwardState
from mlx_experts.engine.models.decoder import make_mixer
from mlx_experts.engine.models.known_families import catalog
from mlx_experts.engine.tools.family_check import build_tiny
from mlx_experts.registry.errors import ConfigError
from mlx_experts.registry.resolve.planner import resolve
from mlx_experts.registry.resolve.tiny_config import tiny_config

BLOCK, KEEP, LOCAL, LENGTH = 3, 3, 2, 17
CASE = Path(__file__).parents[2] / "cases" / "minimax_m3_vl" / "base" / "hub"
LAYERS = "language_model.model.layers."


def config(**changes: Any) -> dict[str, Any]:
    made = tiny_config(catalog().load("minimax_m3_vl"))
    sizes = {"index_block_size": BLOCK, "index_topk_blocks": KEEP, "index_local_blocks": LOCAL}
    made["text_config"] = {**made["text_config"], **sizes, "sparse_attention_config": {}, **changes}
    return made


def mixer(**changes: Any) -> Any:
    """The first sparse layer's mixer, with everything random."""
    plan = resolve(catalog().load("minimax_m3_vl"), config(**changes))
    layer = next(layer for layer in plan.layers if layer.type == "minimax_m3_sparse")
    mx.random.seed(3)
    made: Any = make_mixer(layer, plan)
    drawn = [(k, v + 0.3 * mx.random.normal(v.shape)) for k, v in tree_flatten(made.parameters())]
    made.update(tree_unflatten(drawn))
    return made


def tokens(rows: int = 2, length: int = LENGTH) -> mx.array:
    return mx.random.normal((rows, length, 64), key=mx.random.key(4))


def run(made: Any, x: mx.array, cache: Any = None) -> mx.array:
    return made(x, ForwardState(mx.zeros(x.shape[:2], dtype=mx.int32)), cache)


def close(a: mx.array, b: mx.array) -> bool:
    return bool((mx.abs(a - b).max() < 1e-5 * mx.abs(b).max()).item())


def picked_by_definition(made: Any, x: mx.array) -> np.ndarray:
    """Which keys each head of each query sees, [B, h, L, L], one query at a time."""
    spec = made._sparse
    q = np.array(made._index(x, spec.index_heads, made.index_q_proj, made.index_q_norm, 0))
    k = np.array(made._index(x, 1, made.index_k_proj, made.index_k_norm, 0))[:, 0]
    B, _, L, _ = q.shape
    seen = np.zeros((B, made.heads, L, L), dtype=bool)
    share = made.heads // spec.index_heads
    for b, head, t in np.ndindex(B, spec.index_heads, L):
        blocks = range(t // spec.block + 1)
        best = {n: max(q[b, head, t] @ k[b, j] for j in own_keys(n, t, spec.block)) for n in blocks}
        for n in blocks[-spec.local :]:
            best[n] = np.inf
        for n in sorted(best, key=lambda n: -best[n])[: spec.keep]:
            for j in own_keys(n, t, spec.block):
                seen[b, head * share : (head + 1) * share, t, j] = True
    return seen


def own_keys(block: int, t: int, size: int) -> range:
    return range(block * size, min(block * size + size, t + 1))


def test_each_query_attends_to_its_best_blocks_and_the_ones_before_it() -> None:
    made, x = mixer(), tokens()
    seen = picked_by_definition(made, x)
    assert 0 < seen.sum() < np.tril(np.ones(seen.shape)).sum()
    want = super(type(made), made).__call__(x, ForwardState(mx.zeros(x.shape[:2])), None, mx.array(seen))
    assert close(run(made, x), want)


def test_pieces_and_single_tokens_give_what_the_whole_gives() -> None:
    made, x = mixer(), tokens()
    cache = made.make_cache()
    parts = [x[:, :4], x[:, 4:11], *(x[:, i : i + 1] for i in range(11, LENGTH))]
    assert close(mx.concatenate([run(made, part, cache) for part in parts], axis=1), run(made, x))


def test_padding_on_the_left_moves_no_block() -> None:
    made, x, padding = mixer(), tokens(), 2
    shorter = x[1:, padding:]
    cache = CacheList(BatchKVCache([0, padding]), BatchKVCache([0, padding]))
    got = [run(made, x[:, :10], cache), *(run(made, x[:, i : i + 1], cache) for i in range(10, LENGTH))]
    both = mx.concatenate(got, axis=1)
    assert close(both[:1], run(made, x[:1]))
    assert close(both[1:, padding:], run(made, shorter))


def test_with_room_for_every_block_attention_is_dense() -> None:
    roomy, x = mixer(index_topk_blocks=-(-LENGTH // BLOCK)), tokens()
    dense = super(type(roomy), roomy).__call__(x, ForwardState(mx.zeros(x.shape[:2])), None)
    assert close(run(roomy, x), dense)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"index_n_heads": 3}, "do not divide the query heads"),
        ({"index_head_dim": 8, "rotary_dim": 16}, "more of a head is rotated"),
    ],
)
def test_an_indexer_that_does_not_fit_the_heads_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        mixer(**changes)


def to_transformers(tensors: dict[str, mx.array]) -> dict[str, mx.array]:
    """The names and joined matrices that transformers 5 has in memory."""
    renamed = {}
    for name, value in tensors.items():
        name = re.sub(r"^language_model\.lm_head", "lm_head", name)
        name = re.sub(r"^language_model\.model\.", "model.language_model.", name)
        name = name.replace("self_attn.index_", "self_attn.indexer.")
        name = name.replace("block_sparse_moe.e_score", "mlp.gate.e_score")
        renamed[name.replace("block_sparse_moe", "mlp")] = value
    for owner in {n.removesuffix(".gate_proj.weight") for n in renamed if n.endswith(".gate_proj.weight")}:
        halves = [renamed.pop(f"{owner}.{leaf}_proj.weight") for leaf in ("gate", "up")]
        renamed[f"{owner}.gate_up_proj.weight"] = mx.concatenate(halves)
    base = "model.language_model.layers.1.mlp.experts"
    experts = {
        leaf: [renamed.pop(f"{base}.{e}.{leaf}.weight") for e in range(8)] for leaf in ("w1", "w2", "w3")
    }
    pairs = zip(experts["w1"], experts["w3"], strict=True)
    renamed[f"{base}.gate_up_proj"] = mx.stack([mx.concatenate(pair) for pair in pairs])
    renamed[f"{base}.down_proj"] = mx.stack(experts["w2"])
    return renamed


def test_transformers_own_names_load_as_the_released_ones() -> None:
    model, _ = load_model(CASE)
    original = dict(mx.load(str(CASE / "model.safetensors")))
    carried = model.convert(to_transformers(original)).tensors
    wanted = dict(tree_flatten(model.parameters()))
    assert set(carried) == set(wanted)
    assert all(mx.array_equal(carried[name], value).item() for name, value in wanted.items())


def test_a_shared_expert_in_the_last_row_loads_quantised_too() -> None:
    """Gate and up in one stack with one row more, as some conversions write it; a dense layer in a block."""
    family = catalog().load("minimax_m3_vl")
    stated = config(mlp_layer_types=["dense", "sparse", "sparse", "sparse"])
    model = build_tiny(family, stated)
    nn.quantize(model, 32, 4)
    tensors = dict(tree_flatten(model.parameters()))
    disk = dict(tensors)
    for leaf in ("gate_proj", "up_proj", "down_proj"):
        for plane in ("weight", "scales", "biases"):
            disk[f"{LAYERS}0.block_sparse_moe.{leaf}.{plane}"] = disk.pop(f"{LAYERS}0.mlp.{leaf}.{plane}")
    for i in (1, 2, 3):
        moe = f"{LAYERS}{i}.block_sparse_moe"
        for plane in ("weight", "scales", "biases"):
            rows = {
                leaf: mx.concatenate(
                    [
                        disk.pop(f"{moe}.switch_mlp.{leaf}.{plane}"),
                        disk.pop(f"{moe}.shared_experts.{leaf}.{plane}")[None],
                    ]
                )
                for leaf in ("gate_proj", "up_proj", "down_proj")
            }
            disk[f"{moe}.switch_mlp.gate_up_proj.{plane}"] = mx.concatenate(
                [rows["gate_proj"], rows["up_proj"]], axis=1
            )
            disk[f"{moe}.switch_mlp.down_proj.{plane}"] = rows["down_proj"]
    carried = build_tiny(family, stated, seed=1).convert(disk).tensors
    assert set(carried) == set(tensors)
    assert all(mx.array_equal(carried[name], value).item() for name, value in tensors.items())
