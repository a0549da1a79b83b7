"""The whole-model configs: read, cut and refused."""

import pytest

from mlx_experts.registry.catalog.public_models import models, public_model
from mlx_experts.registry.errors import SettingError


def test_fewer_layers_cut_what_has_an_entry_for_each():
    config = public_model("gpt_oss").config_with(layers=3, vocab=99)
    assert config["num_hidden_layers"] == 3
    assert config["layer_types"] == ["sliding_attention", "full_attention", "sliding_attention"]
    assert config["vocab_size"] == 99
    assert len(public_model("gpt_oss").config["layer_types"]) == 24


def test_every_family_stands_once_and_names_itself():
    names = [model.family for model in models()]
    assert len(names) == len(set(names))
    assert all(model.config["model_type"] == model.family for model in models())


def test_more_layers_than_there_are_and_an_unknown_family_are_refused():
    with pytest.raises(SettingError, match="fewer layers"):
        public_model("olmoe").config_with(layers=17)
    with pytest.raises(SettingError, match="No whole-model config"):
        public_model("nonesuch")
