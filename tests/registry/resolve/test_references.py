"""What a reference to config.json can say, and the rules that list layers by it."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import TypeAdapter

from mlx_experts.registry.catalog.config_view import ConfigView
from mlx_experts.registry.errors import ConfigError
from mlx_experts.registry.resolve.layer_types import expand_moe_layers, expand_types
from mlx_experts.registry.resolve.planner import Resolver, Sizes
from mlx_experts.registry.resolve.rope import rope_plan
from mlx_experts.registry.spec import layer_rules as rules
from mlx_experts.registry.spec.family import RopeSpec
from mlx_experts.registry.spec.values import Ref
from mlx_experts.registry.spec.written import Written

LAYER_RULE: TypeAdapter[Any] = TypeAdapter(rules.LayerRule)
TYPE_RULE: TypeAdapter[Any] = TypeAdapter(rules.TypeRule)


def read(config: dict[str, Any], **stated: Any) -> Any:
    """The value of a reference, whose `from` is written `keys` here, at layer 1."""
    stated["from"] = stated.pop("keys")
    return Resolver("a_family", ConfigView(config)).ref(Ref.model_validate(stated), 1)


def moe_layers(config: dict[str, Any], count: int, *stated: dict[str, Any]) -> list[bool]:
    view = ConfigView(config)
    parsed = tuple(LAYER_RULE.validate_python(each) for each in stated)
    return expand_moe_layers(parsed, view, count, Resolver("a_family", view))


def types(config: dict[str, Any], count: int, *stated: dict[str, Any]) -> list[str]:
    view = ConfigView(config)
    parsed = tuple(TYPE_RULE.validate_python(each) for each in stated)
    return expand_types(parsed, view, count, Resolver("a_family", view))


def test_default_may_be_another_reference() -> None:
    stated = {"keys": "own", "default": {"from": "shared", "times": 2}}
    assert read({"shared": 3}, **stated) == 6
    assert read({"shared": 3, "own": 5}, **stated) == 5


def test_null_may_mean_something_else_than_absence() -> None:
    stated = {"keys": "a.scale", "default": 0.7, "if_null": 1.0}
    assert read({}, **stated) == 0.7
    assert read({"a": {"scale": None}}, **stated) == 1.0
    assert read({"a": {"scale": 0.5}}, **stated) == 0.5


def test_presence_alone_may_decide() -> None:
    stated = {"keys": "window", "present": False, "default": True}
    assert read({"window": 0}, **stated) is False
    assert read({"window": None}, **stated) is True


def test_zero_may_mean_absence() -> None:
    stated = {"keys": ["own", "shared"], "zero_is_absent": True}
    assert read({"own": 0, "shared": 3}, **stated) == 3
    assert read({"own": 5, "shared": 3}, **stated) == 5
    assert read({"own": False, "shared": 3}, **stated) is False
    assert read({"own": 0, "shared": 0}, **stated, default=7) == 7
    assert read({"own": 0, "shared": 3}, keys=["own", "shared"]) == 0
    with pytest.raises(ConfigError, match="lacks 'own or shared'"):
        read({"own": 0}, **stated)


def test_zero_that_means_absence_is_not_taken_for_a_key_that_was_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known = {"a_type": {"own": 8, "shared": 16}}
    monkeypatch.setattr("mlx_experts.registry.resolve.class_defaults.class_defaults", lambda: known)
    stated = {"keys": ["own", "shared"], "zero_is_absent": True}
    assert read({"model_type": "a_type"}, **stated) == 8
    assert read({"model_type": "a_type", "own": 0}, **stated) == 16


def test_map_may_lead_to_another_reference() -> None:
    stated = {"keys": "use", "default": None, "map": {True: {"from": "every", "default": 2}, False: None}}
    assert read({"use": True, "every": 4}, **stated) == 4
    assert read({"use": True}, **stated) == 2
    assert read({"use": False, "every": 4}, **stated) is None


def test_null_entry_of_a_list_for_each_layer_gives_the_default() -> None:
    stated = {"keys": "limits", "per_layer": True, "default": 0.0}
    assert read({"limits": [1.0, None]}, **stated) == 0.0
    assert read({"limits": [1.0, 2.0]}, **stated) == 2.0


def test_range_of_layers_reads_lists_and_an_open_end() -> None:
    rule = {
        "kind": "range",
        "start": {"from": "start", "default": 1},
        "end": {"from": "end", "default": -1},
        "interval": {"from": "interval", "default": 1},
    }
    assert moe_layers({}, 4, rule) == [False, True, True, True]
    assert moe_layers({"start": [2, 1], "end": [1, 2]}, 4, rule) == [False, True, True, False]
    assert moe_layers({"start": 0, "interval": 2}, 4, rule) == [False, True, False, True]


@pytest.mark.parametrize("interval", [0, -1, 1.5, "2", True])
def test_layers_are_not_counted_by_what_is_no_number_of_layers(interval: Any) -> None:
    rule = {"kind": "range", "start": 0, "end": -1, "interval": {"from": "interval"}}
    with pytest.raises(ConfigError, match="cannot be counted"):
        moe_layers({"interval": interval}, 4, rule)


def test_letters_may_repeat_and_leave_numbers_to_the_next_rule() -> None:
    letters = {"kind": "letters", "key": "pattern", "map": {"L": "local", "G": "full"}, "repeats": True}
    period = {
        "kind": "periodic",
        "period": {"from": "pattern", "default": 2},
        "offset": "last",
        "is": "full",
        "otherwise": "local",
    }
    assert types({"pattern": "LLG"}, 5, letters, period) == ["local", "local", "full", "local", "local"]
    assert types({"pattern": 3}, 4, letters, period) == ["local", "local", "full", "local"]
    with pytest.raises(ConfigError, match="layer type that is not known"):
        types({"pattern": "LX"}, 4, letters, period)


def test_rope_parameters_of_a_config_without_any_are_not_mixed_with_stated_ones() -> None:
    spec = Written[RopeSpec].model_validate(
        {
            "style": "half",
            "theta": 1.0,
            "when_absent": {"rope_type": "yarn", "factor": 32.0, "truncate": False},
        }
    )
    sizes = Sizes(64, 1, 8, 4, 4, 16, None, 1e-5, 64, 4, 2, 16)

    def rope(config: dict[str, Any]) -> Any:
        return rope_plan(Resolver("a_family", ConfigView(config)), spec, 0, "full_attention", sizes)

    assert rope({}).params["truncate"] is False
    stated = rope({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}})
    assert stated.params == {"rope_type": "yarn", "factor": 4.0}
    assert rope({"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}).type == "default"


def test_key_may_name_the_layer() -> None:
    stated = {"keys": ["layers.{layer}.width", "width"]}
    assert read({"layers": {"1": {"width": 8}, "0": {"width": 4}}, "width": 2}, **stated) == 8
    assert read({"layers": {"0": {"width": 4}}, "width": 2}, **stated) == 2


def test_presence_may_lead_to_another_reference() -> None:
    stated = {"keys": "layers", "present": {"from": "width"}, "default": {"from": "wide"}}
    assert read({"layers": {}, "width": 2, "wide": 4}, **stated) == 2
    assert read({"width": 2, "wide": 4}, **stated) == 4


def test_length_of_a_list_or_a_string_may_be_a_size() -> None:
    stated = {"keys": ["types", "pattern", "count"], "length": True}
    assert read({"types": ["a", "b"], "pattern": "abc"}, **stated) == 2
    assert read({"pattern": "abc", "count": 9}, **stated) == 3
    assert read({"count": 9}, **stated) == 9


def test_letters_may_be_words_in_a_list() -> None:
    rule = {"kind": "letters", "key": "types", "map": {"mamba": "recurrent", "attention": "full"}}
    assert types({"types": ["mamba", "attention"]}, 2, rule) == ["recurrent", "full"]


def test_all_layers_or_none_may_have_experts() -> None:
    rule = {"kind": "all", "enabled": {"from": "use_experts", "default": False}}
    assert moe_layers({"use_experts": True}, 2, rule) == [True, True]
    assert moe_layers({}, 2, rule) == [False, False]


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_rope_parameters_that_are_no_object_are_refused(key: str) -> None:
    spec = Written[RopeSpec].model_validate({"style": "half", "theta": 1.0})
    sizes = Sizes(64, 1, 8, 4, 4, 16, None, 1e-5, 64, 4, 2, 16)
    resolver = Resolver("a_family", ConfigView({key: [1]}))
    with pytest.raises(ConfigError, match=f"'{key}' is not an object"):
        rope_plan(resolver, spec, 0, "full_attention", sizes)
