"""The parts of docs/schema.md on what a family causes at run time: caches, and paths that are declined.

Both are read from the code: a cache from the method that makes it, a reason from the `Decline` with it.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from tables import table

from mlx_experts.engine.dispatch import eligibility, router_eligibility
from mlx_experts.engine.kernels import router_kernel
from mlx_experts.engine.kernels.gpu.pieces import row_product
from mlx_experts.engine.layers.attention import Attention
from mlx_experts.engine.layers.decode import around_attention, around_experts
from mlx_experts.engine.models import decoder
from mlx_experts.plugins import builtin, standard
from mlx_experts.plugins.manager import KINDS

CACHED = ("mixer", "block", "embedding", "injection")
"""The kinds of pieces that may keep something from token to token."""
_CACHE = re.compile(r"\b([A-Z]?\w*Cache(?:List)?)\(")


def modules(kind: str) -> Iterator[tuple[str, ModuleType]]:
    """The pieces of a kind that this package brings: their names and their modules."""
    for path, (each, name) in standard.COMPONENTS.items():
        if each == kind:
            yield name, importlib.import_module(path)
    for path, (each, name) in builtin.COMPONENTS.items():
        if each == kind:
            yield name, importlib.import_module(f"{builtin.__name__}.{path}")


def makers() -> Iterator[tuple[str, str, type]]:
    """Every piece that makes a cache of its own: its kind, its name and its class."""
    yield "mixer", "gqa", Attention
    for kind in CACHED:
        for name, module in sorted(modules(kind)):
            # A layer that hands on its mixer's cache makes none.
            if _CACHE.search(_source(made := _class(module, kind, name))):
                yield kind, name, made


def _class(module: ModuleType, kind: str, name: str) -> type:
    """The class of a piece; of one that a function chooses, the first that says what it keeps."""
    made = getattr(module, KINDS[kind])()[name]
    if isinstance(made, type):
        return made
    own = (each for each in vars(module).values() if getattr(each, "__module__", "") == module.__name__)
    return next(each for each in own if isinstance(each, type) and "make_cache" in vars(each))


def _source(made: type) -> str:
    """The text that makes the cache of a class, with what it calls of the classes below."""
    text = ""
    for owner in made.__mro__:
        own = vars(owner).get("make_cache")
        if own is not None:
            text += inspect.getsource(own)
            if "super()" not in text and "self._made()" not in text:
                break
            text += inspect.getsource(vars(owner)["_made"]) if "_made" in vars(owner) else ""
    return text


def caches() -> str:
    """The caches by the piece that makes them, and those that a backbone may take in place of mlx-lm's."""
    rows = []
    for kind, name, made in makers():
        kept = inspect.cleandoc(made.make_cache.__doc__ or "").replace("\n", " ")
        classes = dict.fromkeys(_CACHE.findall(_source(made)))
        rows.append((kind, f"`{name}`", kept, ", ".join(f"`{each}`" for each in classes)))
    instead = [(f"`{name}`", _summary(module)) for name, module in sorted(modules("cache"))]
    return (
        "## Caches\n\nWhat a piece keeps from token to token, and the caches that hold it: mlx-lm's, and "
        "those of `engine/layers/caches`. `CacheList` holds several. A decoder layer that is not listed "
        "hands on its mixer's.\n\n"
        + table(("kind", "name", "what is kept", "caches"), rows)
        + "\nWhat `backbone.cache` may name.\n\n"
        + table(("name", "what it is"), instead)
    )


def _summary(module: ModuleType) -> str:
    return inspect.cleandoc(module.__doc__ or "").split("\n\n")[0].replace("\n", " ")


def fallbacks() -> str:
    """What runs in plain MLX, by the part of a model, and the operations that stand in for Metal kernels."""
    experts = [(f"`{_reason(rule)}`", _doc(rule)) for rule in eligibility.RULES]
    parts = {
        "Routing runs as plain MLX, and the experts stay fused": (
            router_eligibility.steps_of,
            router_eligibility._normalise,
            router_kernel.check,
        ),
        "A layer's attention or experts run as they are, beside pieces that are compiled for one token": (
            decoder._parts_of,
            around_attention,
            around_experts,
            row_product.check,
            row_product.check_heads,
        ),
    }
    text = (
        "## Fallbacks\n\nWhat the fused paths leave to plain MLX, with the reason that `registry inspect` "
        "and the trace give. The result is the same. `{}` stands for what is only known when it runs.\n\n"
        "Experts are gathered unless each of these holds.\n\n" + table(("reason", "what must hold"), experts)
    )
    for what, sources in parts.items():
        rows = dict.fromkeys(row for source in sources for row in declines(source))
        text += f"\n{what}.\n\n" + table(("reason", "asked for", "found", "then"), [*rows])
    stand_ins = [(f"`{name}`", _summary(module)) for name, module in sorted(modules("fallbacks"))]
    return (
        f"{text}\nWhat `backbone.fallbacks` may name: plain operations for a model of mlx-lm whose kernels "
        "need Metal.\n\n" + table(("name", "what it is"), stand_ins)
    )


def _doc(rule: Callable[..., Any]) -> str:
    return inspect.cleandoc(rule.__doc__ or "").replace("\n", " ")


def _reason(rule: Callable[..., Any]) -> str:
    """The reason that a rule of experts gives."""
    (reason,) = {row[0].strip("`") for row in declines(rule)}
    return reason


def declines(source: Callable[..., Any] | ModuleType) -> list[tuple[str, str, str, str]]:
    """Each `Decline` that a function or module states: reason, what it asks for, what it found, what then."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(source)))
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Decline":
            reason, *words = (_said(argument) for argument in node.args)
            if reason != "{}":
                found.append((f"`{reason}`", *words))
    return found  # type: ignore[return-value]


def _said(node: ast.expr) -> str:
    """A text of the code, with `{}` for what is only known when it runs."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
    return "{}"
