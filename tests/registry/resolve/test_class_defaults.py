"""A config that leaves keys out means what the config class of the installed transformers gives."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from class_plans import (
    NEED_A_LIST,
    NOT_WHOLE,
    class_config,
    class_types,
    missed_aliases,
    missed_defaults,
    missed_lists,
    missed_settings,
    missed_single_defaults,
    plan_values,
    settings,
)

from mlx_experts.engine.models.known_families import catalog
from mlx_experts.registry.errors import ConfigError
from mlx_experts.registry.resolve.planner import resolve

ROOT = Path(__file__).parent.parent.parent.parent
PAIRS = [(name, kind) for name in catalog().names() for kind in class_types(catalog().load(name))]


@pytest.mark.report("C16")
@pytest.mark.parametrize(("name", "model_type"), PAIRS)
def test_a_config_of_nothing_but_its_type_means_the_classs_defaults(name: str, model_type: str) -> None:
    family = catalog().load(name)
    if model_type in NOT_WHOLE:
        with pytest.raises(ConfigError):
            plan_values(family, class_config(model_type))
        return
    if model_type in NEED_A_LIST:
        with pytest.raises(ConfigError, match="layer"):
            plan_values(family, {"model_type": model_type})
    assert missed_defaults(family, model_type) == {}


@pytest.mark.report("C16")
@pytest.mark.parametrize(("name", "model_type"), PAIRS)
def test_each_key_that_is_left_out_alone_means_the_classs_default(name: str, model_type: str) -> None:
    if model_type not in NOT_WHOLE:
        assert missed_single_defaults(catalog().load(name), model_type) == {}


@pytest.mark.report("C16")
@pytest.mark.parametrize(("name", "model_type"), PAIRS)
def test_another_name_that_the_class_takes_for_a_key_means_that_key(name: str, model_type: str) -> None:
    assert missed_aliases(catalog().load(name), model_type) == {}


@pytest.mark.report("C16")
@pytest.mark.parametrize(("name", "model_type"), [pair for pair in PAIRS if pair[1] in settings()])
def test_settings_of_older_files_mean_what_the_class_makes_of_them(name: str, model_type: str) -> None:
    assert missed_settings(catalog().load(name), model_type) == {}


def test_every_older_setting_is_of_a_class_that_a_family_is_compared_with() -> None:
    assert set(settings()) <= {model_type for _, model_type in PAIRS}


@pytest.mark.report("C16")
@pytest.mark.parametrize(("name", "model_type"), PAIRS)
def test_a_list_of_layers_that_the_class_works_out_means_what_its_absence_means(
    name: str, model_type: str
) -> None:
    if model_type not in NOT_WHOLE:
        assert missed_lists(catalog().load(name), model_type) == {}


def test_the_table_of_class_defaults_is_what_the_installed_transformers_gives() -> None:
    script = [sys.executable, str(ROOT / "scripts" / "class_defaults.py"), "--check"]
    done = subprocess.run(script, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_layers_whose_numbers_are_padded_with_zeros_are_found() -> None:
    config = class_config("gemma4_text")
    assert "05" in config["per_layer_config"]
    layers = resolve(catalog().load("gemma4_text"), config).layers
    assert [layers[i].mixer.head_dim for i in (4, 5, 11)] == [256, 512, 512]
