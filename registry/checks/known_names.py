"""The names that a family file may use for what the engine and plugins supply, known without MLX."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator
from pathlib import Path

from mlx_experts.plugins.manager import registered
from mlx_experts.registry.errors import SpecError
from mlx_experts.registry.resolve.plan import LayerPlan, Plan
from mlx_experts.registry.spec.attention import PluginMixerSpec
from mlx_experts.registry.spec.checkpoint import PluginOp

ACTIVATIONS = (
    "geglu",
    "geglu_plus_one",
    "geglu_tanh",
    "gelu",
    "gelu_tanh",
    "reglu",
    "relu2",
    "silu",
    "situ",
    "swiglu",
    "swiglu_clamp_after",
    "swiglu_clamp_before",
    "swiglu_oai",
)
"""The engine's own activations."""
CONFIG_NAMES = {"swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh"}
"""What configs call some of them."""


def check_names(plan: Plan, path: Path) -> None:
    """See that whatever a plan names is offered by somebody.

    Args:
        path: the family file, for messages.

    Raises:
        SpecError: nobody offers a piece or an activation of a name.
    """
    for key, kind, name, own in _named(plan):
        known = {*own, *registered(kind)}
        if name in known:
            continue
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
        raise SpecError(
            f"'{key}' names no {kind} that the engine or a plugin has",
            where=str(path),
            expected=", ".join(sorted(known)),
            found=name,
            hint=f"did you mean '{near[0]}'?" if near else "correct the name, or install the plugin",
        )


def _named(plan: Plan) -> Iterator[tuple[str, str, str, Collection[str]]]:
    """Every name: the key it stands under, its kind, itself, and the names that need no plugin."""
    family = plan.family
    yield "block.kind", "block", family.block.kind, ("standard",)
    injection = family.block.options.get("inject")
    if isinstance(injection, dict) and isinstance(injection.get("kind"), str):
        yield "block.options.inject.kind", "injection", injection["kind"], ()
    yield "embedding.kind", "embedding", family.embedding.kind, ("standard",)
    if family.backbone is not None:
        for key, kind, name in (
            ("cache", "cache", family.backbone.cache),
            ("fallbacks", "fallbacks", family.backbone.fallbacks),
        ):
            if name is not None:
                yield f"backbone.{key}", kind, name, ()
    for i, op in enumerate(plan.checkpoint.conversions):
        if isinstance(op, PluginOp):
            yield f"checkpoint.conversions.{i}.plugin", "layout operation", op.name, ()
    for layer in plan.layers:
        if isinstance(layer.mixer, PluginMixerSpec):
            at = f"variants.{layer.type}" if layer.type in family.variants else "attention"
            yield f"{at}.kind", "mixer", layer.mixer.kind, ("gqa",)
        if layer.moe is not None:
            yield "moe.router.kind", "router", layer.moe.router.kind, ("standard",)
            yield "moe.router.select", "selection", layer.moe.router.select, ("topk",)
        for key, name in _activations(layer):
            yield f"{key}.activation", "activation", name, (*ACTIVATIONS, *CONFIG_NAMES)


def _activations(layer: LayerPlan) -> Iterator[tuple[str, str]]:
    if layer.dense is not None:
        yield "dense", layer.dense.activation.name
    if layer.moe is not None:
        yield "moe.experts", layer.moe.experts.activation.name
        if layer.moe.shared is not None:
            yield "moe.shared", layer.moe.shared.activation.name
