"""The model object around a decoder: its arguments, its head, and the interface of mlx-lm's models."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.cache import KVCache

from mlx_experts.engine.layers.base_mixer import Mixer, Piece
from mlx_experts.engine.layers.decode.output_head import OutputHead
from mlx_experts.engine.layers.linear import equip
from mlx_experts.engine.layers.module_tree import find, make_norm, place
from mlx_experts.engine.layers.tensor_parallel import apply_cuts, check_cuts
from mlx_experts.engine.layers.versioned import VersionedModule
from mlx_experts.engine.models.base import LanguageModel
from mlx_experts.engine.models.decoder import Decoder
from mlx_experts.engine.models.prediction import predict
from mlx_experts.engine.weights.conversion import WeightConverter
from mlx_experts.registry.errors import ConfigError
from mlx_experts.registry.resolve.planner import Plan, resolve


@dataclass
class ModelArgs:
    """A resolved plan, in the form that mlx-lm's loader constructs."""

    plan: Plan
    config: dict[str, Any]
    fused: bool | None = None
    model_type: str = ""

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> ModelArgs:
        """Resolve ``config`` against its family in the catalogue.

        Raises:
            RegistryError: no family fits, or a value cannot be.
        """
        from mlx_experts.engine.models.known_families import catalog

        family = catalog().for_config(config)
        return cls(resolve(family, config), dict(config), model_type=str(config.get("model_type", "")))


@dataclass(frozen=True, eq=False)
class ModelSteps:
    """What a call of the model uses.

    Args:
        decoder: the decoder below the head.
        logits: hidden states [B, L, D] to logits [B, L, vocabulary].
        cache_of: for the embedding and each layer, the place of its cache in the model's, or None.
        plain_caches: whether every layer keeps plain keys and values, whose oldest may go.
    """

    decoder: Decoder
    logits: OutputHead
    cache_of: list[int | None]
    plain_caches: bool


class LastPosition:
    """A model that gives the logits of the last position only, which is all that generating reads.

    The CPU's kernels compute what they are called for, also where nobody asks for the result: the head's
    products for every position of a prompt.
    """

    def __init__(self, model: Model) -> None:
        self._model = model

    def __call__(
        self, inputs: mx.array, cache: list[Any] | None = None, input_embeddings: mx.array | None = None
    ) -> mx.array:
        """Token ids ``[B, L]`` to logits ``[B, 1, vocabulary]``."""
        return self._model.last_logits(inputs, cache, input_embeddings)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def last_position(model: nn.Module) -> Any:
    """A model as a loop wants it that reads the last position's logits."""
    return LastPosition(model) if isinstance(model, Model) else model


class Model(LanguageModel, VersionedModule):
    """A language model built from a plan, with the interface of mlx-lm's models.

    Args:
        args: the plan and the config it came from.

    Raises:
        ConfigError: what the plan describes cannot be built.
    """

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.args, self.model_type = args, args.model_type
        plan = args.plan
        names, head = plan.family.names, plan.head
        prefix = f"{names.wrapper}." if names.wrapper else ""
        self._root, self._head = f"{prefix}{names.root}", f"{prefix}{head.path}"
        self._head_norm = f"{prefix}{head.norm}" if head.norm else None
        try:
            place(self, self._root, Decoder(plan, args.fused))
        except OverflowError as error:
            raise ConfigError(
                "the sizes in config.json give a matrix that no array can hold",
                where="config.json",
                found=str(error),
            ) from error
        if not head.tied:
            rows = head.rows or plan.sizes.vocab_size
            place(self, self._head, nn.Linear(plan.sizes.hidden_size, rows, bias=head.bias))
        elif head.bias:
            place(self, f"{self._head}.bias", mx.zeros((plan.sizes.vocab_size,)))
        if self._head_norm is not None:
            place(self, self._head_norm, make_norm(plan.norm, plan.sizes.hidden_size, plan.sizes.norm_eps))
        self._instead: Callable[[], list[Any]] | None = None
        self._converter = self._make_converter()
        equip(self, args.fused)

    def _make_converter(self) -> WeightConverter:
        shapes = {name: value.shape for name, value in tree_flatten(self.parameters())}
        return WeightConverter(self.plan, shapes)

    def untie_head(self) -> None:
        """Give a model whose head is tied an output head of its own; before its modules are quantised."""
        plan, sizes = self.args.plan, self.args.plan.sizes
        head = plan.head.model_copy(update={"tied": False})
        self.args = dataclasses.replace(self.args, plan=dataclasses.replace(plan, head=head))
        if head.bias:
            # A tied head keeps its bias where the matrix goes now.
            parent, _, leaf = self._head.rpartition(".")
            (find(self, parent) if parent else self).pop(leaf)
        place(self, self._head, nn.Linear(sizes.hidden_size, sizes.vocab_size, bias=head.bias))
        equip(self, self.args.fused)
        self._converter = self._make_converter()

    @property
    def decoder(self) -> Decoder:
        """The decoder below the head."""
        decoder: Decoder = find(self, self._root)
        return decoder

    @property
    def layers(self) -> list[Any]:
        """The decoder layers, as mlx-lm's tools ask for them."""
        return self.decoder.layer_list

    @property
    def plan(self) -> Plan:
        """What the model was built from."""
        return self.args.plan

    @property
    def converter(self) -> WeightConverter:
        """What converts checkpoints to this model's parameters."""
        return self._converter

    def __call__(
        self, inputs: mx.array, cache: list[Any] | None = None, input_embeddings: mx.array | None = None
    ) -> mx.array:
        """Token ids ``[B, L]`` to logits ``[B, L, vocabulary]``."""
        steps: ModelSteps = self.steps()
        caches = [None if cache is None or i is None else cache[i] for i in steps.cache_of]
        return steps.decoder(inputs, caches, input_embeddings, steps.logits)

    def bind(self) -> ModelSteps:
        """The decoder, its caches, and hidden states [B, L, D] to logits [B, L, vocabulary]."""
        head, decoder = self.args.plan.head, self.decoder
        embed = find(decoder, self.args.plan.family.names.embed) if head.tied else None
        logits = OutputHead(
            name=self._head,
            matrix=find(self, self._head) if embed is None else embed,
            tied=head.tied,
            norm=None if self._head_norm is None else find(self, self._head_norm),
            bias=find(self, self._head) if head.tied and head.bias else None,
            multiplier=head.multiplier,
            divisor=head.divisor,
            softcap=head.softcap,
        )
        made = decoder.make_caches()
        caches = [cache is not None for cache in made]
        mixers = (module for module in decoder.modules() if isinstance(module, Mixer))
        return ModelSteps(
            decoder,
            logits,
            [sum(caches[:i]) if has else None for i, has in enumerate(caches)],
            made[0] is None
            and all(type(cache) is KVCache for cache in made[1:])
            and all(mixer.may_forget for mixer in mixers),
        )

    @property
    def make_cache(self) -> Callable[[], list[Any]]:  # type: ignore[override]
        """Makes the caches of the embedding and the layers that keep anything, as mlx-lm's prompt caches are.

        Raises:
            AttributeError: every layer keeps plain keys and values. mlx-lm makes such caches itself, and
                within ``max_kv_size`` where that is asked for.
        """
        if self._instead is not None:
            return self._instead
        if self.steps().plain_caches:
            raise AttributeError("make_cache: mlx-lm makes the caches of this model")
        return self._own_caches

    @make_cache.setter
    def make_cache(self, instead: Callable[[], list[Any]]) -> None:
        self._instead = instead

    @make_cache.deleter
    def make_cache(self) -> None:
        self._instead = None

    def _own_caches(self) -> list[Any]:
        return [cache for cache in self.decoder.make_caches() if cache is not None]

    def shard(self, group: mx.distributed.Group | None = None) -> None:
        """Spread the model over the ranks of a group; before the first forward pass and any adapter.

        Raises:
            SettingError: heads, widths or quantisation groups cannot be divided by the ranks; the model is
                as it was.
        """
        group = group or mx.distributed.init()
        if group.size() == 1:
            return
        found = [(each, each.cuts()) for each in self.modules() if isinstance(each, VersionedModule)]
        cut = [(module, cuts) for module, cuts in found if cuts is not None]
        # All is looked at before the first is changed.
        for module, cuts in cut:
            check_cuts(module, cuts, group)
        for module, cuts in cut:
            apply_cuts(module, cuts, group)
            module.divided(group)

    def last_logits(
        self, inputs: mx.array, cache: list[Any] | None = None, input_embeddings: mx.array | None = None
    ) -> mx.array:
        """Token ids ``[B, L]`` to the logits ``[B, 1, vocabulary]`` of the last position."""
        steps: ModelSteps = self.steps()
        caches = [None if cache is None or i is None else cache[i] for i in steps.cache_of]
        hidden = steps.decoder(inputs, caches, input_embeddings)
        return steps.logits(hidden if hidden.shape[1] == 1 else hidden[:, -1:])

    def hidden_and_logits(self, inputs: mx.array, cache: list[Any] | None) -> tuple[mx.array, mx.array]:
        """Hidden states [B, L, D] after the final norm, and the logits [B, L, vocabulary] of them."""
        steps: ModelSteps = self.steps()
        caches = [None if cache is None or i is None else cache[i] for i in steps.cache_of]
        hidden = steps.decoder(inputs, caches, None)
        return hidden, steps.logits(hidden)

    @property
    def predicts(self) -> bool:
        """Whether the model has a prediction layer, which ``load(..., mtp=True)`` keeps."""
        return self.decoder.prediction_layer is not None

    def predict(self, tokens: mx.array, hidden: mx.array, cache: Any) -> tuple[mx.array, mx.array]:
        """Guess the tokens after ``tokens``.

        Args:
            tokens: the tokens [B, L] after those that ``hidden`` is of.
            hidden: hidden states [B, L, D], the model's own or those of an earlier guess.
            cache: the prediction layer's own cache.

        Returns:
            Hidden states [B, L, D] of the guesses, and their logits [B, L, vocabulary].
        """
        found = predict(self.decoder, self.plan, tokens, hidden, cache)
        return found, self.steps().logits(found)

    def make_prediction_cache(self) -> Any:
        """A fresh cache of the prediction layer."""
        return self.decoder.prediction_layer.make_cache()

    def pipeline(self, group: mx.distributed.Group, split: Sequence[int] | None = None) -> None:
        """Keep this rank's layers; see :meth:`Decoder.pipeline`."""
        self.decoder.pipeline(group, split)

    @property
    def quant_predicate(self) -> Any:
        """Routers keep eight bits at conversion, in groups that divide their width, or stay float where none
        does; what the family declares stays float; everything else follows the default."""
        declared = self.args.plan.checkpoint.full_precision
        kept = set(declared.get("frame", ()))
        for layer in self.args.plan.layers:
            at = f"{self._converter.layers}.{layer.index}"
            kept.update(f"{at}.{path}" for path in declared.get(layer.type, ()))
        routers = {
            f"{self._converter.layers}.{i}.{path}"
            for i in self.args.plan.moe_layers
            for path in self._router_paths(i)
        }

        def predicate(path: str, module: nn.Module) -> bool | dict[str, Any]:
            if path not in routers:
                return path not in kept
            width = module.weight.shape[-1]
            group = next((size for size in (64, 32) if width % size == 0), None)
            return False if group is None else {"group_size": group, "bits": 8}

        return predicate

    def _router_paths(self, i: int) -> list[str]:
        moe = self.args.plan.layers[i].moe
        assert moe is not None
        paths = [moe.router.path]
        if moe.shared is not None and moe.shared.gate is not None:
            paths.append(moe.shared.gate)
        return [f"{moe.path}.{path}" if moe.path else path for path in paths]

    @property
    def cast_predicate(self) -> Any:
        """Selection biases, float32 routers and the mixers' float32 leaves keep their type."""
        routers = set()
        leaves = {leaf for m in self.modules() if isinstance(m, Piece) for leaf in m.float32_leaves}
        for i in self.args.plan.moe_layers:
            moe = self.args.plan.layers[i].moe
            if moe is not None and moe.router.selection_bias is not None:
                leaves.add(moe.router.selection_bias.path.rsplit(".", 1)[-1])
            if moe is not None and moe.router.dtype == "float32":
                path = f"{moe.path}.{moe.router.path}" if moe.path else moe.router.path
                routers.add(f"{self._converter.layers}.{i}.{path}.weight")

        return lambda path: path.rsplit(".", 1)[-1] not in leaves and path not in routers
