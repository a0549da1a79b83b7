"""Turns a family and a checkpoint's config.json into a plan: every reference read, every layer listed.

The plan is made of the same frozen models as the family, with literals only, so that the engine
never looks at a config.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlx_experts.registry.catalog.catalog import mixers
from mlx_experts.registry.catalog.config_view import ConfigView
from mlx_experts.registry.errors import ConfigError
from mlx_experts.registry.resolve.checkpoint_paths import resolve_checkpoint
from mlx_experts.registry.resolve.features import check_features
from mlx_experts.registry.resolve.layer_types import expand_moe_layers, expand_types
from mlx_experts.registry.resolve.plan import LayerPlan as LayerPlan
from mlx_experts.registry.resolve.plan import Plan as Plan
from mlx_experts.registry.resolve.plan import Sizes as Sizes
from mlx_experts.registry.resolve.resolver import Resolver as Resolver
from mlx_experts.registry.resolve.rope import rope_plan
from mlx_experts.registry.spec.family import Family, GqaSpec, MoeSpec


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
    layers: list[LayerPlan] = []
    for i, kind in enumerate(types):
        if family.layer_types is not None and kind not in kinds and "" not in kinds:
            raise ConfigError(
                f"layer {i} is of a type that the family does not know",
                where="config.json",
                found=kind,
                expected=", ".join(sorted(k for k in kinds if k)),
            )
        layers.append(plan_layer(family, resolver, i, kind, is_moe[i], kinds))
    return Plan(
        family=family,
        sizes=sizes,
        norm=resolver.spec(family.norm, 0, "norm"),
        embedding=resolver.spec(family.embedding, 0, "embedding"),
        head=resolver.spec(family.head, 0, "head"),
        layers=tuple(layers),
        checkpoint=resolve_checkpoint(family, resolver),
        config=view,
    )


def plan_layer(
    family: Family, resolver: Resolver, i: int, kind: str, is_moe: bool, kinds: Mapping[str, Any]
) -> LayerPlan:
    """One decoder layer, every reference read at its index.

    Args:
        i: the index.
        kind: its layer type.
        is_moe: whether it has experts, if its type does not say otherwise.
        kinds: the family's mixers as written, by layer type.

    Raises:
        ConfigError: a needed key is absent, or a value cannot be.
    """
    mixer_spec: Any = kinds.get(kind, kinds.get(""))
    sizes = resolver.sizes(family.config, i)
    at = f"variants.{kind}" if kind in family.variants else "attention"
    mixer = None
    if mixer_spec is not None:
        turns = mixer_spec.rope is not None
        rope = rope_plan(resolver, mixer_spec.rope, i, kind, sizes, f"{at}.rope") if turns else None
        mixer = resolver.spec(mixer_spec, i, at, rope=rope)
    is_moe &= sizes.num_experts >= family.moe.dense_below
    mlp = family.mlp_variants.get(kind, "moe" if is_moe else "dense")
    block = resolver.spec(family.block, i, "block")
    if mlp == "dense" and family.dense is None:
        raise ConfigError(
            f"layer {i} has no experts, and the family describes no dense MLP",
            where="config.json",
            hint="add a `dense:` section to the family file",
        )
    moe = resolver.spec(family.moe, i, "moe") if mlp == "moe" else None
    if moe is not None:
        if moe.shared is not None and moe.shared.width is None:
            shared = moe.shared.model_copy(update={"width": sizes.expert_width})
            moe = moe.model_copy(update={"shared": shared})
        _check_moe(moe, sizes, f"config.json or {family.family}.yaml, layer {i}")
    dense = resolver.spec(family.dense, i, "dense") if mlp == "dense" and family.dense else None
    if dense is not None and dense.width is None and not sizes.dense_width:
        raise ConfigError(
            f"layer {i} has a dense MLP, and config.json does not say how wide",
            where="config.json",
            expected=f"'{family.config.dense_width}'",
        )
    if isinstance(mixer, GqaSpec):
        _check_heads(mixer, sizes, f"config.json or {family.family}.yaml, layer {i}")
    return LayerPlan(
        index=i,
        type=kind,
        sizes=sizes,
        mixer=mixer,
        mlp=mlp,
        moe=moe,
        dense=dense,
        block=block,
    )


def _check_moe(moe: MoeSpec, sizes: Sizes, where: str) -> None:
    if not sizes.expert_width:
        raise ConfigError("the experts have no width", where=where, found="0")
    experts, groups = sizes.num_experts + moe.experts.zero_experts, moe.router.groups
    if not sizes.num_experts:
        raise ConfigError("a layer with experts has none", where=where, found="0 experts")
    if not 1 <= sizes.top_k <= experts:
        raise ConfigError(
            "a token cannot pick that many experts",
            where=where,
            expected=f"1 to {experts} experts a token",
            found=str(sizes.top_k),
        )
    if groups is None or not groups.enabled or groups.count <= 1:
        return
    if groups.count < 1 or experts % groups.count:
        raise ConfigError(
            "the experts cannot be divided into that many groups",
            where=where,
            expected=f"a divisor of {experts}",
            found=str(groups.count),
        )
    if groups.each and sizes.top_k % groups.count:
        raise ConfigError(
            "the picked experts cannot be divided among the groups",
            where=where,
            expected=f"a multiple of {groups.count}",
            found=str(sizes.top_k),
        )
    if not 1 <= groups.keep <= groups.count:
        raise ConfigError(
            "that many groups cannot be kept",
            where=where,
            expected=f"1 to {groups.count}",
            found=str(groups.keep),
        )
    if groups.keep * (experts // groups.count) < sizes.top_k:
        raise ConfigError(
            "the kept groups hold fewer experts than a token picks",
            where=where,
            expected=f"at least {sizes.top_k} experts",
            found=f"{groups.keep} groups of {experts // groups.count}",
        )


def _check_heads(mixer: GqaSpec, sizes: Sizes, where: str) -> None:
    heads, kv_heads = mixer.heads or sizes.num_heads, mixer.kv_heads or sizes.num_kv_heads
    if heads % kv_heads:
        raise ConfigError(
            "the query heads cannot share that many key-value heads",
            where=where,
            expected=f"a divisor of {heads}",
            found=str(kv_heads),
        )
