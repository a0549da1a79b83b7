"""A plan: one model with every reference read and every layer listed, which the engine builds from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from mlx_experts.registry.catalog.config_view import ConfigView
from mlx_experts.registry.errors import ConfigError
from mlx_experts.registry.spec.checkpoint import CheckpointSpec
from mlx_experts.registry.spec.family import (
    DenseSpec,
    EmbeddingSpec,
    Family,
    GqaSpec,
    HeadSpec,
    MoeSpec,
    NormSpec,
    PluginMixerSpec,
)
from mlx_experts.registry.spec.prediction import PredictionSpec

FLOAT32_LARGEST = 3.4e38
ROPE_PLACE = "rope_parameters or rope_scaling in config.json, or `rope` in the family file"
"""Where the parameters of a rotation may come from."""


@dataclass(frozen=True)
class RopePlan:
    """Rotary parameters of one layer.

    Args:
        style: which pairs rotate together.
        theta: base of the frequencies.
        type: rope type, `default` for none.
        partial: rotated share of the head; `dims` overrides it.
        params: parameters of the rope type, as config.json names them.
        max_positions: longest context, or None.
    """

    style: Literal["half", "interleaved"]
    theta: float
    type: str
    partial: float
    dims: int | None
    params: dict[str, Any]
    max_positions: int | None

    def width(self, head_dim: int) -> int:
        """Rotated width of a head."""
        return self.dims if self.dims is not None else int(head_dim * self.partial)

    def number(self, name: str, default: float | None = None) -> float:
        """A parameter of the rope type that is a positive number.

        Args:
            default: what absence and 0 stand for; None where the type needs the parameter.

        Raises:
            ConfigError: it is no such number, or is needed and absent.
        """
        value = self.params.get(name)
        if not value and default is not None:
            return default
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= FLOAT32_LARGEST:
            return float(value)
        raise ConfigError(
            f"rope type '{self.type}' needs a positive number '{name}'",
            where=ROPE_PLACE,
            found="none" if value is None else repr(value)[:80],
        )

    def numbers(self, name: str, count: int) -> list[float]:
        """A parameter of the rope type that is a list of ``count`` numbers.

        Raises:
            ConfigError: it is not.
        """
        value = self.params.get(name)
        found = repr(value)[:80]
        if isinstance(value, list):
            if len(value) == count and all(type(each) in (int, float) for each in value):
                return [float(each) for each in value]
            found = found if len(value) == count else f"{len(value)} entries"
        raise ConfigError(
            f"rope type '{self.type}' needs '{name}' with one number for each rotated pair",
            where=ROPE_PLACE,
            expected=f"{count} entries",
            found=found,
        )


@dataclass(frozen=True)
class Sizes:
    """The sizes of one layer, all known."""

    hidden_size: int
    num_layers: int
    vocab_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dense_width: int | None
    norm_eps: float
    max_positions: int | None
    num_experts: int
    top_k: int
    expert_width: int


@dataclass(frozen=True)
class LayerPlan:
    """One decoder layer: its type, its mixer and its MLP."""

    index: int
    type: str
    sizes: Sizes
    mixer: GqaSpec | PluginMixerSpec | None
    rope: RopePlan | None
    mlp: Literal["moe", "dense", "none"]
    moe: MoeSpec | None
    dense: DenseSpec | None
    residual_multiplier: float
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Plan:
    """A whole model, ready to build.

    Args:
        checkpoint: what its checkpoints may look like, every path written out.
        prediction: how the last of the layers predicts; None where all of them are decoder layers.
    """

    family: Family
    sizes: Sizes
    norm: NormSpec
    embedding: EmbeddingSpec
    head: HeadSpec
    layers: tuple[LayerPlan, ...]
    checkpoint: CheckpointSpec
    config: ConfigView
    prediction: PredictionSpec | None = None

    @property
    def decoder_layers(self) -> int:
        """How many layers a forward pass goes through."""
        return len(self.layers) - (self.prediction is not None)

    @property
    def moe_layers(self) -> list[int]:
        """Indices of the layers with experts."""
        return [layer.index for layer in self.layers if layer.mlp == "moe"]
