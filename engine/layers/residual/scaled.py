"""One residual stream with factors: fixed ones by depth, or learned ones for each channel.

Legend: B batch, L tokens, D model width.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn
from pydantic import Field

from mlx_experts.engine.layers.residual.base import Branch, ResidualForm, Site
from mlx_experts.registry.resolve.planner import LayerPlan, Plan
from mlx_experts.registry.spec.values import ModulePath, Spec


class DepthOptions(Spec):
    """Options of a residual that is scaled by depth."""

    kind: Literal["depth"] = Field(description="The n-th sum is `h / sqrt(n) + r * sqrt((n - 1) / n)`.")


class AffineOptions(Spec):
    """Options of a residual with learned factors and offsets."""

    kind: Literal["affine"] = Field(description="`(h + b) * s + (r + c) * t`, each one vector.")
    mixer: ModulePath = Field(description="Module of the vectors behind the mixer, in the layer.")
    mlp: ModulePath = Field(description="Module of the vectors behind the MLP, in the layer.")
    begin_scale: ModulePath = Field(description="Leaf of the factors on the embedding, in the decoder.")
    begin_bias: ModulePath = Field(description="Leaf of what is added to the embedding before.")


class DepthSite(Site):
    """The n-th sum of a model, which keeps the variance of the stream as it is.

    The source is transformers' ``models/beam/modeling_beam.py`` (depth_scaled_residual_add).
    """

    def __init__(self, n: int) -> None:
        super().__init__()
        self._branch, self._stream = 1.0 / math.sqrt(n), math.sqrt((n - 1) / n)

    def read(self, stream: mx.array) -> tuple[mx.array, Any]:
        """The stream itself."""
        return stream, None

    def write(self, stream: mx.array, kept: Any, branch: mx.array) -> mx.array:
        """Both, scaled, added."""
        return branch * self._branch + stream * self._stream


class Depth(ResidualForm):
    """A sum that weighs later branches less.

    Args:
        spec: the form's options.
        plan: the model's plan.
    """

    def __init__(self, spec: DepthOptions, plan: Plan) -> None:
        self.spec = spec

    def end(self, decoder: nn.Module, stream: mx.array) -> mx.array:
        """The stream itself."""
        return stream

    def site(self, layer: LayerPlan, branch: Branch) -> tuple[str, Site]:
        """The sum behind a branch; the embedding counts as the first."""
        return f"{branch}_sum", DepthSite(2 * layer.index + (2 if branch == "mixer" else 3))


class AffineSite(Site):
    """Learned factors and offsets on branch and stream, the stream in float32.

    The source is transformers' ``models/zaya/modeling_zaya.py`` (ResidualScaling).
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.hidden_states_scale, self.hidden_states_bias = mx.ones((width,)), mx.zeros((width,))
        self.residual_scale, self.residual_bias = mx.ones((width,)), mx.zeros((width,))

    def read(self, stream: mx.array) -> tuple[mx.array, Any]:
        """The stream in the type of the weights."""
        return stream.astype(self.residual_scale.dtype), None

    def write(self, stream: mx.array, kept: Any, branch: mx.array) -> mx.array:
        """Both, scaled, added, in float32."""
        branch = (branch + self.hidden_states_bias) * self.hidden_states_scale
        return (stream + self.residual_bias) * self.residual_scale + branch


class Affine(ResidualForm):
    """One stream in float32 whose sums have learned factors and offsets.

    Args:
        spec: the form's options.
        plan: the model's plan.
    """

    def __init__(self, spec: AffineOptions, plan: Plan) -> None:
        self.spec, self.width = spec, plan.sizes.hidden_size

    def build(self, decoder: nn.Module) -> None:
        """Place the vectors on the embedding."""
        decoder[self.spec.begin_scale] = mx.ones((self.width,))
        decoder[self.spec.begin_bias] = mx.zeros((self.width,))

    def begin(self, decoder: nn.Module, h: mx.array) -> mx.array:
        """Embeddings [B, L, D] with offset and factor, in float32."""
        scaled = (h + decoder[self.spec.begin_bias]) * decoder[self.spec.begin_scale]
        return scaled.astype(mx.float32)

    def end(self, decoder: nn.Module, stream: mx.array) -> mx.array:
        """The stream in the type of the weights."""
        return stream.astype(decoder[self.spec.begin_scale].dtype)

    def site(self, layer: LayerPlan, branch: Branch) -> tuple[str, Site]:
        """The vectors behind a branch."""
        return self.spec.mixer if branch == "mixer" else self.spec.mlp, AffineSite(self.width)


class PlainOptions(Spec):
    """Options of the standard residual."""

    kind: Literal["plain"] = Field(description="The branch is added to the stream.")


class PlainSite(Site):
    """The standard sum."""

    def read(self, stream: mx.array) -> tuple[mx.array, Any]:
        """The stream itself."""
        return stream, None

    def write(self, stream: mx.array, kept: Any, branch: mx.array) -> mx.array:
        """Both added."""
        return stream + branch


class Plain(ResidualForm):
    """The standard residual, for layers that need something else around it.

    Args:
        spec: the form's options.
        plan: the model's plan.
    """

    def __init__(self, spec: PlainOptions, plan: Plan) -> None:
        self.spec = spec

    def end(self, decoder: nn.Module, stream: mx.array) -> mx.array:
        """The stream itself."""
        return stream

    def site(self, layer: LayerPlan, branch: Branch) -> tuple[str, Site]:
        """The sum behind a branch."""
        return f"{branch}_sum", PlainSite()
