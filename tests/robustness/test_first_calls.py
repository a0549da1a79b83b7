"""What cannot be computed is refused by name, not by the first call's own error."""

from __future__ import annotations

import copy
from pathlib import Path

import mlx.core as mx
import pytest
import yaml

from mlx_experts.engine.models.known_families import catalog
from mlx_experts.engine.tools.family_check import build_tiny
from mlx_experts.registry.catalog.catalog import Catalog
from mlx_experts.registry.errors import ConfigError, SpecError
from mlx_experts.registry.resolve.tiny_config import tiny_config


def test_a_gate_for_each_head_needs_a_projection_of_its_own(tmp_path: Path) -> None:
    stated = {"family": "mine", "architectures": ["Mine"], "reference": "r", "extends": "step3p5"}
    stated["attention"] = {"gate": {"path": None}}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(stated, sort_keys=False))
    family = Catalog([tmp_path]).load("mine")
    with pytest.raises(SpecError, match="is packed with the queries"):
        build_tiny(family, tiny_config(family))


def test_a_layer_whose_keys_nobody_keeps_is_refused() -> None:
    family = catalog().load("mistral_large4")
    config = copy.deepcopy(tiny_config(family))
    config["text_config"].pop("no_rope_layers", None)
    model = build_tiny(family, config)
    with pytest.raises(ConfigError, match="takes its keys from an earlier one"):
        mx.eval(model(mx.array([[1, 2, 3]])))


def test_learned_frequencies_of_another_width_are_refused() -> None:
    family = catalog().load("mistral_large4")
    options = {**family.attention.options, "rope_dim": 8}
    changed = family.model_copy(
        update={"attention": family.attention.model_copy(update={"options": options})}
    )
    with pytest.raises(ConfigError, match="learned frequencies do not fit"):
        build_tiny(changed, tiny_config(changed))


def test_learned_frequencies_where_no_layer_turns_are_refused() -> None:
    family = catalog().load("mistral_large4")
    changed = family.model_copy(update={"attention": family.attention.model_copy(update={"rope": None})})
    with pytest.raises(SpecError, match="no layer turns"):
        build_tiny(changed, tiny_config(changed))
