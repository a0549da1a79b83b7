"""Multimodal checkpoints: the text model loads; other towers' tensors are dropped by rule and counted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.utils import save_config

from mlx_experts.engine.loading.api import load_with_report
from mlx_experts.engine.models.known_families import catalog
from mlx_experts.engine.tools.family_check import build_tiny
from mlx_experts.engine.tools.inspect import inspect_checkpoint
from mlx_experts.registry.checkpoint.checkpoint import Checkpoint
from mlx_experts.registry.errors import TensorError
from mlx_experts.registry.resolve.tiny_config import tiny_config

# By model type, names that released files, transformers' own and MLX conversions have beside the text model.
TOWERS = {
    "gemma4": [
        "model.vision_tower.encoder.layers.0.self_attn.q_proj.linear.weight",
        "model.vision_tower.patch_embedder.input_proj.weight",
        "model.audio_tower.layers.0.feed_forward1.ffw_layer_1.linear.weight",
        "model.embed_vision.embedding_projection.weight",
        "model.embed_audio.embedding_projection.weight",
        "vision_tower.encoder.layers.0.mlp.gate_proj.weight",
        "model.vision_tower.encoder.layers.0.self_attn.q_proj.input_max",
    ],
    "kimi_k25": [
        "vision_tower.encoder.blocks.0.wqkv.weight",
        "mm_projector.proj.0.weight",
        "mm_projector.pre_norm.weight",
    ],
    "kimi_k3": ["vision_tower.encoder.blocks.0.wqkv.weight", "mm_projector.proj.0.weight"],
    "kimi_vl": [
        "vision_tower.encoder.blocks.0.wqkv.weight",
        "vision_tower.patch_embed.pos_emb.weight",
        "multi_modal_projector.linear_1.weight",
        "multi_modal_projector.pre_norm.bias",
    ],
    "llama4": [
        "vision_model.model.layers.0.self_attn.q_proj.weight",
        "vision_model.class_embedding",
        "multi_modal_projector.linear_1.weight",
        "model.vision_model.patch_embedding.linear.weight",
    ],
    "minimax_m3_vl": [
        "vision_tower.vision_model.encoder.layers.0.self_attn.q_proj.weight",
        "model.vision_tower.layers.0.mlp.fc1.weight",
        "multi_modal_projector.linear_1.bias",
        "patch_merge_mlp.linear_2.weight",
    ],
    "mistral3": [
        "vision_tower.transformer.layers.0.attention.q_proj.weight",
        "vision_tower.patch_conv.weight",
        "multi_modal_projector.patch_merger.merging_layer.weight",
        "model.multi_modal_projector.norm.weight",
    ],
    "qwen3_5_moe": [
        "model.visual.blocks.0.attn.qkv.weight",
        "visual.merger.linear_fc1.weight",
        "vision_tower.blocks.0.mlp.linear_fc1.bias",
        "mtp.layers.0.mlp.experts.0.gate_proj.weight",
    ],
    "qwen3_vl_moe": [
        "model.visual.blocks.0.attn.qkv.weight",
        "model.visual.deepstack_merger_list.0.norm.weight",
        "visual.patch_embed.proj.weight",
        "vision_tower.blocks.0.mlp.linear_fc1.bias",
    ],
}


def write(folder: Path, model_type: str, towers: list[str]) -> dict[str, mx.array]:
    """A tiny text model with other towers' tensors beside it; returns its parameters."""
    family = next(catalog().load(e.name) for e in catalog().entries.values() if model_type in e.model_types)
    config: dict[str, Any] = {**tiny_config(family), "model_type": model_type}
    parameters = dict(tree_flatten(build_tiny(family, config).parameters()))
    beside = {name: mx.ones((2, 2)) for name in towers}
    mx.save_safetensors(str(folder / "model.safetensors"), {**parameters, **beside}, {"format": "pt"})
    save_config(config, folder / "config.json")
    return parameters


@pytest.mark.parametrize("model_type", sorted(TOWERS))
def test_the_text_model_loads_and_every_tower_is_counted(model_type: str, tmp_path: Path) -> None:
    want = write(tmp_path, model_type, TOWERS[model_type])
    model, _, report = load_with_report(tmp_path)
    assert sum(report.ignored.values()) == len(TOWERS[model_type])
    assert sum(inspect_checkpoint(Checkpoint.open(tmp_path)).ignored.values()) == len(TOWERS[model_type])
    got = dict(tree_flatten(model.parameters()))
    assert all(mx.array_equal(got[name], value).item() for name, value in want.items())


@pytest.mark.parametrize("model_type", sorted(TOWERS))
def test_a_tensor_of_no_known_part_is_an_error(model_type: str, tmp_path: Path) -> None:
    write(tmp_path, model_type, ["some_other_part.weight"])
    with pytest.raises(TensorError, match="some_other_part"):
        load_with_report(tmp_path)
