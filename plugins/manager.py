"""Loads plugins at first use and keeps what they offer, refusing names that two of them claim.

``MLX_EXPERTS_PLUGINS`` narrows loading to a comma-separated list of entry points (`none` for none);
``MLX_EXPERTS_TRACE_PLUGINS`` prints every hook call. Built-in components are always there.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import importlib.metadata
import importlib.util
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import pluggy

from mlx_experts.plugins import hookspecs, standard
from mlx_experts.plugins.hookspecs import PROJECT, Override
from mlx_experts.registry.errors import PluginError

NARROW_VARIABLE = "MLX_EXPERTS_PLUGINS"

KINDS = {
    "mixer": "register_mixers",
    "block": "register_blocks",
    "frame": "register_frames",
    "injection": "register_injections",
    "router": "register_routers",
    "selection": "register_router_selections",
    "activation": "register_activations",
    "layout operation": "register_conversions",
    "kernel": "register_kernels",
    "embedding": "register_embeddings",
    "cache": "register_caches",
    "fallbacks": "register_fallbacks",
}


_BUILTIN = "mlx_experts.plugins.builtin"
_SETTINGS = "mlx_experts.registry.settings"
T = TypeVar("T")
# Held while plugins are loaded: components that two threads register at once are refused as registered twice.
_LOADING = threading.RLock()
# Files that add_plugin_file named, and whether it is too late to name another.
_FILES: list[Path] = []
_LOADED: list[bool] = []


def _once(make: Callable[[], T]) -> Callable[[], T]:
    """``make``, called by the first thread that asks and waited for by the others."""
    made = functools.cache(make)

    @functools.wraps(make)
    def get() -> T:
        with _LOADING:
            return made()

    return get


@_once
def manager() -> pluggy.PluginManager:
    """The plugin manager with the external plugins loaded, and none of the built-in components.

    Raises:
        PluginError: a plugin cannot be imported, or the narrowing variable names an unknown one.
        SettingError: a variable of the environment cannot be read.
    """
    _LOADED.append(True)
    plugins = pluggy.PluginManager(PROJECT)
    plugins.add_hookspecs(hookspecs)
    asked = importlib.import_module(_SETTINGS).read()
    if asked.trace_plugins:
        plugins.trace.root.setwriter(lambda text: print(text, end="", file=sys.stderr))
        plugins.enable_tracing()
    points = {p.name: p for p in importlib.metadata.entry_points(group=PROJECT)}
    for name in _wanted(list(points), asked.plugins):
        _register(plugins, points[name].load, name, f"entry point {points[name].value}")
    for path in _FILES:
        _register(plugins, functools.partial(_import_file, path), path.stem, str(path))
    return plugins


def _register(plugins: pluggy.PluginManager, load: Callable[[], Any], name: str, where: str) -> None:
    """Import one plugin and take its hooks.

    Raises:
        PluginError: it cannot be imported, fills a hook that does not exist, or asks for unknown arguments.
    """
    hint = f"repair it, uninstall it, or leave it out with {NARROW_VARIABLE}"
    try:
        plugins.register(load(), name=name)
    except Exception as error:  # somebody else's module runs here; its error names the plugin
        raise PluginError(
            f"the plugin '{name}' cannot be loaded",
            where=where,
            found=f"{type(error).__name__}: {error}",
            hint=hint,
        ) from error
    known = [each for each in dir(hookspecs) if each.startswith(("add_", "register_"))]
    for caller in plugins.get_hookcallers(plugins.get_plugin(name)) or ():
        if caller.has_spec():
            continue
        near = difflib.get_close_matches(caller.name, known, n=1, cutoff=0.5)
        raise PluginError(
            f"the plugin '{name}' fills a hook that does not exist",
            where=where,
            expected=", ".join(known),
            found=caller.name,
            hint=f"did you mean '{near[0]}'?" if near else "docs/hooks.md lists the hooks",
        )


def _import_file(path: Path) -> Any:
    """A plugin's module from a file, which need not lie on the path that Python searches."""
    spec = importlib.util.spec_from_file_location(f"mlx_experts_plugin_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def add_plugin_file(path: Path) -> None:
    """Load a plugin from a Python file in this process; before anything asks for plugins.

    Raises:
        PluginError: there is no such file, or plugins have been loaded already.
    """
    if not path.is_file():
        raise PluginError("a plugin's file does not exist", where=str(path), expected="a Python file")
    with _LOADING:
        if _LOADED:
            raise PluginError("plugins have been loaded already", where=str(path), hint="name it earlier")
        if path not in _FILES:
            _FILES.append(path)


def plugin_files() -> tuple[Path, ...]:
    """The files that :func:`add_plugin_file` has named, for a process that is to load the same plugins."""
    return tuple(_FILES)


def plugins_in_use() -> list[dict[str, str]]:
    """Every plugin that is loaded but the built-in ones: its name, its module and the hooks that it fills."""
    loaded = manager()
    return [
        {
            "plugin": name,
            "module": getattr(plugin, "__name__", type(plugin).__name__),
            "hooks": ", ".join(caller.name for caller in loaded.get_hookcallers(plugin) or ()),
        }
        for name, plugin in loaded.list_name_plugin()
        if plugin is not None and not name.startswith("builtin.")
    ]


def _wanted(names: list[str], asked: tuple[str, ...] | None) -> list[str]:
    if not asked:
        return names
    wanted = list(asked)
    if wanted == ["none"]:
        return []
    unknown = [name for name in wanted if name not in names]
    if unknown:
        raise PluginError(
            f"{NARROW_VARIABLE} names a plugin that is not installed: {', '.join(unknown)}; "
            f"installed: {', '.join(names) or 'none'}"
        )
    return wanted


def family_folders() -> list[Path]:
    """Folders with family files that plugins add."""
    return [Path(folder) for folders in manager().hook.add_families() for folder in folders]


def _called(implementation: Any, kind: str, owner: str) -> dict[str, Any]:
    """What one plugin registers of a kind.

    Raises:
        PluginError: it raises, or returns no mapping.
    """
    try:
        found = implementation.function()
    except Exception as error:  # somebody else's hook runs here; its error names the plugin
        raise PluginError(
            f"the plugin '{owner}' cannot register what it has of the kind {kind}",
            where=KINDS[kind],
            found=f"{type(error).__name__}: {error}",
        ) from error
    if not isinstance(found, Mapping):
        raise PluginError(
            f"the plugin '{owner}' returns no mapping from names",
            where=KINDS[kind],
            expected="a mapping from names to builders",
            found=type(found).__name__,
        )
    return dict(found)


class Components:
    """Everything that plugins and the built-in modules offer, by kind and name.

    Args:
        plugins: the manager to ask.
    """

    def __init__(self, plugins: pluggy.PluginManager) -> None:
        self._offers: dict[str, dict[str, Any]] = {kind: {} for kind in KINDS}
        self._owners: dict[tuple[str, str], str] = {}
        for kind, hook in KINDS.items():
            self._collect(plugins, kind, hook)

    def _collect(self, plugins: pluggy.PluginManager, kind: str, hook: str) -> None:
        overridden: dict[str, str] = {}
        for implementation in getattr(plugins.hook, hook).get_hookimpls():
            owner = implementation.plugin_name
            for name, builder in _called(implementation, kind, owner).items():
                replaces = isinstance(builder, Override)
                claimed = (
                    overridden if replaces else {n: o for (k, n), o in self._owners.items() if k == kind}
                )
                if name in claimed and (replaces or name not in overridden):
                    raise PluginError(
                        f"the plugins '{claimed[name]}' and '{owner}' both offer the {kind} '{name}'; "
                        "rename one, or let one of them wrap its builder in Override"
                    )
                if replaces:
                    overridden[name] = owner
                elif name in overridden:
                    continue
                self._offers[kind][name] = builder.builder if replaces else builder
                self._owners[kind, name] = owner

    def get(self, kind: str, name: str) -> Any:
        """The builder of this kind and name.

        Raises:
            PluginError: none offers it.
        """
        offers = self._offers[kind]
        if name not in offers:
            near = difflib.get_close_matches(name, offers, n=1, cutoff=0.5)
            raise PluginError(
                f"no plugin offers the {kind} '{name}'; "
                + (f"did you mean '{near[0]}'?" if near else f"known: {', '.join(sorted(offers)) or 'none'}")
            )
        return offers[name]

    def names(self, kind: str) -> dict[str, str]:
        """Offered names of a kind, with the plugin that offers each."""
        return {name: self._owners[kind, name] for name in sorted(self._offers[kind])}

    def mixer(self, name: str) -> Any:
        """The mixer builder of this name."""
        return self.get("mixer", name)

    def block(self, name: str) -> Any:
        """The decoder-layer builder of this name."""
        return self.get("block", name)

    def frame(self, name: str, plan: Any) -> Any:
        """What stands around the layers of a block kind, made for a plan; None where nothing does."""
        builder = self._offers["frame"].get(name)
        return None if builder is None else builder(plan)

    def injection(self, name: str) -> Any:
        """The builder of what is added to a stream, of this name."""
        return self.get("injection", name)

    def selection(self, name: str) -> Any:
        """The router selection of this name."""
        return self.get("selection", name)


def registered(kind: str) -> set[str]:
    """Names that plugins and the built-in modules offer of a kind, without importing the engine."""
    others = getattr(manager().hook, KINDS[kind])()
    own = _own().values()
    return {name for offers in others for name in offers} | {name for k, name in own if k == kind}


def _own() -> dict[str, tuple[str, str]]:
    """Modules of the engine and of the builtin plugins, with the kind and the name of what each registers."""
    builtin = importlib.import_module(_BUILTIN).COMPONENTS
    return {**standard.COMPONENTS, **{f"{_BUILTIN}.{name}": each for name, each in builtin.items()}}


@_once
def components() -> Components:
    """The components of all plugins, built-in ones included; imports the engine."""
    plugins = manager()
    for module in _own():
        name = f"builtin.{module.rpartition('.')[2]}"
        if not plugins.has_plugin(name):
            plugins.register(importlib.import_module(module), name=name)
    return Components(plugins)
