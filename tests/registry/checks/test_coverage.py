"""Configurations of transformers with experts are found by their classes, inner text models included."""

from __future__ import annotations

import shutil
from pathlib import Path

from mlx_experts.registry.catalog.catalog import Catalog
from mlx_experts.registry.checks.coverage import coverage, transformers_families

SOURCES = {
    "moe": """
class BirchTextConfig(PreTrainedConfig):
    model_type = "birch_text"
    num_experts: int = 8

class BirchConfig(BirchTextConfig):
    model_type = "birch"
""",
    "speech": """
class SpeechConfig(PreTrainedConfig):
    model_type = "birch_speech_lm"
    sub_configs_defaults = {
        "audio_config": SubConfigSpec(config_class=AutoConfig, model_type="whistle"),
        "text_config": SubConfigSpec(config_class=AutoConfig, model_type="birch"),
    }
    text_config: dict | None = None
""",
    "image": """
class ImageConfig(PreTrainedConfig):
    model_type: str = "birch_image"
    sub_configs = {"text_config": BirchTextConfig}
""",
    "outer": """
class OuterConfig(PreTrainedConfig):
    model_type = "birch_outer"
    sub_configs_defaults = {"thinker_config": SubConfigSpec(config_class=SpeechConfig)}
""",
    "tower": """
class TowerConfig(PreTrainedConfig):
    model_type = "oak"
    sub_configs_defaults = {
        "vision_config": SubConfigSpec(config_class=AutoConfig, model_type="birch"),
        "text_config": SubConfigSpec(config_class=AutoConfig, model_type="llama"),
    }
""",
    "dense": """
class LlamaConfig(PreTrainedConfig):
    model_type = "llama"
    hidden_size: int = 8
""",
}


def test_a_text_model_with_experts_makes_its_wrapper_one(tmp_path: Path) -> None:
    for name, text in SOURCES.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / f"configuration_{name}.py").write_text(text)
    found = {item.model_type: item.file for item in transformers_families(tmp_path)}
    assert found == {
        "birch": "moe/configuration_moe.py",
        "birch_speech_lm": "speech/configuration_speech.py",
        "birch_image": "image/configuration_image.py",
        "birch_outer": "outer/configuration_outer.py",
    }


def test_a_wrapper_that_no_family_describes_is_told(tmp_path: Path) -> None:
    whole = Catalog()
    for name in whole.names():
        if name != "nemo_speechlm":
            shutil.copy(whole.path(name), tmp_path)
    known = transformers_families()
    assert not coverage(whole, known).unknown
    (missed,) = coverage(Catalog(bundled=tmp_path), known).unknown
    assert (missed.model_type, missed.source) == ("nemo_speechlm", "transformers")
