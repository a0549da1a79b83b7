"""mlx-lm's own model for a family too strange to describe, with this package's MoE blocks inside.

The module tree, the layouts of checkpoints and the caches are mlx-lm's; a plan says where the blocks are.
"""

from __future__ import annotations

import copy
import functools
import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import NoneType
from typing import Any, ClassVar, get_args, get_type_hints

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.switch_layers import SwitchLinear

from mlx_experts.engine.kernels import gather
from mlx_experts.engine.layers.linear import equip
from mlx_experts.engine.layers.tensor_parallel import whole_or_untouched
from mlx_experts.engine.models.adopt import Unfit, block_path, put_in_place, share, take_over
from mlx_experts.engine.models.base import LanguageModel
from mlx_experts.engine.models.model import ModelArgs
from mlx_experts.engine.weights.conversion import Converted, WeightConverter
from mlx_experts.engine.weights.dequantize import Decoded, check_kinds, find_encodings
from mlx_experts.engine.weights.tensor_tree import Tensors
from mlx_experts.plugins.manager import components
from mlx_experts.registry.errors import ConfigError, DeviceError, SettingError, SpecError, TensorError
from mlx_experts.registry.resolve.planner import Plan

# What foreign code may raise over values that it does not check.
_FOREIGN = (
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    NotImplementedError,
    RuntimeError,
    TypeError,
    ValueError,
)
_LARGEST = 2**24


class BackboneConverter(WeightConverter):
    """Converts checkpoints by mlx-lm's ``sanitize``.

    Args:
        plan: the resolved family.
        shapes: shape of every parameter, before quantisation.
        sanitize: mlx-lm's.
    """

    def __init__(
        self, plan: Plan, shapes: Mapping[str, tuple[int, ...]], sanitize: Callable[[Tensors], Tensors]
    ) -> None:
        super().__init__(plan, shapes)
        self._sanitize = sanitize

    def decode(
        self,
        arrays: Mapping[str, mx.array],
        config: Mapping[str, Any],
        dtypes: Mapping[str, str] | None = None,
        dense: mx.Dtype = mx.bfloat16,
        *,
        values: bool = True,
        parameters: Mapping[str, mx.Dtype] | None = None,
    ) -> Decoded:
        """The arrays as they are: mlx-lm's ``sanitize`` undoes the encodings of its family itself.

        Raises:
            QuantizationError: an encoding is incomplete, which mlx-lm does not look for.
            TensorError: a tensor's dtype is one that no parameter takes.
        """
        plan = find_encodings(arrays, config, dtypes, dense, values)
        if parameters is not None:
            check_kinds(arrays, plan, dtypes or {}, parameters)
        return Decoded(dict(arrays), plan.entry)

    def convert(self, tensors: Mapping[str, mx.array], *, values: bool = True) -> Converted:
        """From names on disk to the module tree, of tensors that no rule ignores.

        Raises:
            TensorError: mlx-lm misses a tensor, or one is of the wrong shape.
        """
        try:
            return Converted(self._sanitize(dict(tensors)))
        except (KeyError, ValueError, IndexError) as error:
            raise TensorError(
                "mlx-lm cannot bring these tensors into its model",
                where=f"mlx_lm.models.{self.plan.family.family}",
                found=f"{type(error).__name__}: {error}"[:300],
                hint="get the missing files, or check that config.json belongs to these weights",
            ) from error


class WideSwitchLinear(SwitchLinear):
    """mlx-lm's gathered product, in float32 on the CPU, where MLX has none of a narrower type."""

    def __init__(self, module: SwitchLinear) -> None:
        nn.Module.__init__(self)
        self.weight = module.weight
        if "bias" in module:
            self.bias = module.bias

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        """``x`` [..., 1, D] and the matrix of each row [...] to [..., 1, F], in the dtype of ``x``."""
        narrow = x.dtype != mx.float32 or self.weight.dtype != mx.float32
        if narrow and mx.default_device().type == mx.DeviceType.cpu:
            return gather.wide_product(self, x, indices, sorted_indices).astype(x.dtype)
        y: mx.array = super().__call__(x, indices, sorted_indices)
        return y


class _Originals:
    """mlx-lm's blocks by path, kept out of the module tree."""

    def __init__(self, blocks: dict[str, nn.Module]) -> None:
        self.blocks = blocks


class Backbone(LanguageModel):
    """mlx-lm's model of a family; :func:`backbone_class` mixes it with mlx-lm's class.

    Args:
        args: the plan and the config it came from.

    Raises:
        DeviceError: the model needs a device that this machine lacks.
        ConfigError: mlx-lm does not take the config.
        SpecError: the family file describes other blocks than mlx-lm's model has.
    """

    source: ClassVar[Any]

    def __init__(self, args: ModelArgs) -> None:
        spec = args.plan.family.backbone
        assert spec is not None
        if spec.metal_only and not mx.metal.is_available():
            raise DeviceError(
                f"the family '{args.plan.family.family}' runs on Apple GPUs only",
                where=self.source.__name__,
                expected="Metal",
                found=str(mx.default_device()),
                hint="load it on a Mac; mlx-lm, whose model it is, has no other kernels for it",
            )
        if spec.fallbacks is not None and not mx.metal.is_available():
            # For good: the module's own functions cannot run here, whoever calls them.
            for name, piece in components().get("fallbacks", spec.fallbacks).items():
                setattr(self.source, name, piece)
        with _mlx_lm_reads(self.source):
            super().__init__(_arguments(self.source, args))
            self._plan = args.plan
            # A copy, because a model may keep what its first call has made of its weights.
            _put_together(copy.deepcopy(self))
        self._originals = _Originals({})
        shapes = {name: value.shape for name, value in tree_flatten(self.parameters())}
        self._converter = BackboneConverter(args.plan, shapes, self._sanitized)
        modules = dict(self.named_modules())
        for layer in args.plan.layers:
            if layer.moe is None or not spec.blocks:
                continue
            path = block_path(layer, args.plan)
            block = modules.get(path)
            try:
                if type(block).__name__ not in spec.blocks:
                    raise Unfit(f"it is a {type(block).__name__}")
                ours = take_over(block, layer, path, args.fused)
            except Unfit as reason:
                raise SpecError(
                    "the family file describes another block than mlx-lm's model has",
                    where=f"{args.plan.family.family}.yaml, {path}",
                    expected=", ".join(spec.blocks),
                    found=str(reason),
                ) from reason
            assert block is not None
            self._originals.blocks[path] = block
            put_in_place(modules, path, ours)
        blocks = tuple(f"{path}." for path in self._originals.blocks)
        for path, module in modules.items():
            # This package's blocks widen what they call themselves.
            if type(module) is SwitchLinear and not path.startswith(blocks):
                put_in_place(modules, path, WideSwitchLinear(module))
        equip(self, args.fused)

    @property
    def plan(self) -> Plan:
        """What the model was built from."""
        return self._plan

    @property
    def converter(self) -> BackboneConverter:
        """What converts checkpoints to this model's parameters."""
        return self._converter

    @property
    def remarks(self) -> list[str]:
        """Why mlx-lm's blocks stayed, where they did."""
        spec = self.plan.family.backbone
        return [f"mlx-lm's MoE blocks are kept: {spec.kept}"] if spec is not None and spec.kept else []

    def make_cache(self) -> list[Any]:
        """mlx-lm's caches, or those that the family names in their place."""
        spec = self.plan.family.backbone
        caches = super().make_cache()
        if spec is None or spec.cache is None:
            return caches
        instead_of = components().get("cache", spec.cache)
        return [instead_of(theirs) for theirs in caches]

    def _sanitized(self, tensors: Tensors) -> Tensors:
        # A model of its own, never evaluated, because mlx-lm tells layers apart by the class of their block.
        return dict(self.source.Model(self.args).sanitize(tensors))

    def pipeline(self, group: mx.distributed.Group) -> None:
        """Keep this rank's layers as mlx-lm's model does.

        Raises:
            SettingError: mlx-lm's model cannot.
        """
        if group.size() == 1:
            return
        inner: Any = getattr(self, "model", None)
        if not callable(getattr(inner, "pipeline", None)):
            raise SettingError(
                "mlx-lm's model of this family cannot be spread by layers",
                where=self.source.__name__,
                hint="use tensor parallelism",
            )
        inner.pipeline(group)

    def shard(self, group: mx.distributed.Group | None = None) -> None:
        """Spread the model over the ranks of a group as mlx-lm does, with its own blocks put back."""
        group = group or mx.distributed.init()
        if group.size() == 1:
            return
        modules = dict(self.named_modules())
        with whole_or_untouched(self):
            for path, block in self._originals.blocks.items():
                share(modules[path], block)
                put_in_place(modules, path, block)
            super().shard(group)  # type: ignore[misc]


def _put_together(model: nn.Module) -> None:
    """Make the graphs of two tokens and one more: sizes that do not fit show, and nothing is computed."""
    cache = make_prompt_cache(model)
    for length in (2, 1):
        model(mx.zeros((1, length), dtype=mx.int32), cache=cache)


@contextmanager
def _mlx_lm_reads(source: Any) -> Iterator[None]:
    """Turn what mlx-lm raises over a config into a ConfigError.

    Raises:
        ConfigError: mlx-lm does not take the config.
    """
    try:
        yield
    except _FOREIGN as error:
        raise ConfigError(
            "mlx-lm does not take this config",
            where=f"config.json, read by {source.__name__}",
            found=f"{type(error).__name__}: {error}"[:300],
        ) from error


def _arguments(source: Any, args: ModelArgs) -> Any:
    """mlx-lm's arguments of a config, whose plain numbers and words are of the types that it declares.

    Raises:
        TypeError: one is not.
        ValueError: a whole number is larger than any that a model has.
    """
    arguments = source.ModelArgs.from_dict(args.config)
    for name, kind in get_type_hints(type(arguments)).items():
        value = getattr(arguments, name)
        kinds = get_args(kind) or (kind,)
        wanted = (*kinds, int) if float in kinds else tuple(kinds)
        if not set(kinds) <= {int, float, str, bool, NoneType}:
            continue
        if not isinstance(value, wanted) or (isinstance(value, bool) and bool not in kinds):
            raise TypeError(f"'{name}' is {value!r}"[:200])
        if isinstance(value, int) and not -_LARGEST <= value <= _LARGEST:
            raise ValueError(f"'{name}' is {value}")
    return arguments


@functools.cache
def backbone_class(module: str) -> type[Backbone]:
    """The class that builds mlx-lm's model of this module with this package's blocks.

    Raises:
        SpecError: mlx-lm has no such module.
    """
    name = f"mlx_lm.models.{module}"
    try:
        source = importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise SpecError("mlx-lm has no such model", where="backbone.module", found=name) from error
    return type("Backbone", (Backbone, source.Model), {"source": source, "__module__": __name__})
