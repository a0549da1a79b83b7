"""The decoder that a plan describes, and the model object that mlx-lm's tools expect."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.nn.layers.distributed import (
    AllToShardedLinear,
    QuantizedAllToShardedLinear,
    QuantizedShardedToAllLinear,
    ShardedToAllLinear,
)

from mlx_experts.engine.dispatch import policy, tuning_cache
from mlx_experts.engine.dispatch.expert_dispatch import current_device
from mlx_experts.engine.kernels.request import Decline, Device
from mlx_experts.engine.layers.attention import Attention
from mlx_experts.engine.layers.base_mixer import Mixer
from mlx_experts.engine.layers.decode.layer_parts import LayerParts, as_it_is, branch, scaled, usual
from mlx_experts.engine.layers.decode.one_token import OneToken, norm_row, one_token
from mlx_experts.engine.layers.decode.output_head import OutputHead
from mlx_experts.engine.layers.decode.token_pieces import LayerOfPieces, TokenPieces
from mlx_experts.engine.layers.forward_context import ForwardState
from mlx_experts.engine.layers.linear import OnRow
from mlx_experts.engine.layers.mlp import MLP, activation_of
from mlx_experts.engine.layers.module_tree import find, look_up, make_norm, place
from mlx_experts.engine.layers.moe import MoE, make_shared
from mlx_experts.engine.layers.per_layer_inputs import LayerInputs
from mlx_experts.engine.layers.residual.base import ResidualForm
from mlx_experts.engine.layers.routers.stateful_moe import StatefulMoE, stateful_router
from mlx_experts.engine.layers.versioned import VersionedModule
from mlx_experts.engine.models.pipeline import Stage, plan_stages
from mlx_experts.engine.models.prediction import build_prediction
from mlx_experts.plugins.manager import components
from mlx_experts.registry.errors import ConfigError, SettingError, SpecError
from mlx_experts.registry.resolve.planner import LayerPlan, Plan
from mlx_experts.registry.spec.family import BlockSpec, GqaSpec


def make_mixer(layer: LayerPlan, plan: Plan, fused: bool | None = None) -> Mixer | None:
    """The mixer of a layer; a plugin's where the family names one; None for a layer without.

    Args:
        fused: True or False to force or forbid kernels of this package; None for the policy.
    """
    if layer.mixer is None:
        return None
    mixer: Mixer
    if isinstance(layer.mixer, GqaSpec):
        mixer = Attention(layer, plan)
    else:
        mixer = components().mixer(layer.mixer.kind)(layer=layer, plan=plan)
    mixer.fused = fused
    return mixer


def layer_path(layer: LayerPlan, plan: Plan) -> str:
    """Module path of a decoder layer."""
    names = plan.family.names
    wrapper = f"{names.wrapper}." if names.wrapper else ""
    return f"{wrapper}{names.root}.{names.layers}.{layer.index}"


def make_mlp(layer: LayerPlan, plan: Plan, fused: bool | None) -> nn.Module | None:
    """The MLP of a layer: experts, a dense MLP, or None."""
    if layer.mlp == "moe":
        assert layer.moe is not None
        name, router = f"{layer_path(layer, plan)}.{layer.moe.path}", stateful_router(layer)
        return MoE(layer, name, fused) if router is None else StatefulMoE(layer, name, fused, router)
    if layer.mlp == "dense":
        dense = layer.dense
        assert dense is not None
        return MLP(
            layer.sizes.hidden_size,
            dense.width if dense.width is not None else layer.sizes.dense_width or 0,
            activation_of(dense.activation, dense.kind == "glu"),
            bias=dense.bias,
            names=dense.names,
            scale=dense.scale,
        )
    return None


class DecoderLayer(VersionedModule):
    """``h = x + post(mixer(pre(x)))`` and ``h + post(mlp(pre(h)))``, with the norms that exist.

    Args:
        layer: the layer's plan.
        plan: the model's plan.
        fused: passed to the MoE block.
    """

    # Whether the MLP's branch is given the forward state.
    sends_state = False

    def __init__(self, layer: LayerPlan, plan: Plan, fused: bool | None) -> None:
        super().__init__()
        self._block, self._multiplier = layer.block, layer.block.residual_multiplier
        self._fused = fused
        sizes, block = layer.sizes, self._block
        mixer, mlp = make_mixer(layer, plan, fused), make_mlp(layer, plan, fused)
        if isinstance(mlp, StatefulMoE) and not self.sends_state:
            assert layer.moe is not None
            raise ConfigError(
                f"the block of layer {layer.index} does not tell its router what a call reads",
                where=f"{plan.family.family}.yaml, block",
                expected=f"`kind: residual` beside a router of kind '{layer.moe.router.kind}'",
                hint="give the block that kind, or take the standard router",
            )
        if block.parallel and (mixer is None or mlp is None):
            raise ConfigError(
                f"layer {layer.index} has parallel branches and lacks one",
                where=f"{plan.family.family}.yaml, block",
                expected="a mixer and an MLP in every layer",
                hint="give the layer's variant both, or leave out `parallel`",
            )
        self._mixer_path = self._mlp_path = self._shared_path = None
        if mixer is not None and layer.mixer is not None:
            self._mixer_path = layer.mixer.path
            place(self, layer.mixer.path, mixer)
        if mlp is not None:
            section = layer.moe or layer.dense
            assert section is not None
            if section.path == self._mixer_path:
                raise ConfigError(
                    f"layer {layer.index} has a mixer and an MLP in one place",
                    where=f"the family file, {section.path}",
                    expected="one of the two, by `variants` and `mlp_variants`",
                )
            self._mlp_path = section.path
            place(self, section.path, mlp)
        shared = layer.moe.shared if layer.moe is not None else None
        if shared is not None and shared.exists and shared.path.startswith("../"):
            self._shared_path = shared.path.removeprefix("../")
            place(self, self._shared_path, make_shared(shared, sizes.hidden_size))
        output_norm = layer.moe.output_norm if layer.moe is not None else None
        self._output_norm = f"{self._mlp_path}.{output_norm}" if output_norm is not None else None
        norms = [block.pre_mixer, block.post_mixer] if mixer is not None else []
        norms += [block.pre_mlp, block.post_mlp] if mlp is not None and not block.parallel else []
        self._norms = frozenset(name for name in norms if name is not None)
        for name in dict.fromkeys([*norms, self._output_norm]):
            if name is not None:
                eps = block.norm_eps if block.norm_eps is not None else sizes.norm_eps
                place(self, name, make_norm(plan.norm, sizes.hidden_size, eps))

    def __call__(self, x: mx.array, state: ForwardState, cache: Any = None) -> mx.array:
        """``x`` [B, L, D] to [B, L, D]."""
        version, run = self._bound.held
        if version != self._version.count:
            run = self.rebind()
        return run(x, state, cache)

    def one_token(self) -> OneToken | None:
        """The layer's call for one token in memory, where it has such a form."""
        run = self.steps()
        return run if isinstance(run, OneToken) else None

    def parts(self) -> LayerParts:
        """The parts of the layer as they are now."""
        block = self._block

        def at(path: str | None) -> Any:
            return None if path is None else find(self, path)

        pre_mixer, post_mixer, pre_mlp, post_mlp = (
            at(name) if name in self._norms else None for name in _norm_names(block)
        )
        return LayerParts(
            mixer=at(self._mixer_path),
            mlp=at(self._mlp_path),
            shared=at(self._shared_path),
            output_norm=at(self._output_norm),
            pre_mixer=pre_mixer,
            post_mixer=post_mixer,
            pre_mlp=pre_mlp,
            post_mlp=post_mlp,
            factor=self._multiplier,
        )

    def demand(self, layer: LayerPlan, plan: Plan, *names: str) -> None:
        """Refuse a layer that lacks parts which its kind reads, or has branches side by side.

        Args:
            names: of ``LayerParts``.

        Raises:
            SpecError: naming those that are missing.
        """
        refuse_parallel(layer, plan)
        parts = self.parts()
        if wrong := [f"no {name}" for name in names if getattr(parts, name) is None]:
            raise SpecError(
                f"a layer of the kind '{layer.block.kind}' lacks what that kind reads",
                where=f"{plan.family.family}.yaml, block, layer {layer.index}",
                expected=", ".join(names),
                found=", ".join(wrong),
            )

    @property
    def parallel(self) -> bool:
        """Whether both branches read one normed input."""
        return self._block.parallel

    def bind(self) -> Callable[[mx.array, ForwardState, Any], mx.array]:
        """The call as one function, with the branches and norms that the layer has."""
        parts, factor = self.parts(), self._multiplier
        mixer = parts.mixer
        feed = parts.feed if parts.mlp is not None else None
        if self._block.parallel and mixer is not None and feed is not None:
            pre = parts.pre_mixer or as_it_is

            def both(x: mx.array, state: ForwardState, cache: Any) -> mx.array:
                normed = pre(x)
                return x + scaled(mixer(normed, state, cache) + feed(normed), factor)

            return both
        if parts.usual:
            layerwise = usual(parts.pre_mixer, mixer, parts.pre_mlp, feed)
            assert feed is not None
            fused, feed_row = self._fused, parts.feed_row
            return one_token(parts.pre_mixer, mixer, parts.pre_mlp, feed, layerwise, fused, feed_row)
        mix = branch(parts.pre_mixer, mixer, parts.post_mixer, factor)
        add = branch(parts.pre_mlp, feed, parts.post_mlp, factor)
        if mixer is None:
            return lambda x, state, cache: add(x)
        return mix if feed is None else lambda x, state, cache: add(mix(x, state, cache))

    def make_cache(self) -> Any:
        """The mixer's cache, or None."""
        return find(self, self._mixer_path).make_cache() if self._mixer_path is not None else None


def refuse_parallel(layer: LayerPlan, plan: Plan) -> None:
    """Refuse branches side by side in a layer whose kind says how its branches are joined.

    Raises:
        SpecError: naming the kind.
    """
    if layer.block.parallel:
        raise SpecError(
            f"a layer of the kind '{layer.block.kind}' joins its branches in a way of its own",
            where=f"{plan.family.family}.yaml, block.parallel",
            expected="no `parallel` beside this kind",
            found="parallel: true",
            hint="leave out `parallel`, or take the standard kind",
        )


def _in_turn(
    steps: DecoderSteps, h: mx.array, state: ForwardState, caches: list[Any]
) -> tuple[mx.array, bool]:
    """Hidden states behind all layers, and whether the final norm is in them.

    A token stays in memory between two layers that take it so, and to the norm behind the last one.
    """
    row = None  # what the last layer left in memory
    token = h.size == h.shape[-1]
    for layer, cache in zip(steps.layers, caches, strict=True):
        form = layer.one_token() if token and type(layer) is DecoderLayer else None
        behind = None if form is None else form.on_row(h if row is None else row, cache)
        if behind is None:
            # Through the layer itself, as whoever watches its class counts on.
            h = layer(h if row is None else mx.array(row[None]), state, cache)
        row = behind
    if row is None:
        return h, False
    normed = None if steps.stage is not None or steps.norm_row is None else steps.norm_row(row)
    return mx.array((row if normed is None else normed)[None]), normed is not None


_SPREAD = (AllToShardedLinear, ShardedToAllLinear, QuantizedAllToShardedLinear, QuantizedShardedToAllLinear)


def _parts_of(layer: Any, device: Device) -> LayerParts | Decline:
    """What a layer calls, or why it runs as it is."""
    if type(layer) is not DecoderLayer:
        return Decline("block", "the standard layer", type(layer).__name__, "A plugin's layer runs as it is.")
    if any(isinstance(module, _SPREAD) for module in layer.modules()):
        return Decline("ranks", "one", "several", "Layers that are spread run as they are.")
    if layer.parallel:
        return Decline("block", "branches in turn", "parallel branches", "They run as they are.")
    parts = layer.parts()
    if isinstance(parts.mlp, MoE):
        asked = policy.resolve(device, parts.mlp.fused, tuned=tuning_cache.bound(device))
        if not asked.enabled:
            return Decline("switch", "on", "off", f"Set by {asked.switched_by}.")
    return parts


def _norm_names(block: BlockSpec) -> tuple[str | None, ...]:
    return block.pre_mixer, block.post_mixer, block.pre_mlp, block.post_mlp


def _source(layer: nn.Module) -> int | None:
    """The earliest layer whose keys or picks a layer reads, or None."""
    mixers = (each for each in layer.modules() if isinstance(each, Mixer))
    return min((each.source for each in mixers if each.source is not None), default=None)


class Decoder(VersionedModule):
    """Embedding, layers and final norm.

    Args:
        plan: the model's plan.
        fused: passed to the MoE blocks.
    """

    def __init__(self, plan: Plan, fused: bool | None) -> None:
        super().__init__()
        names, sizes = plan.family.names, plan.sizes
        self._names, self._plan, self._fused = names, plan, fused
        multiplier = plan.embedding.multiplier
        self._multiplier = math.sqrt(sizes.hidden_size) if multiplier == "sqrt_hidden" else multiplier
        self._custom_embedding = plan.embedding.kind != "standard"
        if self._custom_embedding:
            embedding = components().get("embedding", plan.embedding.kind)(plan=plan)
        else:
            embedding = nn.Embedding(sizes.vocab_size, sizes.hidden_size)
        place(self, names.embed, embedding)
        self._embed_norm = plan.embedding.norm
        if self._embed_norm is not None:
            place(self, self._embed_norm, make_norm(plan.norm, sizes.hidden_size, sizes.norm_eps))
        self._frequencies = names.frequencies
        if self._frequencies is not None:
            turned = next((layer.rope for layer in plan.layers if layer.rope is not None), None)
            if turned is None:
                raise SpecError(
                    "the decoder learns frequencies, and no layer turns",
                    where=f"{plan.family.family}.yaml, names.frequencies",
                    expected="a layer with `rope`",
                )
            place(self, self._frequencies, mx.zeros((turned.width(sizes.head_dim) // 2,)))
        extra = plan.embedding.layer_inputs
        self._layer_inputs = LayerInputs(plan) if extra is not None and extra.width else None
        if self._layer_inputs is not None:
            self._layer_inputs.build(self)
        kind = plan.family.block.kind
        make = DecoderLayer if kind == "standard" else components().block(kind)
        self._form: ResidualForm | None = components().frame(kind, plan)
        if self._form is not None:
            self._form.build(self)
        place(self, names.layers, [make(layer, plan, fused) for layer in plan.layers])
        if names.norm is not None:
            place(self, names.norm, make_norm(plan.norm, sizes.hidden_size, sizes.norm_eps))
        self._count = plan.decoder_layers
        if plan.prediction is not None:
            build_prediction(find(self, names.layers)[-1], plan)
        self._stage: Stage | None = None

    @property
    def layer_list(self) -> list[Any]:
        """The decoder layers that this rank runs."""
        layers: list[Any] = find(self, self._names.layers)[: self._count]
        return layers if self._stage is None else layers[self._stage.start :]

    @property
    def prediction_layer(self) -> Any:
        """The layer past the last one that guesses the token after the next, or None."""
        layers: list[Any] = find(self, self._names.layers)
        return layers[-1] if len(layers) > self._count else None

    pipeline_layers = layer_list

    def pipeline(self, group: mx.distributed.Group, split: Sequence[int] | None = None) -> None:
        """Keep this rank's layers, as mlx-lm's ``PipelineMixin.pipeline`` does; before they are evaluated.

        Args:
            group: the ranks; rank 0 runs the last layers.
            split: how many layers each rank runs, from rank 0; None for an even split.

        Raises:
            SettingError: layers that would be on different ranks read what others leave; nothing has changed.
        """
        if group.size() == 1:
            return
        if self._form is not None:
            raise SettingError(
                "layers with a residual form of their own cannot be spread by layers",
                found=type(self._form).__name__,
                hint="use tensor parallelism, which spreads every layer",
            )
        if self.prediction_layer is not None:
            raise SettingError(
                "a model with a prediction layer cannot be spread by layers",
                hint="load it without mtp, or use tensor parallelism",
            )
        layers = self.layer_list
        sources = [_source(layer) for layer in layers]
        counts = plan_stages(sources, [each.make_cache() is not None for each in layers], group.size(), split)
        start = sum(counts[group.rank() + 1 :])
        self._stage = Stage(group, start, start + counts[group.rank()])
        # The layers keep their numbers, by which parameters are named.
        above, _, leaf = self._names.layers.rpartition(".")
        holder = find(self, above) if above else self
        holder[leaf] = [None] * start + layers[start : self._stage.end]

    @property
    def start_idx(self) -> int:
        """The first layer of this rank."""
        return 0 if self._stage is None else self._stage.start

    @property
    def end_idx(self) -> int | None:
        """The layer after this rank's last one; None for a decoder that is whole."""
        return None if self._stage is None else self._stage.end

    def bind(self) -> DecoderSteps:
        """The embedding, the final norm, and the vector whose type the decoder computes in."""
        embed = find(self, self._names.embed)
        norm = None if self._names.norm is None else find(self, self._names.norm)
        vectors = [
            (holder, leaf)
            for _, holder in (self if norm is None else norm).named_modules()
            for leaf, value in holder.items()
            if isinstance(value, mx.array) and value.ndim == 1 and mx.issubdtype(value.dtype, mx.floating)
        ]
        vector = vectors[0] if vectors else None
        return DecoderSteps(embed, norm, norm_row(norm), self.layer_list, vector, self._stage)

    def __call__(
        self,
        inputs: mx.array,
        caches: list[Any],
        input_embeddings: mx.array | None = None,
        head: OutputHead | None = None,
    ) -> mx.array:
        """Token ids ``[B, L]`` to hidden states ``[B, L, D]``; with a head to its logits ``[B, L, V]``.

        Args:
            caches: as :meth:`make_caches` gives.
        """
        steps: DecoderSteps = self.steps()
        state = ForwardState(inputs, steps.dtype())
        if input_embeddings is not None:
            h = input_embeddings
        elif self._custom_embedding:
            h = steps.embed(inputs, state, caches[0])
        else:
            h = look_up(steps.embed, inputs, state.dtype)
        if self._embed_norm is not None:
            h = find(self, self._embed_norm)(h)
        if self._frequencies is not None:
            state.log_frequencies = find(self, self._frequencies)
        if self._multiplier != 1.0:
            h = h * mx.array(self._multiplier, h.dtype)
        if self._layer_inputs is not None:
            state.layer_inputs = self._layer_inputs(self, inputs, h)
        if steps.stage is not None:
            h = steps.stage.receive(h)
        elif self._form is None and h.size == h.shape[-1]:
            pieces = self._pieces_for(steps, current_device(), h.dtype)
            if pieces is not None and pieces.takes(caches[1:]):
                return pieces(h, state, caches[1:], head)
        normed = False
        if self._form is not None:
            h = self._run(self._form, steps.layers, h, state, caches)
        else:
            h, normed = _in_turn(steps, h, state, caches[1:])
        if steps.stage is not None:
            h = steps.stage.pass_on(h, caches[1:])
        if steps.norm is not None and not normed:
            h = steps.norm(h)
        return h if head is None else head(h)

    def _run(
        self, form: ResidualForm, layers: list[Any], h: mx.array, state: ForwardState, caches: list[Any]
    ) -> mx.array:
        """All layers, in the order and between the ends that a residual form gives them."""

        def step(index: int, stream: Any, number: int) -> Any:
            cache = caches[1 + index]
            if cache is not None and form.passes(index) > 1:
                cache = cache[number]
            return layers[index](stream, state, cache)

        return form.end(self, form.run(self, len(layers), form.begin(self, h), step))

    def _pieces_for(self, steps: DecoderSteps, device: Device, dtype: mx.Dtype) -> TokenPieces | None:
        """What runs one token as compiled pieces; None where nothing would be gained, or it was declined."""
        key = device, dtype
        if key not in steps.pieces:
            asked = policy.resolve(device, self._fused, tuned=tuning_cache.bound(device))
            # On the CPU `mx.compile` starts a C++ compiler: 11 s for four small layers, to save microseconds.
            out = device == "cpu" or not asked.pieces or self.training
            steps.pieces[key] = None if out else self.token_pieces(device, dtype)
        return steps.pieces[key]

    def token_pieces(self, device: Device, dtype: mx.Dtype, compiled: bool = True) -> TokenPieces:
        """One token's way through the layers that are there now, as pieces.

        Args:
            compiled: False runs the pieces without ``mx.compile``.
        """
        steps: DecoderSteps = self.steps()
        layers = [
            LayerOfPieces(layer_path(plan, self._plan), layer, _parts_of(layer, device))
            for layer, plan in zip(steps.layers, self._plan.layers, strict=True)
        ]
        return TokenPieces(layers, steps.norm, device, dtype, compiled)

    def make_caches(self) -> list[Any]:
        """A fresh cache, or None, for the embedding and then for each layer."""
        embedding = find(self, self._names.embed).make_cache() if self._custom_embedding else None
        return [embedding, *(layer.make_cache() for layer in self.layer_list)]


@dataclass(frozen=True, eq=False)
class DecoderSteps:
    """What a call of the decoder uses.

    Args:
        norm_row: the norm for one float32 row in memory, where it has such a form.
        vector: the holder and name of a vector, which nothing packs; the decoder computes in its type.
        stage: where this rank stands in a pipeline; None for a decoder that is whole.
    """

    embed: Any
    norm: Any
    norm_row: OnRow | None
    layers: list[Any]
    vector: tuple[nn.Module, str] | None
    stage: Stage | None
    pieces: dict[tuple[Device, mx.Dtype], TokenPieces | None] = field(default_factory=dict)

    def dtype(self) -> mx.Dtype | None:
        """The type that the decoder computes in, read anew because a cast replaces arrays in MLX's leaves."""
        if self.vector is None:
            return None
        holder, leaf = self.vector
        dtype: mx.Dtype = holder[leaf].dtype
        return dtype
