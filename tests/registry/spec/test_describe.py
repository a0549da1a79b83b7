"""What `registry diff` says of two families."""

from __future__ import annotations

import itertools

import pytest

from mlx_experts.engine.models.known_families import catalog
from mlx_experts.registry.spec.describe import difference, sentence

CATALOG = catalog()


def rows(a: str, b: str) -> dict[str, tuple[str, str]]:
    found = difference(CATALOG.load(a), CATALOG.load(b))
    said = {key: (left, right) for key, left, right in found}
    assert len(said) == len(found)
    return said


def test_a_shared_expert_is_told_with_its_gate() -> None:
    left, right = rows("qwen3_moe", "qwen2_moe")["moe.shared"]
    assert left == "none"
    assert "gate shared_expert_gate" in right
    assert "combine sigmoid_gate" in right


def test_keys_are_those_of_the_files() -> None:
    said = rows("mixtral", "qwen3_next")
    assert "is full_attention" in said["layer_types[1]"][1]
    assert said["checkpoint.conversions[0]"] == (
        "rename .mlp.*; to .block_sparse_moe.*",
        "conv .linear_attn.conv1d.weight",
    )


@pytest.mark.parametrize("name", ["minimax_m3_vl", "nemotron_h", "gemma4_text", "qwen3_moe", "llama4_text"])
def test_no_row_is_empty_and_none_says_the_same_twice(name: str) -> None:
    for other in CATALOG.names():
        for key, (left, right) in rows(name, other).items():
            assert left, (name, other, key)
            assert right, (name, other, key)
            assert left != right, (name, other, key)
            assert "not stated" not in left + right
            assert "is_" not in key.split(".")


def test_the_words_at_the_top_say_what_sets_a_family_apart() -> None:
    first = sentence(CATALOG.load("mixtral"), CATALOG.load("qwen2_moe")).splitlines()[0]
    assert first.startswith("qwen2_moe is the same as mixtral except: ")
    assert "one shared expert behind a sigmoid gate" in first


def test_a_family_is_the_same_as_itself() -> None:
    for name in itertools.islice(CATALOG.names(), 5):
        assert difference(CATALOG.load(name), CATALOG.load(name)) == []
