"""Which family and which settings a config means: shared names, nested levels, layers that stand apart."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from mlx_experts.registry.catalog.catalog import Catalog
from mlx_experts.registry.catalog.config_view import ConfigView
from mlx_experts.registry.errors import ConfigError
from mlx_experts.registry.resolve.layer_types import expand_moe_layers, expand_types
from mlx_experts.registry.resolve.planner import Resolver, Sizes, resolve
from mlx_experts.registry.resolve.rope import rope_plan
from mlx_experts.registry.resolve.tiny_config import tiny_config
from mlx_experts.registry.spec import layer_rules as rules
from mlx_experts.registry.spec.family import RopeSpec, RouterSpec
from mlx_experts.registry.spec.values import Ref
from mlx_experts.registry.spec.written import Written

SIZES = Sizes(32, 4, 128, 4, 2, 8, 24, 1e-5, 512, 4, 2, 12)


@pytest.fixture(scope="module")
def catalog() -> Catalog:
    return Catalog()


def types(config: dict[str, Any], count: int, rule: dict[str, Any]) -> list[str]:
    view = ConfigView(config)
    parsed: Any = TypeAdapter(rules.TypeRule).validate_python({"is": "near", "otherwise": "full", **rule})
    return expand_types((parsed,), view, count, Resolver("a_family", view))


def test_range_of_types_has_a_step_an_end_and_a_switch() -> None:
    rule = {"kind": "range", "start": 1, "stop": {"from": "stop"}, "every": 2, "enabled": {"from": "on"}}
    assert types({"stop": 5, "on": True}, 6, rule) == ["full", "near", "full", "near", "full", "full"]
    assert types({"stop": 5, "on": False}, 6, rule) == ["full"] * 6
    assert types({}, 3, {"kind": "range", "start": 2}) == ["full", "full", "near"]


def test_sparse_step_has_other_exceptions_where_the_config_lists_none() -> None:
    rule: Any = TypeAdapter(rules.LayerRule).validate_python(
        {"kind": "sparse_step", "step": 1, "dense": "dense", "otherwise": [0, 1]}
    )
    for config, want in ((({}), [False, False, True]), ({"dense": []}, [True] * 3)):
        view = ConfigView(config)
        assert expand_moe_layers((rule,), view, 3, Resolver("a_family", view)) == want


def test_outer_reference_asks_the_whole_before_its_text_settings() -> None:
    view = ConfigView({"tie": False, "text_config": {"tie": True}})
    read = Resolver("a_family", view).ref
    assert read(Ref.model_validate({"from": "tie"}), 0) is True
    assert read(Ref.model_validate({"from": "tie", "outer": True}), 0) is False


def test_text_settings_may_stand_deeper_and_numbers_pick_from_lists() -> None:
    config = {"thinker": {"text": {"widths": [12, 8]}}, "widths": [1]}
    view = ConfigView(config, ("text", "thinker.text"))
    assert view.get("widths.0") == 12
    assert view.get("widths.1") == 8
    assert view.get("widths.2") is None
    assert ConfigView(config, ("text",)).get("widths.0") == 1


def test_base_of_a_layer_wins_and_zero_leaves_it_without_positions() -> None:
    spec = Written[RopeSpec].model_validate(
        {"style": "half", "layer_theta": {"from": "bases", "per_layer": True}}
    )
    config = {"bases": [0, 300.0], "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}}
    resolver = Resolver("a_family", ConfigView(config))
    assert rope_plan(resolver, spec, 0, "full_attention", SIZES) is None
    plan = rope_plan(resolver, spec, 1, "full_attention", SIZES)
    assert plan is not None
    assert plan.theta == 300.0


def test_dense_layers_may_be_of_a_type_of_their_own(catalog: Catalog) -> None:
    family = catalog.load("cohere2_moe")
    config = {
        **tiny_config(family),
        "num_hidden_layers": 2,
        "layer_types": ["full_attention", "full_attention"],
        "mlp_layer_types": ["dense", "sparse"],
    }
    dense, sparse = resolve(family, config).layers
    assert (dense.type, sparse.type) == ("full_attention_dense", "full_attention")
    assert dense.rope is not None
    assert sparse.rope is None


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({"model_type": "minimax"}, "minimax_m2"),
        ({"model_type": "minimax", "full_attn_alpha_factor": 3.5}, "minimax"),
        ({"model_type": "minimax", "architectures": ["MiniMaxM2ForCausalLM"]}, "minimax_m2"),
        ({"model_type": "minimax_m2", "architectures": ["MiniMaxM2ForCausalLM"]}, "minimax_m2"),
        ({"model_type": "sarvam_moe", "architectures": ["Glm4MoeForCausalLM"]}, "sarvam_moe"),
        ({"model_type": "glm4_moe", "architectures": ["Glm4MoeForCausalLM"]}, "glm4_moe"),
        ({"model_type": "sarvam_mla", "architectures": ["DeepseekV3ForCausalLM"]}, "sarvam_mla"),
        ({"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"]}, "deepseek_v3"),
    ],
)
def test_names_that_two_families_share_are_told_apart(
    catalog: Catalog, config: dict[str, Any], name: str
) -> None:
    assert catalog.resolve(config).name == name


def test_selection_bias_cannot_stand_inside_a_linear_that_conversion_replaces() -> None:
    router = {
        "path": "gate",
        "dtype": "model",
        "score": "sigmoid",
        "order": "score_then_topk",
        "selection_bias": {"path": "gate.bias_for_selection"},
    }
    RouterSpec.model_validate({**router, "quantizable": False})
    with pytest.raises(ValidationError, match="quantizable: false"):
        RouterSpec.model_validate({**router, "quantizable": True})


def test_last_layer_may_have_a_type_of_its_own() -> None:
    listed = {"kind": "list", "key": "kinds", "last": "full"}
    adapter: Any = TypeAdapter(rules.TypeRule)
    view = ConfigView({"kinds": ["near", "full", "near"]})
    resolver = Resolver("a_family", view)
    assert expand_types((adapter.validate_python(listed),), view, 3, resolver) == ["near", "full", "full"]
    assert types({}, 4, {"kind": "periodic", "period": 3, "offset": 0, "last": "end"}) == [
        "near",
        "full",
        "full",
        "end",
    ]


def test_empty_list_of_types_counts_as_absent_only_where_that_is_declared() -> None:
    view = ConfigView({"kinds": []})
    adapter: Any = TypeAdapter(rules.TypeRule)
    pattern = adapter.validate_python({"kind": "pattern", "types": ["full"]})
    listed = {"kind": "list", "key": "kinds"}
    resolver = Resolver("a_family", view)
    lenient = adapter.validate_python({**listed, "empty_is_absent": True})
    assert expand_types((lenient, pattern), view, 2, resolver) == ["full", "full"]
    with pytest.raises(ConfigError, match="entry for every layer"):
        expand_types((adapter.validate_python(listed), pattern), view, 2, resolver)


@pytest.mark.parametrize(
    ("family", "experts", "has_experts"),
    [("jamba", 2, True), ("jamba", 1, False), ("granitemoehybrid", 1, True), ("granitemoehybrid", 0, False)],
)
def test_too_few_experts_make_a_layer_dense_where_the_family_says_so(
    family: str, experts: int, has_experts: bool, catalog: Catalog
) -> None:
    found = catalog.load(family)
    config = {
        **tiny_config(found),
        "num_experts": experts,
        "num_local_experts": experts,
        "num_experts_per_tok": 1,
    }
    assert bool(resolve(found, config).moe_layers) == has_experts


def test_layers_that_no_key_types_follow_the_original_default(catalog: Catalog) -> None:
    family = catalog.load("kimi_linear")
    config = {**tiny_config(family), "num_hidden_layers": 9}
    for key in ("layer_types", "mlp_layer_types", "linear_attn_config"):
        config.pop(key, None)
    full = [layer.index for layer in resolve(family, config).layers if layer.type == "full_attention"]
    assert full == [4, 8]


def test_chunks_follow_the_layer_types_and_rotation_its_own_list(catalog: Catalog) -> None:
    family = catalog.load("llama4_text")
    stated = {"num_hidden_layers": 2, "no_rope_layers": [0, 1], "attention_chunk_size": 3}
    config = {**tiny_config(family)["text_config"], **stated}
    config.pop("layer_types", None)

    def layers(**changes: Any) -> list[tuple[bool, int]]:
        plan = resolve(family, {**config, **changes})
        return [(layer.rope is not None, layer.mixer.chunk) for layer in plan.layers]

    assert layers() == [(False, 0), (True, 3)]
    assert layers(layer_types=["chunked_attention", "full_attention"]) == [(False, 3), (True, 0)]
    assert layers(attention_chunk_size=None) == [(False, 0), (True, 0)]
