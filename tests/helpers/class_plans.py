"""Plans of configs that leave keys out, against those of configs that state a class's defaults."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

from mlx_experts.registry.errors import ConfigError
from mlx_experts.registry.resolve.features import features
from mlx_experts.registry.resolve.plan import Plan
from mlx_experts.registry.resolve.planner import resolve
from mlx_experts.registry.resolve.tiny_config import config_keys
from mlx_experts.registry.spec.family import Family

NO_HEAD = "the class's width is no multiple of its heads"
# Classes whose own defaults are no Mixture-of-Experts model that can be built.
NOT_WHOLE = {
    "mistral3": "the class's text model is dense",
    "qwen3_omni_moe": NO_HEAD,
    "qwen3_omni_moe_thinker": NO_HEAD,
}
# What makes a Mixture-of-Experts model of other classes' defaults: they give no number of experts or picks,
# no head width that fits, or no type of each layer.
_INDEXER = {
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 128,
    "indexer_budget": 64,
    "indexer_compress_ratio": 4,
}
ADDED: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"num_experts_per_tok": 8},
    "deepseek_v2": {"num_experts_per_tok": 6},
    "deepseek_ocr2": {"num_experts_per_tok": 6},
    "deepseek_ocr2_text": {"num_experts_per_tok": 6},
    "qwen4_exp": _INDEXER,
    "qwen4_exp_text": _INDEXER,
    "dots1": {"n_routed_experts": 128, "num_experts_per_tok": 6},
    "glm4_moe": {"head_dim": 128},
    "glm4v_moe": {"head_dim": 128},
    "glm4v_moe_text": {"head_dim": 128},
    "qwen3_omni_moe_text": {"head_dim": 128},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 16},
}
_OLDER_TIE = "the text settings say it, as files before transformers 5 have it"
# Where families follow the files that are there and not what a class says of a key alone.
OTHERWISE = {
    (
        "bailing_moe_v3",
        "linear_head_dim",
    ): "the authors' head_dim means it, which transformers saves for a slice",
    ("ernie4_5_moe", "moe_intermediate_size"): "the authors' code falls back to intermediate_size",
    ("kimi_k25", "tie_word_embeddings"): _OLDER_TIE,
    ("qwen3_vl_moe", "tie_word_embeddings"): _OLDER_TIE,
}
# Lists with one entry a layer, which no table can hold for every number of layers.
NEED_A_LIST = {"cohere2_moe", "flint", "mimo_v2_flash", "nemo_speechlm", "nemotron_h", "nemotron_h_omni"}
# Said in another way, and the same model.
SAME = {
    "moe.layers[0].end": "the last layer, counted or -1",
    "mixer.options.index_types": "all layers alike",
    "mixer.heads": "the model's own number",
    "moe.router.options.types": "a list, or how many layers come first",
    "mixer.options.sources": "every layer its own, as a list or not",
    "mixer.scale_width": "the width of a head",
}
# The same for these where either says so in a word.
WORDS = {
    ".mixer.options.head_dim": {"auto"},
    ".mixer.options.rank": {"auto"},
    ".mixer.options.step_limit[1]": {"inf", "Infinity", None},
    ".mixer.options.step_limit[1].__float__": {"inf", "Infinity", None},
}
# Classes that force or work out the type of a layer, or whose types are two settings here: no list to turn.
FORCED = {"jamba", "llama4", "llama4_text", "gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text"}
# The same for one family: a rotated share or width, a list of the layers that rotate or every how many.
SAME_IN = {
    "deepseek_v4": ("rope.dims", "rope.partial"),
    "dots3_note": ("rope.partial",),
    "mistral_large4": (".options.still_every", ".options.turned"),
}
# transformers' class of this name is another family's.
ANOTHERS = {("minimax_m2", "minimax"), ("bailing_hybrid", "bailing_hybrid")}


def source_types(family: Family) -> list[str]:
    """The model types of a family that transformers has an implementation of."""
    return [t for t in family.model_types if t in CONFIG_MAPPING_NAMES and (family.family, t) not in ANOTHERS]


def class_types(family: Family) -> list[str]:
    """The model types of a family whose defaults are held to those of transformers' config class."""
    return source_types(family)


@cache
def _text(model_type: str) -> str:
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        kind = CONFIG_MAPPING[model_type]
        # Text settings that are absent as a whole are another matter than one of their keys.
        parts = {k: {} for k, part in kind.sub_configs_defaults.items() if "text" in k and part.init_kwargs}
        return str(kind(**parts).to_json_string(use_diff=False))
    finally:
        logging.disable(before)


def class_config(model_type: str) -> dict[str, Any]:
    """What a class that is given nothing, or what a whole model needs besides, writes as its config.json."""
    config: dict[str, Any] = json.loads(_text(model_type))
    text_level(config).update(ADDED.get(model_type, {}))
    return config


def text_level(config: dict[str, Any]) -> dict[str, Any]:
    """The nested text settings of a config, or all of it."""
    nested: dict[str, Any] = config.get("text_config") or config
    return nested


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every literal of a plan by its path, without the family and the config."""
    return _leaves(value, path, {})


def _leaves(
    value: Any, path: str, known: dict[int, tuple[Any, list[tuple[str, Any]]]]
) -> Iterator[tuple[str, Any]]:
    """The same.

    Args:
        known: a section's own, by its identity: alike layers share their sections.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            if field.name not in ("family", "config", "checkpoint"):
                yield from _leaves(getattr(value, field.name), f"{path}.{field.name}", known)
    elif hasattr(value, "model_dump"):
        if id(value) not in known:
            known[id(value)] = value, list(_leaves(value.model_dump(), "", known))
        yield from ((f"{path}{below}", each) for below, each in known[id(value)][1])
    elif isinstance(value, dict):
        for key, each in value.items():
            # What a rotation comes to stands beside its parameters.
            if key not in ("rope_theta", "rope_type", "type", "partial_rotary_factor", "mrope_section"):
                yield from _leaves(each, f"{path}.{key}", known)
    elif isinstance(value, list | tuple):
        for i, each in enumerate(value):
            yield from _leaves(each, f"{path}[{i}]", known)
    elif not (isinstance(value, float) and math.isinf(value)):
        yield path, value


def plan_of(family: Family, config: Mapping[str, Any]) -> Plan:
    """The plan of a config that names the family's own architecture.

    Raises:
        ConfigError: the family cannot read the config.
    """
    return resolve(family, {**config, "architectures": list(family.architectures[:1])})


def plan_values(family: Family, config: Mapping[str, Any]) -> dict[str, Any]:
    """The literals of a config's plan that say what the model computes.

    Raises:
        ConfigError: the family cannot read the config.
    """
    key = json.dumps(config, sort_keys=True)
    if not (_PLANS and _PLANS[0][0] is family):
        _PLANS[:] = [(family, {})]
    known = _PLANS[0][1]
    if key not in known:
        known[key] = values_of(plan_of(family, config))
    return dict(known[key])


# The plans of the family that was asked for last.
_PLANS: list[tuple[Family, dict[str, dict[str, Any]]]] = []


def values_of(plan: Plan) -> dict[str, Any]:
    """The literals of a plan that say what the model computes, by their paths."""
    found = dict(leaves(plan))
    same = tuple(SAME)
    unread = [".max_position_embeddings", "llama_4_scaling_beta", *SAME_IN.get(plan.family.family, ())]
    if "dense" not in found.values():
        unread.append("sizes.dense_width")
    return {
        path: value
        for path, value in found.items()
        if not path.partition("].")[2].startswith(same) and not path.endswith(tuple(unread))
    }


def plan_differences(want: Plan, got: Plan) -> dict[str, tuple[Any, Any]]:
    """Where two plans of one family differ, with what each says; equal ones are not taken apart."""
    parts = {each.name for each in dataclasses.fields(Plan)} - {"family", "config", "checkpoint"}
    if all(getattr(want, name) == getattr(got, name) for name in parts):
        return {}
    return differences(values_of(want), values_of(got))


def differences(want: Mapping[str, Any], got: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Where two plans differ, with what each says."""
    return {
        k: (want.get(k), got.get(k))
        for k in {*want, *got}
        if want.get(k) != got.get(k) and not _in_a_word(k, want.get(k), got.get(k))
    }


def _in_a_word(at: str, *values: Any) -> bool:
    """Whether a place may hold a word, and one value is it; infinity is a word or nothing on both sides."""
    words = next((each for end, each in WORDS.items() if at.endswith(end)), set())
    found = [value in words for value in values if isinstance(value, str | None)]
    return len(found) == len(values) if None in words else any(found)


def bare_configs(model_type: str) -> list[dict[str, Any]]:
    """Configs of nothing but their type, with and without nested text settings; lists of layers stay where no
    table can hold them."""
    config = class_config(model_type)
    if model_type in NEED_A_LIST:
        lists = {key: value for key, value in text_level(config).items() if isinstance(value, list)}
        if "text_config" in config:
            return [{"model_type": model_type, "text_config": lists}]
        return [{"model_type": model_type, **lists}]
    added = ADDED.get(model_type, {})
    flat = {"model_type": model_type, **added}
    return [flat, {"model_type": model_type, "text_config": added}] if "text_config" in config else [flat]


def missed_defaults(family: Family, model_type: str) -> dict[str, Any]:
    """What a config of nothing but its type means otherwise than the class's own config, by place.

    Raises:
        ConfigError: the family cannot read the class's own config.
    """
    want = plan_of(family, class_config(model_type))
    odd: dict[str, Any] = {}
    for config in bare_configs(model_type):
        odd |= plan_differences(want, plan_of(family, config))
    if (family.family, "tie_word_embeddings") in OTHERWISE:
        odd.pop(".head.tied", None)
    return odd


@cache
def settings() -> dict[str, list[dict[str, Any]]]:
    """By model type, settings of files that a class makes its own of."""
    path = Path(__file__).parent.parent / "data" / "settings.yaml"
    found: dict[str, list[dict[str, Any]]] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return found


def missed_settings(family: Family, model_type: str) -> dict[str, Any]:
    """By a file's settings, what they mean otherwise than what the class makes of them.

    Raises:
        ConfigError: the family cannot read what the class writes.
    """
    found: dict[str, Any] = {}
    for stated in settings().get(model_type, ()):
        own = {**ADDED.get(model_type, {}), **stated}
        want = plan_values(family, json.loads(_made(model_type, json.dumps(own))))
        try:
            odd: Any = differences(want, plan_values(family, {"model_type": model_type, **own}))
        except ConfigError as error:
            odd = str(error)
        if "layer_types" in stated and (alike := _alike(family, model_type, own)):
            found[", ".join(stated)] = alike
            continue
        # What a type of layer means is compared, and its name is not.
        odd = odd if isinstance(odd, str) else {at: v for at, v in odd.items() if not at.endswith("].type")}
        if odd:
            found[", ".join(stated)] = odd
    return found


def _alike(family: Family, model_type: str, own: dict[str, Any]) -> str:
    """Two layers of unlike types that a family reads as the same, or nothing."""
    types = text_level(json.loads(_made(model_type, json.dumps(own))))["layer_types"]
    layers = resolve(family, {"model_type": model_type, **own}).layers
    for i, other in enumerate(types):
        if other != types[0] and layers[i].mixer == layers[0].mixer:
            return f"layers 0 and {i} are {types[0]} and {other}, and the same here"
    return ""


@cache
def _made(model_type: str, stated: str) -> str:
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        return str(CONFIG_MAPPING[model_type](**json.loads(stated)).to_json_string(use_diff=False))
    finally:
        logging.disable(before)


def single_keys(family: Family, config: Mapping[str, Any]) -> Iterator[tuple[Any, str]]:
    """The settings of a class's config that can be left out alone, each with the level that holds it."""
    nested = {key.split(".")[0] for key in family.text_keys}
    read = config_keys(family) | nested | features().keys()
    levels = [config, *(v for v in (config.get("text_config"),) if isinstance(v, dict))]
    for level in levels:
        for key, value in level.items():
            # Rotations and lists of layers are settled as a whole; a key that nobody reads changes no plan.
            added = ADDED.get(config["model_type"], {})
            whole = ("model_type", "text_config", "rope_parameters", "architectures", *added)
            if key not in read or key in whole:
                continue
            if value is not None and not isinstance(value, list) and (family.family, key) not in OTHERWISE:
                yield level, key


def missed_single_defaults(
    family: Family, model_type: str, only: frozenset[str] | None = None
) -> dict[str, Any]:
    """By key, what a config that leaves this key out means otherwise than the class's own config.

    Args:
        only: the keys to try; None for all.

    Raises:
        ConfigError: the family cannot read one of them.
    """
    config = class_config(model_type)
    want = plan_of(family, config)
    found = {}
    for level, key in list(single_keys(family, config)):
        if only is not None and key not in only:
            continue
        value = level.pop(key)
        odd = plan_differences(want, plan_of(family, config))
        level[key] = value
        if odd:
            found[key] = odd
    return found


def aliases(model_type: str) -> Iterator[tuple[tuple[str, ...], str, str]]:
    """Other names that a class takes for its settings: the level that has them, the other name, its own."""
    kind = CONFIG_MAPPING[model_type]
    for at, each in (
        ((), kind),
        *(((name,), sub) for name, sub in kind.sub_configs.items() if name == "text_config"),
    ):
        for other, own in getattr(each, "attribute_map", {}).items():
            yield at, other, own


def _another(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    return value * 2 if isinstance(value, int | float) else None


def missed_aliases(family: Family, model_type: str, only: str | None = None) -> dict[str, Any]:
    """By the other name, what a config that uses it means otherwise than one with the class's own name.

    Args:
        only: the other name to try; None for all.
    """
    found: dict[str, Any] = {}
    for at, other, own in aliases(model_type):
        config = class_config(model_type)
        level = config[at[0]] if at else config
        new = _another(level.get(own))
        if new is None or (only is not None and other != only):
            continue
        try:
            before = plan_of(family, config)
            level[own] = new
            want = plan_of(family, config)
        except ConfigError:
            continue
        if not plan_differences(want, before):
            continue
        del level[own]
        level[other] = new
        try:
            odd: Any = plan_differences(want, plan_of(family, config))
        except ConfigError as error:
            odd = str(error)
        if odd:
            found[other] = odd
    return found


def listed_layers(family: Family, model_type: str) -> dict[str, list[Any]]:
    """Lists with one entry a layer that a class works out, under the keys by which the family reads lists."""
    kind = CONFIG_MAPPING[model_type]
    settings = kind().get_text_config()
    count = getattr(settings, "num_hidden_layers", None)
    rules = (*(family.layer_types or ()), *family.moe.layers)
    found: dict[str, list[Any]] = {}
    for key in {str(rule.key) for rule in rules if hasattr(rule, "key")}:
        value = getattr(settings, key, None)
        if isinstance(value, list | tuple) and len(value) == count:
            found[key] = list(value)
    return found


def missed_lists(family: Family, model_type: str) -> dict[str, Any]:
    """By key, what a list that the class works out means otherwise than the class's config without it, or
    than the same list turned by one layer means for the layer before.

    Raises:
        ConfigError: the family cannot read a list.
    """
    config = class_config(model_type)
    level = text_level(config)
    if model_type in NEED_A_LIST:
        return {}
    lists = listed_layers(family, model_type)
    stated = {key: level.pop(key) for key in lists if key in level}
    want = plan_of(family, config)
    found: dict[str, Any] = {}
    for key, value in lists.items():
        level[key] = value
        if odd := plan_differences(want, plan_of(family, config)):
            found[key] = odd
        del level[key]
    level.update(stated)
    for key, leaf in (("layer_types", "type"), ("mlp_layer_types", "mlp")):
        value = getattr(CONFIG_MAPPING[model_type]().get_text_config(), key, None)
        if not isinstance(value, list | tuple) or len(set(value)) == 1 or model_type in FORCED:
            continue
        turned = [value[-1], *value[:-1]]
        level[key] = list(value)
        before = [getattr(layer, leaf) for layer in resolve(family, config).layers]
        level[key] = turned
        after = [getattr(layer, leaf) for layer in resolve(family, config).layers]
        level[key] = list(value)
        if after != [before[-1], *before[:-1]]:
            found[f"{key} turned"] = (before[:8], after[:8])
    return found
