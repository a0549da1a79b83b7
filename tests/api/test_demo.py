"""The bundled checkpoint through this project: its text, its fast path, against the reference."""

import json
from importlib.resources import files
from pathlib import Path

import mlx.core as mx
import pytest

import mlx_experts

ROOT = Path(__file__).resolve().parents[2]
DEMO = Path(str(files("mlx_experts").joinpath("demo")))


@pytest.fixture(scope="module")
def reference():
    return json.loads((ROOT / "tests/data/demo_greedy.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def demo():
    return mlx_experts.load(str(DEMO))


def test_demo_writes_the_reference_text(demo, reference):
    model, tokenizer = demo
    ids = reference["ids"]
    responses = mlx_experts.stream_generate(model, tokenizer, reference["prompt"], max_tokens=len(ids))
    assert [response.token for response in responses] == ids


def test_demo_decodes_every_token_through_the_fused_path(demo, reference):
    model, tokenizer = demo
    mlx_experts.trace.reset()
    tokens = 0
    for _ in mlx_experts.stream_generate(model, tokenizer, reference["prompt"], max_tokens=8):
        tokens += 1
    rows = [row for row in mlx_experts.trace.snapshot() if row.path == "fused" and row.rows == "1"]
    assert len(rows) == len(model.layers)
    assert {row.count >= tokens - 1 for row in rows} == {True}


def test_demo_logits_part_by_the_reference_gaps_in_float32(reference):
    model, _ = mlx_experts.load(str(DEMO))
    model.set_dtype(mx.float32)
    prompt, ids = reference["prompt_ids"], reference["ids"]
    logits = model(mx.array([prompt + ids[:-1]]))[0, len(prompt) - 1 :].astype(mx.float32)
    top = mx.sort(logits, axis=-1)[:, -2:]
    found = (top[:, 1] - top[:, 0]).tolist()
    assert found == pytest.approx(reference["gaps"], abs=1e-2)
