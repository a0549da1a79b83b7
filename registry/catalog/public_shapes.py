"""The public expert shapes in shapes.yaml, for benchmarks."""

from __future__ import annotations

from functools import lru_cache
from importlib.resources import files

import yaml
from pydantic import BaseModel, ConfigDict, Field

from mlx_experts.registry.catalog.yaml_reader import LOADER
from mlx_experts.registry.errors import SettingError


class Shape(BaseModel):
    """One family's expert shape as a public checkpoint has it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    family: str = Field(description="Family name.")
    checkpoint: str = Field(description="Where the numbers come from.")
    hidden: int = Field(gt=0, description="Width that the experts read and write.")
    width: int = Field(gt=0, description="Expert width.")
    experts: int = Field(gt=0, description="Experts in a layer.")
    top_k: int = Field(gt=0, description="Experts a token.")
    activation: str = Field("swiglu", description="Expert activation.")
    alpha: float = Field(1.0, description="Slope inside the activation's sigmoid.")
    limit: float = Field(0.0, description="The activation's clamp bound; 0 for none.")
    bias: bool = Field(False, description="Whether the projections have biases.")


class _File(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    shapes: tuple[Shape, ...]


@lru_cache(maxsize=1)
def shapes() -> tuple[Shape, ...]:
    """Every shape, by family name."""
    text = (files("mlx_experts.registry.catalog") / "shapes.yaml").read_text(encoding="utf-8")
    return _File.model_validate(yaml.load(text, Loader=LOADER)).shapes


def select(families: list[str]) -> list[Shape]:
    """The shapes of these families, all of them when none is named.

    Raises:
        SettingError: a family has no shape here.
    """
    known = {s.family: s for s in shapes()}
    for family in families:
        if family not in known:
            raise SettingError(
                "No public expert shape is known for this family.",
                where="registry/shapes.yaml",
                expected=", ".join(known),
                found=family,
            )
    return [known[f] for f in families] if families else list(known.values())
