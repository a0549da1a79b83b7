"""A model whose tensors another library encoded gives the logits of the same values stored plainly."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from foreign_encoders import Planes, compressed, integers, nvfp4
from mlx.utils import tree_flatten

from mlx_experts.engine.layers.moe import MoE
from mlx_experts.engine.loading.checkpoint_loader import load_checkpoint
from mlx_experts.engine.tools.inspect import inspect_checkpoint
from mlx_experts.engine.tools.memory.pack import pack
from mlx_experts.registry.checkpoint.checkpoint import Checkpoint
from mlx_experts.registry.errors import CheckpointError, QuantizationError

D, F, E, HEAD, VOCAB, LAYERS = 192, 64, 4, 16, 96, 2
CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": D,
    "intermediate_size": 128,
    "moe_intermediate_size": F,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": HEAD,
    "num_experts": E,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 64,
    "vocab_size": VOCAB,
    "tie_word_embeddings": False,
    "attention_bias": False,
}


def plain() -> Planes:
    """Random tensors with the names of the hub."""
    key = iter(mx.random.split(mx.random.key(3), 200))

    def matrix(*shape: int) -> mx.array:
        return mx.random.normal(shape, key=next(key)) * shape[-1] ** -0.5

    tensors = {"model.embed_tokens.weight": matrix(VOCAB, D), "lm_head.weight": matrix(VOCAB, D)}
    tensors["model.norm.weight"] = mx.ones(D)
    for i in range(LAYERS):
        layer = f"model.layers.{i}"
        for name, rows, columns in (("q", 64, D), ("k", 32, D), ("v", 32, D), ("o", D, 64)):
            tensors[f"{layer}.self_attn.{name}_proj.weight"] = matrix(rows, columns)
        tensors |= {f"{layer}.self_attn.{name}_norm.weight": mx.ones(HEAD) for name in "qk"}
        tensors |= {f"{layer}.{name}_layernorm.weight": mx.ones(D) for name in ("input", "post_attention")}
        tensors[f"{layer}.mlp.gate.weight"] = matrix(E, D)
        for e in range(E):
            for name, rows, columns in (("gate", F, D), ("up", F, D), ("down", D, F)):
                tensors[f"{layer}.mlp.experts.{e}.{name}_proj.weight"] = matrix(rows, columns)
    return tensors


def fp8(weight: mx.array, number: int) -> tuple[Planes, mx.array]:
    rows, columns = weight.shape
    scale = mx.random.uniform(0.001, 0.004, (-(-rows // 128), -(-columns // 128)), key=mx.random.key(number))
    whole = mx.repeat(mx.repeat(scale, 128, 0), 128, 1)[:rows, :columns]
    stored = mx.to_fp8(weight / whole)
    return {"weight": stored, "weight_scale_inv": scale}, mx.from_fp8(stored, mx.float32) * whole


def mxfp4(weight: mx.array, number: int) -> tuple[Planes, mx.array]:
    packed, scale = mx.quantize(weight, mode="mxfp4")
    value = mx.dequantize(packed, scale, mode="mxfp4", dtype=mx.float32)
    return {"weight_packed": packed.view(mx.uint8), "weight_scale": scale}, value


METHODS = {
    "fp8": (fp8, {"quant_method": "fp8", "weight_block_size": [128, 128]}),
    "int4": (integers(4, 32), compressed(4, 32)),
    "int8": (integers(8, 64), compressed(8, 64)),
    "mxfp4": (mxfp4, {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"}),
    "nvfp4": (nvfp4, {"quant_method": "modelopt", "quant_algo": "NVFP4"}),
}


def save(folder: Path, tensors: Planes, quantization: dict[str, object] | None = None) -> Checkpoint:
    folder.mkdir()
    config = CONFIG if quantization is None else {**CONFIG, "quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(folder / "model.safetensors"), tensors)
    return Checkpoint.open(folder)


def encoded(method: str) -> tuple[Planes, Planes]:
    """The projections encoded, and the values that they then have."""
    encode, stored, values = METHODS[method][0], {}, {}
    for number, (name, weight) in enumerate(plain().items()):
        if "_proj." not in name:
            stored[name] = values[name] = weight
            continue
        planes, values[name] = encode(weight, number)
        stored |= {f"{name.removesuffix('weight')}{plane}": array for plane, array in planes.items()}
    return stored, values


@pytest.mark.parametrize("method", METHODS)
def test_an_encoded_checkpoint_gives_the_logits_of_its_values(method, tmp_path):
    stored, values = encoded(method)
    tokens = mx.array([[5, 17, 80, 3, 41, 9]])
    checkpoint = save(tmp_path / "encoded", stored, METHODS[method][1])
    model, config, report = load_checkpoint(checkpoint)
    found = np.array(model(tokens))
    truth = np.array(load_checkpoint(save(tmp_path / "plain", values))[0](tokens))
    assert np.abs(found - truth).max() <= 1e-4 * np.abs(truth).max()
    assert "quantization_config" not in config
    packed = [path for path, form in report.formats.items() if "switch_mlp" in path]
    assert len(packed) == (0 if method == "fp8" else 3 * LAYERS)
    foretold = inspect_checkpoint(checkpoint)
    assert foretold.problems == foretold.unclaimed == foretold.missing == foretold.misshapen == []
    assert foretold.weight_bytes == sum(value.nbytes for _, value in tree_flatten(model.parameters()))


def test_a_lone_fp8_tensor_leaves_no_half_loaded_model(tmp_path):
    stored, _ = encoded("fp8")
    del stored["model.layers.1.mlp.experts.2.up_proj.weight_scale_inv"]
    with pytest.raises(QuantizationError) as caught:
        load_checkpoint(save(tmp_path / "encoded", stored, METHODS["fp8"][1]))
    assert caught.value.where.splitlines()[0] == "model.layers.1.mlp.experts.2.up_proj.weight"


@pytest.mark.parametrize("method", METHODS)
def test_what_is_computed_from_an_encoding_is_packed_before_it_stays_in_files(method, tmp_path):
    stored, _ = encoded(method)
    tokens = mx.array([[5, 17, 80, 3, 41, 9]])
    checkpoint = save(tmp_path / "encoded", stored, METHODS[method][1])
    whole = np.array(load_checkpoint(checkpoint)[0](tokens))
    if method == "mxfp4":
        found, _, _ = load_checkpoint(checkpoint, expert_memory="100kB")
        np.testing.assert_array_equal(np.array(found(tokens)), whole)
    else:
        with pytest.raises(CheckpointError, match="cannot stay in the files") as caught:
            load_checkpoint(checkpoint, expert_memory="100kB")
        assert "registry pack" in str(caught.value)
    pack(tmp_path / "encoded", tmp_path / "packed")
    packed = Checkpoint.open(tmp_path / "packed")
    want = np.array(load_checkpoint(packed)[0](tokens))
    # Weights that fp8 blocks gave are written in the checkpoint's own dtype.
    assert np.abs(want - whole).max() <= (2e-2 if method == "fp8" else 1e-5) * np.abs(whole).max()
    plan = inspect_checkpoint(packed, expert_memory="1GB").memory
    model, _, _ = load_checkpoint(packed, expert_memory=plan.expert_bytes // 2)
    assert any(block.slots for block in model.modules() if isinstance(block, MoE))
    np.testing.assert_array_equal(np.array(model(tokens)), want)
