"""The hooks that plugins fill. A plugin implements the ones it wants; arguments are by keyword.

Each ``offer_*`` hook returns a mapping from names, which family files use, to builders. Two plugins
that offer the same name are an error naming both, unless one wraps its builder in :class:`Override`.
Nothing here imports mlx, the registry or the engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import pluggy

PROJECT = "mlx_experts"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)

T = TypeVar("T")


@dataclass(frozen=True)
class Override(Generic[T]):
    """Says that a builder knowingly takes the place of another plugin's of the same name."""

    builder: T


Offers = Mapping[str, Any]


@hookspec
def add_families() -> Iterable[Path]:  # type: ignore[empty-body]
    """Folders with family files to add. Called when the catalogue is first read; nothing adds nothing."""


@hookspec
def register_mixers() -> Offers:  # type: ignore[empty-body]
    """Mixers (attention and its likes) by the `kind` that family files name.

    A builder is called as ``builder(layer=LayerPlan, plan=Plan)`` and returns an ``mlx.nn.Module``
    with ``__call__(x, state, cache)`` and ``make_cache()``. Its attributes are the names of its tensors below
    the mixer's path; ``float32_leaves`` names those that a dtype cast leaves alone. A subclass of
    ``engine.layers.base_mixer.Mixer`` is bound anew when a part of it is replaced.
    """


@hookspec
def register_blocks() -> Offers:  # type: ignore[empty-body]
    """Decoder layers by the `block.kind` that family files name.

    A builder is called as ``builder(layer, plan, fused)``, a LayerPlan, the Plan and what an MoE block is
    to be told about the fused path, and returns a module with ``__call__(x, state, cache)`` and
    ``make_cache()``.
    """


@hookspec
def register_frames() -> Offers:  # type: ignore[empty-body]
    """What stands around all layers, by the `block.kind` that it belongs to.

    A builder is called as ``builder(plan)`` and returns an ``engine.layers.residual.base.ResidualForm``.
    """


@hookspec
def register_injections() -> Offers:  # type: ignore[empty-body]
    """Modules that add to the residual stream before a layer, by the `inject.kind` that family files name.

    A builder is called as ``builder(layer=LayerPlan, plan=Plan, spec=InjectionSpec)`` and returns a module
    with ``__call__(stream, state, cache)`` and ``make_cache()``.
    """


@hookspec
def register_routers() -> Offers:  # type: ignore[empty-body]
    """Routers that read the forward state, by the `router.kind` that family files name.

    A builder is called as ``builder(spec, layer)``, a resolved RouterSpec and the LayerPlan, and returns an
    ``engine.layers.routers.base.StatefulRouter``, or None for a layer whose router is the standard one.
    """


@hookspec
def register_router_selections() -> Offers:  # type: ignore[empty-body]
    """Router selections by the `router.select` that family files name.

    Called as ``select(logits=[..., E], top_k=K, options=...)``; returns indices and weights ``[..., K]``.
    """


@hookspec
def register_activations() -> Offers:  # type: ignore[empty-body]
    """Expert activations by name: rows of ``engine.kernels.activations.ExpertActivation``."""


@hookspec
def register_conversions() -> Offers:  # type: ignore[empty-body]
    """Conversions of a checkpoint's tensors by the name that family files give under `plugin:`.

    A builder is a factory. It is called as ``factory(source, options)`` with the path and the options of the
    family file, and returns an ``engine.weights.tensor_tree.Operation``: ``forward(tensors, tree)`` brings
    tensors from their names on disk to those of the module tree and says whether any was there,
    ``backward(tensors, tree)`` undoes that, and ``modules(path, tree)`` follows a module's path.
    """


@hookspec
def register_kernels() -> Offers:  # type: ignore[empty-body]
    """Fused expert kernels by name, asked before the back-end's own; the first that accepts runs.

    A kernel has ``gate(request, policy)``, which returns an Accept or a Decline, and
    ``prepare(experts, dtype)``, which returns what runs one call (``engine.kernels.FusedRun``) or a Decline.
    The gate is asked about every kind of call, also of several rows and in training, and what it accepts is
    compared with the float32 truth once before it is used. What it declines stands in the note of the trace.
    A shared expert is added apart.
    """


@hookspec
def register_embeddings() -> Offers:  # type: ignore[empty-body]
    """Token embeddings by the `embedding.kind` that family files name.

    Called as ``builder(plan=Plan)``; returns a module with ``__call__(inputs, state, cache)``,
    ``make_cache()``, which may return None, and ``as_linear(h)`` where a head may be tied to it.
    """


@hookspec
def register_fallbacks() -> Offers:  # type: ignore[empty-body]
    """Sets of plain operations by the `backbone.fallbacks` that family files name.

    A set maps names of mlx-lm's module to what takes their place on a device without Metal: functions, and
    classes that are mlx-lm's own with another call.
    """


@hookspec
def register_caches() -> Offers:  # type: ignore[empty-body]
    """Prompt caches by the `backbone.cache` that family files name.

    Called as ``builder(theirs)`` with each empty cache that mlx-lm's model makes; returns the one that takes
    its place, which has a ``state``, a class method ``from_state(state)``, ``nbytes`` for all that it holds,
    and a class that mlx-lm's ``load_prompt_cache`` finds by its name in ``mlx_lm.models.cache``.
    """
