"""Options of plugins' components."""

from __future__ import annotations

import pytest
from pydantic import Field

from mlx_experts.engine.layers.options import check_parts, read_options
from mlx_experts.engine.models.known_families import catalog
from mlx_experts.engine.tools.family_check import build_tiny
from mlx_experts.registry.errors import ConfigError, SpecError
from mlx_experts.registry.resolve.tiny_config import tiny_config
from mlx_experts.registry.spec.values import Int, Spec


class Options(Spec):
    kernel: Int = Field(description="Width.")


class Nested(Spec):
    parts: tuple[Options, ...] = Field(description="Parts.")


def test_options_become_an_instance() -> None:
    assert read_options(Options, {"kernel": 4}, "a mixer").kernel == 4


def test_unknown_option_is_named_with_the_known_ones() -> None:
    with pytest.raises(SpecError, match="unknown key 'kernle'") as caught:
        read_options(Options, {"kernle": 4}, "a mixer")
    assert caught.value.expected == "one of kernel"


def test_missing_option_names_its_key() -> None:
    with pytest.raises(SpecError, match="a mixer") as caught:
        read_options(Options, {}, "a mixer")
    assert caught.value.where == "options.kernel"


def test_option_of_the_wrong_type_shows_its_value() -> None:
    with pytest.raises(SpecError) as caught:
        read_options(Options, {"kernel": "four"}, "a mixer")
    assert caught.value.found == "'four'"
    assert caught.value.where == "options.kernel"
    assert caught.value.expected == "a whole number"


def test_a_part_of_an_option_is_told_by_its_place() -> None:
    with pytest.raises(SpecError) as caught:
        read_options(Nested, {"parts": [{"kernel": 4}, {"kernel": -1.5}]}, "a mixer")
    assert caught.value.where == "options.parts.1.kernel"


def test_a_size_that_cannot_be_cut_into_equal_parts_is_named_with_its_layer() -> None:
    check_parts(6, 3, "the heads cannot be divided")
    with pytest.raises(ConfigError, match="the heads cannot be divided") as caught:
        check_parts(6, 4, "the heads cannot be divided", layer=2)
    assert (caught.value.where, caught.value.expected, caught.value.found) == (
        "config.json or the family file, layer 2",
        "a multiple of 4",
        "6",
    )


@pytest.mark.parametrize("name", ["interns1pro", "iquest_q1", "k2_horizon"])
def test_attention_in_a_plugins_options_refuses_heads_that_cannot_share_keys(name: str) -> None:
    family = catalog().load(name)
    config = tiny_config(family)
    level = config[family.text_keys[0]] if family.text_config else config
    level["num_attention_heads"] = 5
    with pytest.raises(ConfigError, match="cannot share"):
        build_tiny(family, config)


@pytest.mark.parametrize("kv_heads", [2, 32])
def test_attention_with_temperatures_refuses_more_and_fewer_value_heads_than_query_heads(
    kv_heads: int,
) -> None:
    family = catalog().load("moondream3")
    config = tiny_config(family)
    level = config[family.text_keys[0]] if family.text_config else config
    level["num_key_value_heads"] = kv_heads
    with pytest.raises(ConfigError, match="as many value heads"):
        build_tiny(family, config)


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("inkling2_loop", "loop_config.num_passes"),
        ("deepseek_v4", "hc_sinkhorn_iters"),
        ("glm5_next", "hc_sinkhorn_iters"),
        ("longcat_flash_ngram", "emb_neighbor_num"),
        ("longcat_flash_ngram", "emb_split_num"),
        ("qwen4_exp", "ngram_size"),
        ("qwen4_exp", "heads_per_ngram"),
    ],
)
def test_what_is_done_more_often_than_any_model_does_it_is_refused(name: str, key: str) -> None:
    family = catalog().load(name)
    config = tiny_config(family)
    level = config[family.text_keys[0]] if family.text_config else config
    *parents, leaf = key.split(".")
    for parent in parents:
        level = level[parent]
    level[leaf] = 2**20
    with pytest.raises(SpecError, match=rf"options of (?s:.*)at most 256\n  found:    {2**20}"):
        build_tiny(family, config)
