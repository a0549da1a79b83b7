"""A plan: one model with every reference read and every layer listed, which the engine builds from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mlx_experts.registry.catalog.config_view import ConfigView
from mlx_experts.registry.spec.checkpoint import CheckpointSpec
from mlx_experts.registry.spec.family import (
    BlockSpec,
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
from mlx_experts.registry.spec.rope_plan import RopePlan


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
    mlp: Literal["moe", "dense", "none"]
    moe: MoeSpec | None
    dense: DenseSpec | None
    block: BlockSpec

    @property
    def rope(self) -> RopePlan | None:
        """The mixer's rotation."""
        return self.mixer.rope if self.mixer is not None else None


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
