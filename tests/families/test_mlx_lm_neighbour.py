"""mlx-lm's loader, generation, batches and caches work on our models, and each reads what the other saves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import batch_generate, generate_step
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import _get_classes, quantize_model, save_config
from mlx_lm.utils import load_model as load_mlx_lm_model
from mlx_lm.utils import save_model as save_mlx_lm_model

import mlx_experts
from mlx_experts.engine.models.known_families import catalog
from mlx_experts.engine.tools.family_check import build_tiny
from mlx_experts.engine.tools.reference_cases import View, all_views
from mlx_experts.registry.errors import UnknownFamilyError


def runs_here(view: View) -> bool:
    try:
        backbone = catalog().for_config(view.config()).backbone
    except UnknownFamilyError:
        return False
    return backbone is None or not backbone.metal_only or mx.metal.is_available()


CASES = Path(__file__).parent.parent / "cases"
HUB = [v for v in all_views(CASES) if v.name == "hub" and runs_here(v)]
# Their pooled groups close at steps that differ between rows.
ALONE = {"deepseek_v4/base"}
BASES = [v for v in HUB if v.case.name in ("base", "vlm", "text")]
PROMPT = [5, 17, 3, 99, 42, 8, 64]
# Where mlx-lm 0.32.2 computes something else than the original, or cannot read the config.
MLX_LM_DIFFERS = {
    "ernie4_5_moe/base": "throws the selection bias away",
    "glm4_moe_lite/base": "gives the latent norms another epsilon",
    "gpt_oss/base": "ignores YaRN's truncate",
    "granitemoehybrid/groups_rope": "has no gelu, and one group in the mixer's norm",
    "jamba/base": "renormalises the selected scores",
    "jamba/switches": "renormalises the selected scores",
    "kimi_linear/base": "gives the latent norms another epsilon",
    "bailing_hybrid/base": "gives the latent norms another epsilon",
    "laguna/base": "ignores YaRN's attention factor",
    "llama4/vlm": "fixes the epsilon of the query and key norms",
    "mimo_v2_flash/base": "has a window that is one shorter",
    "mixtral/sliding": "ignores the window",
    "olmoe/clip_qkv": "ignores the clipping",
    "phimoe/base": "always takes the long factors",
    "qwen2_moe/norm_topk": "ignores norm_topk_prob",
    "qwen3_moe/yarn": "ignores rope_scaling",
}
MLX_LM_CANNOT_READ = {
    "mimo_v2_flash/groups": "knows the lists of layers by their older keys alone",
    "bailing_hybrid/open_gate": "needs the bounded decay",
    "gemma4/shared_forced": "does not force the type of the last layer",
    "kimi_linear/groups": "knows no latent queries and no biases",
    "llama4/types_apart": "takes llama4_text for a dense model",
    "llama4/vlm_plain": "does not read moe_layers",
    "glm4_moe/groups": "never ties",
    "qwen3_moe/windows": "knows the number of experts by its older key alone",
    "qwen3_next/gelu": "does not read layer_types",
    "mellum/dense_bias_yarn": "knows no dense layer",
    "minimax_m2/yarn": "needs rotary_dim",
    "phimoe/tied_bias": "never ties",
    "qwen2_moe/windows_dense": "knows no dense layer",
    "qwen3_vl_moe/tied_apart": "reads the text settings' tie",
    "deepseek_v2/base": "needs rope_scaling",
    "glm_moe_dsa/shared_indexer": "wants an indexer in every layer",
    "hunyuan_v1_moe/base": "knows the model_type hunyuan only",
    "llama4/text": "takes llama4_text for a dense model",
    "minimax/base": "takes it for another model of that name",
}


def mlx_lm_knows(config: dict[str, Any]) -> bool:
    try:
        _get_classes(config)
    except ValueError:
        return False
    return True


def case_id(view: View) -> str:
    return f"{view.case.parent.name}/{view.case.name}"


def greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    return [int(token) for token, _ in generate_step(mx.array(prompt), model, max_tokens=count)]


class BareTokens:
    """The least that mlx-lm's batching asks of a tokenizer, over bare token ids."""

    eos_token_ids: frozenset[int] = frozenset()

    def decode(self, tokens: list[int]) -> str:
        return " ".join(map(str, tokens))


@pytest.mark.parametrize("view", BASES, ids=case_id)
def test_a_batch_of_unequal_prompts_gives_each_its_own_tokens(view: View) -> None:
    model, _ = mlx_experts.load_model(view.case / "hub")
    if case_id(view) in ALONE:
        with pytest.raises(ValueError, match="does not support batching"):
            batch_generate(model, BareTokens(), [PROMPT, PROMPT[2:]], max_tokens=6, verbose=False)
        return
    alone = [BareTokens().decode(greedy(model, prompt, 6)) for prompt in (PROMPT, PROMPT[2:])]
    both = batch_generate(model, BareTokens(), [PROMPT, PROMPT[2:]], max_tokens=6, verbose=False)
    assert both.texts == alone


def test_mlx_lms_own_loader_takes_our_classes() -> None:
    folder = CASES / "qwen3_moe" / "base" / "hub"
    ours, _ = mlx_experts.load_model(folder)
    theirs, _ = load_mlx_lm_model(folder, get_model_classes=mlx_experts.get_model_classes)
    assert type(theirs) is type(ours)
    assert greedy(theirs, PROMPT, 12) == greedy(ours, PROMPT, 12)


def test_quantised_kv_cache_follows_the_full_one() -> None:
    from mlx_experts.registry.resolve.tiny_config import tiny_config

    family = catalog().load("qwen3_moe")
    model = build_tiny(family, tiny_config(family))
    cache = make_prompt_cache(model)
    quantised = [each.to_quantized(group_size=32, bits=8) for each in cache]
    ids = mx.array([[t % 96 for t in PROMPT]])
    full, narrow = model(ids, cache=cache), model(ids, cache=quantised)
    assert float(mx.abs(full - narrow).max() / mx.abs(full).max()) < 0.05


def quantisable(config: dict[str, Any]) -> dict[str, Any]:
    """A case's config with widths that groups of 32 divide, and without the null that mlx-lm's conversion
    writes into; everything else stays."""
    widths = {12: 64, 14: 64, 20: 64, 32: 64, 40: 128}
    result: dict[str, Any] = {}
    for key, value in config.items():
        is_width = "intermediate" in key or "ffn" in key or key.endswith("latent_size")
        if key == "quantization" and value is None:
            continue
        if isinstance(value, dict):
            result[key] = quantisable(value)
        elif key in ("hidden_size", "d_model"):
            result[key] = 64
        elif is_width and isinstance(value, int) and not isinstance(value, bool):
            result[key] = widths.get(value, value)
        elif is_width and isinstance(value, list):
            result[key] = [widths.get(v, v) for v in value]
        elif key in ("short_factor", "long_factor"):
            result[key] = [f for f in value for _ in (0, 1)]
        else:
            result[key] = value
    return result


@pytest.mark.parametrize("view", HUB, ids=case_id)
def test_quantised_checkpoints_travel_between_mlx_lm_and_us(view: View, tmp_path: Path) -> None:
    """Ours, quantised and saved, loads in mlx-lm with our logits; saved there it loads here again."""
    config = quantisable(view.config())
    tiny = build_tiny(catalog().for_config(config), config)
    quantised, saved_config = quantize_model(tiny, config, 32, 4)
    mlx_experts.save_model(tmp_path / "ours", quantised, saved_config)
    ids = mx.array([PROMPT])
    model, _ = mlx_experts.load_model(tmp_path / "ours")
    want = np.array(model(ids))
    if case_id(view) in MLX_LM_CANNOT_READ or not mlx_lm_knows(config):
        with pytest.raises((ValueError, TypeError, AttributeError, RuntimeError)):
            load_mlx_lm_model(tmp_path / "ours")
        return
    other, other_config = load_mlx_lm_model(tmp_path / "ours")
    other.apply(lambda v: v.astype(mx.float32) if mx.issubdtype(v.dtype, mx.floating) else v)
    distance = np.abs(np.array(other(ids)) - want).max() / np.abs(want).max()
    differs = case_id(view) in MLX_LM_DIFFERS
    assert (distance > 1e-4) if differs else (distance < 1e-4)
    save_mlx_lm_model(tmp_path / "theirs", other)
    save_config(dict(other_config), tmp_path / "theirs" / "config.json")
    if case_id(view) == "ernie4_5_moe/base":
        return  # mlx-lm's file lacks the bias that it threw away
    back, _ = mlx_experts.load_model(tmp_path / "theirs")
    assert np.abs(np.array(back(ids)) - want).max() / np.abs(want).max() < 1e-6


def test_saving_keeps_the_config_readable(tmp_path: Path) -> None:
    model, config = mlx_experts.load_model(CASES / "olmoe" / "clip_qkv" / "hub")
    mlx_experts.save_model(tmp_path, model, config)
    assert json.loads((tmp_path / "config.json").read_text())["clip_qkv"] == config["clip_qkv"]
