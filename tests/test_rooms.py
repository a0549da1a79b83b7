"""Imports between rooms run one way; the sources are read, and docs/architecture.md lists the rooms."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# A module may import from its own room and from those before it.
ORDER = (
    "registry.errors",
    "registry.settings",
    "registry.spec",
    "registry.catalog",
    "registry.resolve",
    "registry.checkpoint",
    "registry.quantization",
    "plugins.hookspecs",
    "plugins.standard",
    "plugins.manager",
    "registry.checks",
    "engine.kernels",
    "engine.dispatch",
    "engine.layers",
    "engine.weights",
    "engine.models",
    "engine.loading",
    "engine.tools",
    "plugins.builtin",
    "registry.cli",
)
MODULES = sorted(path for top in ("registry", "engine", "plugins") for path in (ROOT / top).rglob("*.py"))
MOST_MODULES, MOST_LINES = 16, 600


def room_of(module: str) -> str | None:
    """The room of a module; None for the packages that only hold rooms."""
    return next((room for room in ORDER if module == room or module.startswith(f"{room}.")), None)


def name_of(path: Path) -> str:
    """A module's dotted name below the package."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imports(source: str) -> Iterator[str]:
    """Modules of this package that a source imports, also inside functions, below the package's name."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("mlx_experts"):
            base = node.module.removeprefix("mlx_experts").removeprefix(".")
            yield from (f"{base}.{alias.name}".removeprefix(".") for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (
                alias.name.removeprefix("mlx_experts.")
                for alias in node.names
                if alias.name.startswith("mlx_experts.")
            )


def upward(module: str, source: str) -> list[str]:
    """What a module imports from rooms that come after its own."""
    mine = room_of(module)
    if mine is None:
        return [name for name in imports(source) if room_of(name)]
    rank = ORDER.index(mine)
    return [name for name in imports(source) if (room := room_of(name)) and ORDER.index(room) > rank]


@pytest.mark.parametrize("top", ["registry", "engine", "plugins"])
def test_no_module_imports_from_a_later_room(top: str) -> None:
    found = {
        name: wrong
        for path in MODULES
        if path.is_relative_to(ROOT / top)
        and (wrong := upward(name := name_of(path), path.read_text(encoding="utf-8")))
    }
    assert found == {}


def test_an_import_upward_is_seen_also_inside_a_function() -> None:
    source = "def f():\n    from mlx_experts.engine.tools import parity\n"
    assert upward("engine.layers.moe", source) == ["engine.tools.parity"]
    assert upward("engine.tools.draft", source) == []


def test_every_module_lies_in_a_room() -> None:
    folders = {"registry", "engine", "plugins"}
    assert [name for path in MODULES if room_of(name := name_of(path)) is None and name not in folders] == []


def test_no_room_is_crowded_and_no_module_long() -> None:
    folders = {path.parent for path in MODULES}
    modules = {folder: [p for p in folder.glob("*.py") if p.name != "__init__.py"] for folder in folders}
    assert {str(f.relative_to(ROOT)): len(m) for f, m in modules.items() if len(m) > MOST_MODULES} == {}
    lines = {name_of(path): len(path.read_text(encoding="utf-8").splitlines()) for path in MODULES}
    assert {name: count for name, count in lines.items() if count > MOST_LINES} == {}


def test_every_room_says_what_lives_there_and_what_may_import_it() -> None:
    rooms = {path.parent for path in MODULES} - {ROOT / "registry", ROOT / "engine", ROOT / "plugins"}
    words = {r: ast.get_docstring(ast.parse((r / "__init__.py").read_text(encoding="utf-8"))) for r in rooms}
    assert [str(room) for room, text in words.items() if not text or len(text.splitlines()) < 2] == []
