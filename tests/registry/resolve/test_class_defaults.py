"""A config that leaves keys out means what the config class of the installed transformers gives."""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

from mlx_experts.engine.models.known_families import catalog
from mlx_experts.registry.errors import ConfigError
from mlx_experts.registry.resolve.planner import resolve

ROOT = Path(__file__).parent.parent.parent.parent
NO_NUMBER = "the class gives no number of experts or picks: a dense model"
NO_HEAD = "the class's width is no multiple of its heads"
BY_CODE = "the class works the list of layers out in code"
# Classes whose own defaults are no Mixture-of-Experts model that can be built.
NOT_WHOLE = {
    "bailing_hybrid": NO_NUMBER,
    "deepseek_v2": NO_NUMBER,
    "dots1": NO_NUMBER,
    "mistral3": NO_NUMBER,
    "glm4_moe": NO_HEAD,
    "glm4v_moe": NO_HEAD,
    "glm4v_moe_text": NO_HEAD,
    "qwen3_omni_moe_text": NO_HEAD,
    "qwen3_omni_moe": NO_HEAD,
    "qwen3_omni_moe_thinker": NO_HEAD,
    "lfm2_moe": BY_CODE,
}
# Where families follow the files that are there and not what a class says of a key alone.
OTHERWISE = {
    ("ernie4_5_moe", "moe_intermediate_size"): "the authors' code falls back to intermediate_size",
    ("kimi_k25", "tie_word_embeddings"): "the text settings say it, as files before transformers 5 have it",
    (
        "qwen3_vl_moe",
        "tie_word_embeddings",
    ): "the text settings say it, as files before transformers 5 have it",
}
# Families whose keys that are left out are not yet held to their class: it makes lists or nested settings of
# them in code.
NOT_HELD = {
    "deepseek_ocr2",
    "deepseek_v4",
    "dots3_note",
    "hy_v4_vl",
    "mistral_large4",
    "qwen4_exp",
}
# Lists with one entry a layer, which no table can hold for every number of layers.
NEED_A_LIST = {"cohere2_moe", "flint", "mimo_v2_flash", "nemotron_h"}
# Said in another way, and the same model.
SAME = {
    "moe.layers[0].end": "the last layer, counted or -1",
    "mixer.options.index_types": "all layers alike",
    "mixer.heads": "the model's own number",
    "mixer.scale_width": "the width of a head",
    "mixer.options.head_dim": "`auto` is worked out by the mixer",
    "mixer.options.rank": "`auto` is worked out by the mixer",
    "mixer.options.step_limit[1]": "infinity, as a word",
}
PAIRS = [
    (name, model_type)
    for name in catalog().names()
    for model_type in catalog().load(name).model_types
    if model_type in CONFIG_MAPPING_NAMES
    and name not in NOT_HELD
    # transformers' class of this name is another family's.
    and (name, model_type) not in {("minimax_m2", "minimax"), ("bailing_moe_v3", "bailing_hybrid")}
]


def full(model_type: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(CONFIG_MAPPING[model_type]().to_json_string(use_diff=False))
    return config


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every literal of a plan by its path, without the family and the config."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            if field.name not in ("family", "config", "checkpoint"):
                yield from leaves(getattr(value, field.name), f"{path}.{field.name}")
    elif hasattr(value, "model_dump"):
        yield from leaves(value.model_dump(), path)
    elif isinstance(value, dict):
        for key, each in value.items():
            # What a rotation comes to stands beside its parameters.
            if key not in ("rope_theta", "rope_type", "type", "partial_rotary_factor"):
                yield from leaves(each, f"{path}.{key}")
    elif isinstance(value, list | tuple):
        for i, each in enumerate(value):
            yield from leaves(each, f"{path}[{i}]")
    elif not (isinstance(value, float) and math.isinf(value)):
        yield path, value


def plan(name: str, config: dict[str, Any]) -> dict[str, Any]:
    family = catalog().load(name)
    found = dict(leaves(resolve(family, {**config, "architectures": list(family.architectures[:1])})))
    return {
        path: value
        for path, value in found.items()
        if not any(path.partition("].")[2].startswith(same) for same in SAME)
        and not path.endswith(("max_position_embeddings", "llama_4_scaling_beta"))
    }


@pytest.mark.report("C16")
@pytest.mark.parametrize(("name", "model_type"), PAIRS)
def test_a_config_of_nothing_but_its_type_means_the_classs_defaults(name: str, model_type: str) -> None:
    config = full(model_type)
    if model_type in NOT_WHOLE:
        with pytest.raises(ConfigError):
            plan(name, config)
        return
    want = plan(name, config)
    forms: list[dict[str, Any]] = [{"model_type": model_type}]
    if "text_config" in config:
        forms.append({"model_type": model_type, "text_config": {}})
    for form in forms:
        if model_type in NEED_A_LIST:
            with pytest.raises(ConfigError, match="layer"):
                plan(name, form)
            continue
        got = plan(name, form)
        odd = {k: (want.get(k), got.get(k)) for k in {*want, *got} if want.get(k) != got.get(k)}
        if (name, "tie_word_embeddings") in OTHERWISE:
            odd.pop(".head.tied", None)
        assert odd == {}


@pytest.mark.report("C16")
@pytest.mark.parametrize(("name", "model_type"), PAIRS)
def test_each_key_that_is_left_out_alone_means_the_classs_default(name: str, model_type: str) -> None:
    config = full(model_type)
    if model_type in NOT_WHOLE:
        return
    want = plan(name, config)
    keys = [(config, key) for key in config]
    nested = config.get("text_config")
    keys += [(nested, key) for key in nested] if isinstance(nested, dict) else []
    for level, key in keys:
        # Rotations and lists of layers are settled as a whole.
        if key in ("model_type", "text_config", "rope_parameters") or isinstance(level[key], list):
            continue
        if level[key] is None or key == "architectures" or (name, key) in OTHERWISE:
            continue
        value = level.pop(key)
        got = plan(name, config)
        level[key] = value
        odd = {k: (want.get(k), got.get(k)) for k in {*want, *got} if want.get(k) != got.get(k)}
        assert odd == {}, key


def test_the_table_of_class_defaults_is_what_the_installed_transformers_gives() -> None:
    script = [sys.executable, str(ROOT / "scripts" / "class_defaults.py"), "--check"]
    done = subprocess.run(script, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_layers_whose_numbers_are_padded_with_zeros_are_found() -> None:
    config = full("gemma4_text")
    assert "05" in config["per_layer_config"]
    layers = resolve(catalog().load("gemma4_text"), config).layers
    assert [layers[i].mixer.head_dim for i in (4, 5, 11)] == [256, 512, 512]
