"""Turns a family and a checkpoint's config.json into a plan: every reference read, every layer listed.

The plan is made of the same frozen models as the family, with literals only, so that the engine
never looks at a config.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import ValidationError

from mlx_experts.registry.catalog import mixers
from mlx_experts.registry.config import ConfigView
from mlx_experts.registry.errors import ConfigError
from mlx_experts.registry.expand import expand_moe_layers, expand_types
from mlx_experts.registry.features import check_features
from mlx_experts.registry.plan import FLOAT32_LARGEST
from mlx_experts.registry.plan import LayerPlan as LayerPlan
from mlx_experts.registry.plan import Plan as Plan
from mlx_experts.registry.plan import RopePlan as RopePlan
from mlx_experts.registry.plan import Sizes as Sizes
from mlx_experts.registry.schema import (
    Family,
    GqaSpec,
    MoeSpec,
    RopeSpec,
    SizesSpec,
)
from mlx_experts.registry.values import RESOLVED, SIZE_BOUND, Ref, Spec

S = TypeVar("S", bound=Spec)
# Layers and heads are gone through one by one before a tensor is looked at; real models have a few hundred.
MAX_LAYERS, MAX_HEADS = 1024, 2**16


def resolve(family: Family, config: Mapping[str, Any]) -> Plan:
    """Read every reference of ``family`` from ``config``.

    Raises:
        ConfigError: a needed key is absent, or a value cannot be.
    """
    view = ConfigView(config, family.text_keys if family.text_config else ())
    check_features(family, view)
    resolver = Resolver(family.family, view)
    sizes = resolver.sizes(family.config, 0)
    types = expand_types(family.layer_types, view, sizes.num_layers, resolver)
    is_moe = expand_moe_layers(family.moe.layers, view, sizes.num_layers, resolver)
    types = [
        kind if moe else family.dense_types.get(kind, kind) for kind, moe in zip(types, is_moe, strict=True)
    ]
    kinds = mixers(family)
    layers = []
    for i, kind in enumerate(types):
        if family.layer_types is not None and kind not in kinds and "" not in kinds:
            raise ConfigError(
                f"layer {i} is of a type that the family does not know",
                where="config.json",
                found=kind,
                expected=", ".join(sorted(k for k in kinds if k)),
            )
        layers.append(_layer(family, resolver, i, kind, kinds.get(kind, kinds.get("")), is_moe[i]))
    return Plan(
        family=family,
        sizes=sizes,
        norm=resolver.spec(family.norm, 0),
        embedding=resolver.spec(family.embedding, 0),
        head=resolver.spec(family.head, 0),
        layers=tuple(layers),
        config=view,
    )


def _layer(family: Family, resolver: Resolver, i: int, kind: str, mixer_spec: Any, is_moe: bool) -> LayerPlan:
    sizes = resolver.sizes(family.config, i)
    mixer = resolver.spec(mixer_spec, i) if mixer_spec is not None else None
    is_moe &= sizes.num_experts >= family.moe.dense_below
    mlp = family.mlp_variants.get(kind, "moe" if is_moe else "dense")
    block = resolver.spec(family.block, i)
    if mlp == "dense" and family.dense is None:
        raise ConfigError(
            f"layer {i} has no experts, and the family describes no dense MLP",
            where="config.json",
            hint="add a `dense:` section to the family file",
        )
    moe = resolver.spec(family.moe, i) if mlp == "moe" else None
    if moe is not None:
        _check_moe(moe, sizes, i)
    dense = resolver.spec(family.dense, i) if mlp == "dense" and family.dense else None
    if dense is not None and dense.width is None and not sizes.dense_width:
        raise ConfigError(
            f"layer {i} has a dense MLP, and config.json does not say how wide",
            where="config.json",
            expected=f"'{family.config.dense_width}'",
        )
    if isinstance(mixer, GqaSpec):
        _check_heads(mixer, sizes, i)
    return LayerPlan(
        index=i,
        type=kind,
        sizes=sizes,
        mixer=mixer,
        rope=resolver.rope(mixer_spec.rope, i, kind, sizes) if mixer is not None and mixer.rope else None,
        mlp=mlp,
        moe=moe,
        dense=dense,
        residual_multiplier=block.residual_multiplier,
        options=block.options,
    )


def _check_moe(moe: MoeSpec, sizes: Sizes, i: int) -> None:
    if moe.experts.width is None and not sizes.expert_width:
        raise ConfigError("the experts have no width", where=f"config.json, layer {i}", found="0")
    experts, groups = sizes.num_experts + moe.experts.zero_experts, moe.router.groups
    if not sizes.num_experts:
        raise ConfigError("a layer with experts has none", where=f"config.json, layer {i}", found="0 experts")
    if not 1 <= sizes.top_k <= experts:
        raise ConfigError(
            "a token cannot pick that many experts",
            where=f"config.json, layer {i}",
            expected=f"1 to {experts} experts a token",
            found=str(sizes.top_k),
        )
    if groups is None or not groups.enabled or groups.count <= 1:
        return
    if groups.count < 1 or experts % groups.count:
        raise ConfigError(
            "the experts cannot be divided into that many groups",
            where=f"config.json, layer {i}",
            expected=f"a divisor of {experts}",
            found=str(groups.count),
        )
    if not 1 <= groups.keep <= groups.count:
        raise ConfigError(
            "that many groups cannot be kept",
            where=f"config.json, layer {i}",
            expected=f"1 to {groups.count}",
            found=str(groups.keep),
        )
    if groups.keep * (experts // groups.count) < sizes.top_k:
        raise ConfigError(
            "the kept groups hold fewer experts than a token picks",
            where=f"config.json, layer {i}",
            expected=f"at least {sizes.top_k} experts",
            found=f"{groups.keep} groups of {experts // groups.count}",
        )


def _layered(spec: SizesSpec) -> SizesSpec:
    """The same section with the experts' sizes read from a list with one entry a layer, where it is one.

    Pruned checkpoints keep another number of experts in each layer, whatever the family.
    """
    refs = {name: getattr(spec, name) for name in ("num_experts", "top_k", "expert_width")}
    layered = {n: r.model_copy(update={"per_layer": True}) for n, r in refs.items() if isinstance(r, Ref)}
    return spec.model_copy(update=layered)


def _check_heads(mixer: GqaSpec, sizes: Sizes, i: int) -> None:
    heads, kv_heads = mixer.heads or sizes.num_heads, mixer.kv_heads or sizes.num_kv_heads
    if heads % kv_heads:
        raise ConfigError(
            "the query heads cannot share that many key-value heads",
            where=f"config.json, layer {i}",
            expected=f"a divisor of {heads}",
            found=str(kv_heads),
        )


class Resolver:
    """Replaces references by the values of one config.

    Args:
        family: the family's name, for messages.
        view: the config.
    """

    def __init__(self, family: str, view: ConfigView) -> None:
        self.family, self.view = family, view
        self._shared_sizes: dict[tuple[Any, ...], Sizes] = {}

    def ref(self, ref: Ref, layer: int) -> Any:
        """The value a reference stands for at a layer."""
        for key in ref.keys:
            value = self.view.get(key.replace("{layer}", str(layer)), ref.outer)
            if value is None:
                continue
            if ref.per_layer and isinstance(value, list):
                if layer >= len(value):
                    raise ConfigError(
                        f"'{key}' has too few entries",
                        where="config.json",
                        expected=f"one for each layer, layer {layer} included",
                        found=f"{len(value)} entries",
                    )
                value = value[layer]
                if value is None:
                    break
            if ref.length and isinstance(value, list | str):
                value = len(value)
            return self._mapped(ref, key, value, layer)
        if ref.if_null is not None and any(self.view.is_null(key) for key in ref.keys):
            return ref.if_null
        if ref.required:
            raise ConfigError(
                f"config.json lacks '{ref}'",
                where="config.json",
                expected=f"a value that the family '{self.family}' needs",
                hint="use the checkpoint's original config.json, or give the family file a default",
            )
        return self.value(ref.default, layer)

    def _mapped(self, ref: Ref, key: str, value: Any, layer: int) -> Any:
        if ref.present is not None:
            return self.value(ref.present, layer)
        if ref.times is not None and isinstance(value, int | float) and not isinstance(value, bool):
            return _ordinary(key, value * ref.times)
        if ref.map is None:
            return _ordinary(key, value)
        if not isinstance(value, str | bool | int) or value not in ref.map:
            raise ConfigError(
                f"'{key}' holds a value that the family '{self.family}' does not know",
                where="config.json",
                expected=", ".join(map(str, ref.map)),
                found=repr(value)[:80],
            )
        return self.value(ref.map[value], layer)

    def value(self, value: Any, layer: int) -> Any:
        """``value`` with every reference in it replaced; the same object where there is none."""
        if isinstance(value, Ref):
            return self.ref(value, layer)
        if isinstance(value, Spec):
            return self.spec(value, layer)
        if isinstance(value, tuple | list):
            return [self.value(v, layer) for v in value]
        if isinstance(value, dict):
            if "from" in value:
                return self.ref(Ref.model_validate(value), layer)
            return {k: self.value(v, layer) for k, v in value.items()}
        return value

    def spec(self, spec: S, layer: int) -> S:
        """The section with literals only.

        Raises:
            ConfigError: a config value is of the wrong type, naming its key.
        """
        data: dict[str, Any] = {}
        for name, info in type(spec).model_fields.items():
            value = getattr(spec, name)
            data[info.alias or name] = (
                None if isinstance(value, RopeSpec) and name == "rope" else self.value(value, layer)
            )
        if "rope" in data and getattr(spec, "rope", None) is not None:
            data["rope"] = spec.rope  # type: ignore[attr-defined]
        try:
            return type(spec).model_validate(data, context=RESOLVED)
        except ValidationError as error:
            raise self._config_error(spec, error) from error

    def _config_error(self, spec: Spec, error: ValidationError) -> ConfigError:
        # What a reference would have been told does not matter: a config holds values.
        first = min(error.errors(), key=lambda each: "Ref" in each["loc"])
        source: Any = spec
        for part in first["loc"]:
            if isinstance(source, Ref):
                break
            source = getattr(source, str(part), source)
        keys = str(source) if isinstance(source, Ref) else ".".join(map(str, first["loc"]))
        return ConfigError(
            f"'{keys}' holds a value that cannot be: {first['msg']}",
            where="config.json",
            found=repr(first["input"])[:80],
        )

    def sizes(self, spec: SizesSpec, layer: int) -> Sizes:
        """The sizes at a layer, with what follows from them.

        Raises:
            ConfigError: a size is not positive.
        """
        read = self.spec(_layered(spec), layer)
        values = {name: getattr(read, name) for name in SizesSpec.model_fields}
        for name, most in (("num_layers", MAX_LAYERS), ("num_heads", MAX_HEADS)):
            if values[name] > most:
                raise ConfigError(
                    f"'{getattr(spec, name)}' is more than any model has",
                    where="config.json",
                    expected=f"at most {most}",
                    found=str(values[name]),
                )
        if values["num_kv_heads"] is None:
            values["num_kv_heads"] = values["num_heads"]
        if values["head_dim"] is None:
            if values["hidden_size"] % values["num_heads"]:
                raise ConfigError(
                    "the width cannot be divided by the heads, and no head width is given",
                    where="config.json",
                    expected=f"a multiple of {values['num_heads']}",
                    found=str(values["hidden_size"]),
                )
            values["head_dim"] = values["hidden_size"] // values["num_heads"]
        key = tuple(values.values())
        return self._shared_sizes.setdefault(key, Sizes(**values))

    def rope(self, spec: RopeSpec, layer: int, layer_type: str, sizes: Sizes) -> RopePlan | None:
        """Rotary parameters from `rope_parameters` (flat or by layer type) or the older flat keys.

        Args:
            layer_type: picks the entry where `rope_parameters` is keyed by layer type.
        """
        own_theta = self.value(spec.layer_theta, layer)
        if not self.value(spec.enabled, layer) or own_theta == 0:
            return None
        stated_params = [self._rope_object(name, layer_type) for name in ("rope_scaling", "rope_parameters")]
        params: dict[str, Any] = {**stated_params[0], **stated_params[1]}
        params = params or dict(self.value(spec.when_absent, layer))
        scaled = self.value(spec.scaled_types, layer)
        if not isinstance(scaled, list | None):
            raise ConfigError(
                f"'{spec.scaled_types}' is no list of layer types",
                where="config.json",
                found=repr(scaled)[:80],
            )
        kind = params.get("rope_type") or params.get("type") or spec.type or "default"
        if not spec.scaling or (scaled is not None and layer_type not in scaled):
            kind = "default"
        theta = _one(params.get("rope_theta"), layer) if own_theta is None else own_theta
        if theta is None:
            theta = (
                self.ref(Ref.model_validate({"from": "rope_theta"}), layer)
                if spec.theta is None
                else self.value(spec.theta, layer)
            )
        stated = _one(params.get("partial_rotary_factor"), layer)
        dims = self.value(spec.dims, layer) if stated is None else None
        original = self.view.get("original_max_position_embeddings")
        if original is not None:
            params.setdefault("original_max_position_embeddings", original)
        options = self.value(spec.options, layer)
        params = {**{k: v for k, v in options.items() if v is not None}, **params}
        partial = self.value(spec.partial, layer) if stated is None else stated
        return RopePlan(
            style=self.value(spec.style, layer),
            theta=float(_positive("rope_theta", theta, FLOAT32_LARGEST)),
            type=str(kind),
            partial=float(_positive("partial_rotary_factor", partial, 1)),
            dims=None if dims is None else _positive(str(spec.dims), dims, SIZE_BOUND, int),
            params=params,
            max_positions=sizes.max_positions,
        )

    def _rope_object(self, name: str, layer_type: str) -> dict[str, Any]:
        """An object of rope parameters, or its entry for a layer type where it has one for each; else {}."""
        value = self.view.mapping(name)
        if not any(isinstance(each, dict) for each in value.values()):
            return value
        entry = value.get(layer_type)
        return entry if isinstance(entry, dict) else {}


def _ordinary(key: str, value: Any) -> Any:
    """The value, where it is no number that MLX cannot take.

    Raises:
        ConfigError: it is not finite, or too large.
    """
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if number and not abs(value) <= (FLOAT32_LARGEST if isinstance(value, float) else 2**63 - 1):
        raise ConfigError(
            f"'{key}' holds a number that cannot be",
            where="config.json",
            expected="a finite number within float32, or a whole one of 64 bits",
            found=repr(value)[:80],
        )
    return value


def _positive(key: str, value: Any, most: float, kind: type[float] = float) -> Any:
    """A number above 0 and at most ``most``.

    Raises:
        ConfigError: it is none.
    """
    if not isinstance(value, int | kind) or isinstance(value, bool) or not 0 < value <= most:
        number = "whole number" if kind is int else "number"
        raise ConfigError(
            f"'{key}' must be a positive {number}",
            where="config.json",
            expected=f"a {number} above 0 and at most {most:g}",
            found=repr(value)[:80],
        )
    return value


def _one(value: Any, layer: int) -> Any:
    return value[layer] if isinstance(value, list) and layer < len(value) else value
