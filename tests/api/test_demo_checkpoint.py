"""The bundled checkpoint by plain mlx-lm, against the greedy text of a float32 reference outside MLX.

tests/data/demo_greedy.json is written by scripts/demo_reference.py from the same 4-bit file.
"""

import json
from importlib.resources import files
from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm import load
from mlx_lm.generate import generate_step

ROOT = Path(__file__).resolve().parents[2]
DEMO = Path(str(files("mlx_experts").joinpath("demo")))


@pytest.fixture(scope="module")
def reference():
    return json.loads((ROOT / "tests/data/demo_greedy.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def demo():
    return load(str(DEMO))


@pytest.fixture(scope="module")
def config():
    return json.loads((DEMO / "config.json").read_text(encoding="utf-8"))


def test_demo_is_data_only_and_small():
    found = {path.name: path.stat().st_size for path in DEMO.iterdir()}
    assert set(found) == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert sum(found.values()) < 4_000_000


def test_demo_config_is_a_sparse_qwen3_of_widths_the_fused_path_accepts(config):
    assert config["architectures"] == ["Qwen3MoeForCausalLM"]
    assert config["model_type"] == "qwen3_moe"
    assert config["num_hidden_layers"] >= 4
    assert (config["num_experts"], config["num_experts_per_tok"]) == (16, 4)
    assert config["hidden_size"] % 64 == 0
    assert config["moe_intermediate_size"] % 64 == 0


def test_demo_quantisation_is_four_bits_with_eight_for_every_router(config):
    entries = dict(config["quantization"])
    assert config["quantization_config"] == entries
    assert (entries.pop("bits"), entries.pop("group_size"), entries.pop("mode")) == (4, 64, "affine")
    routers = {f"model.layers.{layer}.mlp.gate" for layer in range(config["num_hidden_layers"])}
    assert entries == {router: {"bits": 8, "group_size": 64} for router in routers}


def test_demo_planes_are_quantised_as_the_config_says():
    planes = mx.load(str(DEMO / "model.safetensors"))
    assert planes["model.layers.3.mlp.switch_mlp.up_proj.weight"].dtype == mx.uint32
    assert planes["model.layers.3.mlp.switch_mlp.up_proj.weight"].shape == (16, 128, 128 * 4 // 32)
    assert planes["model.layers.3.mlp.gate.weight"].shape == (16, 128 * 8 // 32)
    assert planes["model.layers.3.mlp.gate.scales"].shape == (16, 2)
    assert planes["lm_head.scales"].dtype == mx.bfloat16


@pytest.mark.parametrize(
    "text",
    [
        "A mixture-of-experts model",
        "two\n\nparagraphs  and   spaces ",
        "naïve Grüße, 専門家 🙂",
        "<|endoftext",
    ],
)
def test_demo_tokenizer_gives_any_text_back(demo, text):
    tokenizer = demo[1]
    ids = tokenizer.encode(text)
    assert tokenizer.eos_token_id not in ids
    assert tokenizer.decode(ids) == text


def test_demo_tokenizer_adds_nothing_to_a_prompt(demo, reference):
    tokenizer = demo[1]
    assert tokenizer.encode(reference["prompt"]) == reference["prompt_ids"]
    assert tokenizer.decode(reference["ids"]) == reference["text"]
    assert tokenizer.encode(tokenizer.eos_token) == [tokenizer.eos_token_id] == [0]


def test_reference_is_fluent_text_that_rounding_cannot_change(reference):
    written = " ".join((reference["prompt"] + reference["text"]).split())
    handbook = " ".join(
        " ".join(path.read_text(encoding="utf-8").split())
        for path in sorted((ROOT / "scripts/demo_text").glob("*.md"))
    )
    assert len(reference["ids"]) >= 100
    assert written in handbook
    # bfloat16 moves a gap by up to 1.6 here; a lead below twice that could be lost without any mistake.
    assert min(reference["gaps"]) > 3.2


def test_mlx_lm_writes_the_reference_text(demo, reference):
    model, tokenizer = demo
    prompt = mx.array(tokenizer.encode(reference["prompt"]))
    steps = generate_step(prompt, model, max_tokens=len(reference["ids"]))
    assert [int(token) for token, _ in steps] == reference["ids"]


def test_mlx_lm_in_float32_agrees_with_the_reference_gaps(reference):
    model = load(str(DEMO))[0]
    model.set_dtype(mx.float32)
    start = len(reference["prompt_ids"]) - 1
    logits = model(mx.array([reference["prompt_ids"] + reference["ids"]]))[0, start:-1]
    best_two = mx.sort(logits, axis=-1)[:, -2:]
    gaps = best_two[:, 1] - best_two[:, 0]
    assert mx.abs(gaps - mx.array(reference["gaps"])).max().item() < 0.01
