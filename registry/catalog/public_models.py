"""The whole-model configs in models.yaml, for benchmarks."""

from __future__ import annotations

from functools import lru_cache
from importlib.resources import files
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field

from mlx_experts.registry.catalog.yaml_reader import LOADER
from mlx_experts.registry.errors import SettingError

_LAYERS = "num_hidden_layers"


class ModelStorage(BaseModel):
    """How a checkpoint's matrices are commonly kept."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    mode: Literal["affine", "mxfp4", "mxfp8", "nvfp4", "plain"] = Field(
        "affine", description="Storage format."
    )
    bits: int = Field(4, description="Bits a weight; of no meaning when plain.")
    group_size: int = Field(64, description="Weights that share a scale.")
    experts_only: bool = Field(False, description="Whether everything but the experts stays plain.")


class PublicModel(BaseModel):
    """One family's whole model as a public checkpoint has it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    family: str = Field(description="Family name.")
    checkpoint: str = Field(description="Where the numbers come from.")
    config: dict[str, Any] = Field(description="What config.json holds.")
    storage: ModelStorage = Field(ModelStorage(), description="How it is commonly kept.")

    def config_with(self, layers: int | None = None, vocab: int | None = None) -> dict[str, Any]:
        """The config with fewer layers and another vocabulary; lists of one entry a layer are cut with it.

        Raises:
            SettingError: more layers are asked for than the model has.
        """
        config = dict(self.config)
        count = config[_LAYERS]
        if layers is not None:
            if layers > count:
                raise SettingError(
                    "The model has fewer layers.",
                    where="--layers",
                    expected=f"at most {count}",
                    found=str(layers),
                )
            config = {
                key: value[:layers] if isinstance(value, list) and len(value) == count else value
                for key, value in config.items()
            }
            config[_LAYERS] = layers
        if vocab is not None:
            config["vocab_size"] = vocab
        return config


class _File(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    models: tuple[PublicModel, ...]


@lru_cache(maxsize=1)
def models() -> tuple[PublicModel, ...]:
    """Every model, in the order of the file."""
    text = (files("mlx_experts.registry.catalog") / "models.yaml").read_text(encoding="utf-8")
    return _File.model_validate(yaml.load(text, Loader=LOADER)).models


def public_model(family: str) -> PublicModel:
    """A family's whole model.

    Raises:
        SettingError: none is known.
    """
    known = {m.family: m for m in models()}
    if family not in known:
        raise SettingError(
            "No whole-model config is known for this family.",
            where="registry/catalog/models.yaml",
            expected=", ".join(known),
            found=family,
        )
    return known[family]
