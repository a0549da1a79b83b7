"""A decoder layer whose residual has a form of its own, with what may stand between branches and stream.

Legend: B batch, L tokens, D model width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import ArraysCache, CacheList
from pydantic import Field

from mlx_experts.engine.layers.conv import ResidualConv
from mlx_experts.engine.layers.forward_context import ForwardState
from mlx_experts.engine.layers.module_tree import find, place
from mlx_experts.engine.layers.options import read_options
from mlx_experts.engine.layers.residual.base import Branch, ResidualForm
from mlx_experts.engine.layers.residual.blocks import BlockAttention, BlocksOptions
from mlx_experts.engine.layers.residual.gated import Gated, GatedOptions
from mlx_experts.engine.layers.residual.hyper import Hyper, HyperOptions
from mlx_experts.engine.layers.residual.scaled import (
    Affine,
    AffineOptions,
    Depth,
    DepthOptions,
    Plain,
    PlainOptions,
)
from mlx_experts.engine.layers.routers.stateful_moe import StatefulMoE
from mlx_experts.engine.models.decoder import DecoderLayer
from mlx_experts.plugins.hookspecs import hookimpl
from mlx_experts.plugins.manager import components
from mlx_experts.registry.errors import SpecError
from mlx_experts.registry.resolve.planner import LayerPlan, Plan
from mlx_experts.registry.spec.values import Count, ModulePath, Options, Spec, Width

_FORMS: dict[str, Any] = {
    "plain": Plain,
    "depth": Depth,
    "affine": Affine,
    "hyper": Hyper,
    "gated": Gated,
    "blocks": BlockAttention,
}

_BRANCHES: tuple[Branch, Branch] = ("mixer", "mlp")


class BranchConvSpec(Spec):
    """Short convolutions, each with a sum of its own, behind both branches."""

    mixer: ModulePath = Field(description="Module behind the mixer, in the layer.")
    mlp: ModulePath = Field(description="Module behind the MLP, in the layer.")
    kernel: Width = Field(description="Width of the convolutions.")
    scaled: bool = Field(False, description="The sums are divided by the root of their terms.")


class NormGateSpec(Spec):
    """A gate on the output of the norm before the mixer, and before the MLP of layers with experts."""

    rank: Width = Field(description="Width that the gate goes through.")


class GatedRMSNorm(nn.Module):
    """RMSNorm times the sigmoid of a narrow MLP of it, after transformers' ``models/axk2``.

    Args:
        norm: the norm.
        width: D.
        rank: width of the MLP.
    """

    def __init__(self, norm: nn.Module, width: int, rank: int) -> None:
        super().__init__()
        self.norm = norm
        place(self, "mlp.fc1", nn.Linear(width, rank, bias=False))
        place(self, "mlp.fc2", nn.Linear(rank, width, bias=False))

    def __call__(self, x: mx.array) -> mx.array:
        """``x`` [..., D] to [..., D]."""
        y = self.norm(x)
        gate = self.mlp.fc2(nn.silu(self.mlp.fc1(y))).astype(mx.float32)
        return (y * mx.sigmoid(gate)).astype(y.dtype)


class InjectionSpec(Spec):
    """A module that adds to the stream before the first branch of some layers."""

    kind: str = Field(description="The name under which a plugin offers it.")
    path: ModulePath = Field(description="Module path in the layer.")
    layers: list[Count] = Field(description="Indices of the layers that have it.")
    base: Count = Field(0, description="Index of the first layer in that list.")
    options: Options = Field({}, description="Options of the module.")


class ResidualOptions(Spec):
    """Options of the decoder layer `residual`."""

    residual: Annotated[
        PlainOptions | DepthOptions | AffineOptions | HyperOptions | GatedOptions | BlocksOptions,
        Field(discriminator="kind"),
    ] = Field(description="The residual form.")
    convolutions: BranchConvSpec | None = Field(None, description="Short convolutions behind both branches.")
    norm_gate: NormGateSpec | None = Field(None, description="A gate on the norms before the branches.")
    inject: InjectionSpec | None = Field(None, description="What is added to the stream of some layers.")


def _as_it_is(x: Any) -> Any:
    return x


def form_of(plan: Plan) -> ResidualForm:
    """The residual form that a plan's first layer states."""
    spec = _options(plan.layers[0]).residual
    form: ResidualForm = _FORMS[spec.kind](spec, plan)
    return form


def _options(layer: LayerPlan) -> ResidualOptions:
    return read_options(ResidualOptions, layer.block.options, "a layer with a residual form")


class ResidualLayer(DecoderLayer):
    """``x = read(s); s = write(s, post(mixer(pre(x))))``, and the same around the MLP.

    Args:
        layer: the layer's plan; the block's options are :class:`ResidualOptions`.
        plan: the model's plan.
        fused: passed to the MoE block.

    Raises:
        SpecError: the layer lacks a mixer or an MLP, or its mixer does not take what the form reads.
    """

    sends_state = True

    def __init__(self, layer: LayerPlan, plan: Plan, fused: bool | None) -> None:
        super().__init__(layer, plan, fused)
        self.demand(layer, plan, "mixer", "mlp")
        options, form = _options(layer), form_of(plan)
        self._passes = form.passes(layer.index)
        paths = []
        for branch in _BRANCHES:
            path, site = form.site(layer, branch)
            if site.inputs > 1:
                self._check_apart(plan)
            place(self, path, site)
            paths.append(path)
        self._site_paths = tuple(paths)
        convs, width = options.convolutions, layer.sizes.hidden_size
        self._convs = (convs.mixer, convs.mlp) if convs is not None else None
        if convs is not None:
            for path in (convs.mixer, convs.mlp):
                place(self, path, ResidualConv(width, convs.kernel, convs.scaled))
        if options.norm_gate is not None:
            gated = [self._block.pre_mixer, self._block.pre_mlp if layer.mlp == "moe" else None]
            for name in gated:
                if name is not None:
                    above, _, leaf = name.rpartition(".")
                    holder = find(self, above)
                    holder[leaf] = GatedRMSNorm(holder[leaf], width, options.norm_gate.rank)
        inject = options.inject
        wanted = inject is not None and layer.index + inject.base in inject.layers
        self._inject = inject.path if inject is not None and wanted else None
        if inject is not None and wanted:
            place(self, inject.path, components().injection(inject.kind)(layer=layer, plan=plan, spec=inject))

    def bind(self) -> Callable[[Any, ForwardState, Any], Any]:
        """The call as one function of the stream, the forward state and the layer's cache."""
        parts, sites = self.parts(), [find(self, path) for path in self._site_paths]
        convs = [find(self, path) for path in self._convs or ()]
        inject = find(self, self._inject) if self._inject is not None else None
        mixer, feed = parts.mixer, parts.feed
        assert mixer is not None
        assert feed is not None
        before = [parts.pre_mixer or _as_it_is, parts.pre_mlp or _as_it_is]
        after = [parts.post_mixer or _as_it_is, parts.post_mlp or _as_it_is]
        sends = isinstance(find(self, self._mlp_path or ""), StatefulMoE)

        def run(stream: Any, state: ForwardState, cache: Any) -> Any:
            mixer_cache, conv_cache, inject_cache = self._parts(cache)
            if inject is not None:
                stream = stream + inject(stream, state, inject_cache)
            for slot, site in enumerate(sites):
                x, kept = site.read(stream)
                x = before[slot](x)
                if slot == 0:
                    branch = mixer(x, state, mixer_cache)
                else:
                    branch = feed(x, state=state) if sends else feed(x)
                branch = after[slot](branch)
                if convs:
                    mask = state.recurrent_mask(branch, conv_cache)
                    branch = convs[slot](branch, mask, conv_cache, slot)
                stream = site.write(stream, kept, branch)
            if conv_cache is not None:
                conv_cache.advance(state.inputs.shape[1])
            return stream

        return run

    def _check_apart(self, plan: Plan) -> None:
        parts = self.parts()
        wrong = "a norm before it" if parts.pre_mixer is not None else type(parts.mixer).__name__
        if parts.pre_mixer is not None or not parts.mixer.takes_three:
            raise SpecError(
                "the inputs of queries, keys and values come apart, and the mixer does not take them so",
                where=f"{plan.family.family}.yaml, block",
                expected="`pre_mixer: null`, and attention that takes three inputs (`kind: relative`)",
                found=wrong,
            )

    def _parts(self, cache: Any) -> tuple[Any, Any, Any]:
        """The caches of the mixer, of the convolutions and of what is injected."""
        if cache is None:
            return None, None, None
        if self._convs is None and self._inject is None:
            return cache, None, None
        return cache[0], cache[1] if self._convs is not None else None, cache[-1] if self._inject else None

    def make_cache(self) -> Any:
        """The mixer's cache, and those of convolutions and injections; a set for each pass."""
        made = [self._made() for _ in range(self._passes)]
        return made[0] if len(made) == 1 else CacheList(*made)

    def _made(self) -> Any:
        parts = [find(self, self._mixer_path or "").make_cache()]
        if self._convs is not None:
            parts.append(ArraysCache(size=2))
        if self._inject is not None:
            parts.append(find(self, self._inject).make_cache())
        return parts[0] if len(parts) == 1 else CacheList(*parts)


@hookimpl
def register_frames() -> dict[str, Any]:
    """What the residual form has around the layers."""
    return {"residual": form_of}


@hookimpl
def register_blocks() -> dict[str, Any]:
    """The decoder layer `residual`."""
    return {"residual": ResidualLayer}
