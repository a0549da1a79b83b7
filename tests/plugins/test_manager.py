"""Conflicts between plugins, unknown components, and the documentation of every hook."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pluggy
import pytest

from mlx_experts.engine.kernels import activations
from mlx_experts.plugins import hookspecs
from mlx_experts.plugins.hookspecs import Override, hookimpl
from mlx_experts.plugins.manager import KINDS, Components, add_plugin_file, components, registered
from mlx_experts.registry.checks.known_names import ACTIVATIONS, CONFIG_NAMES
from mlx_experts.registry.errors import PluginError

ROOT = Path(__file__).parent.parent.parent
HOOKS = [
    n for n, _ in inspect.getmembers(hookspecs, inspect.isfunction) if n.startswith(("add_", "register_"))
]


def plugin(hook: str, offers: dict[str, Any]) -> SimpleNamespace:
    """A plugin that fills one hook."""

    def implementation() -> dict[str, Any]:
        return offers

    implementation.__name__ = hook
    return SimpleNamespace(**{hook: hookimpl(implementation)})


def collect(**plugins: SimpleNamespace) -> Components:
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    for name, each in plugins.items():
        manager.register(each, name=name)
    return Components(manager)


@pytest.mark.parametrize("hook", sorted(KINDS.values()))
def test_every_offer_is_found_under_its_name(hook: str) -> None:
    kind = next(k for k, h in KINDS.items() if h == hook)
    builder = object()
    found = collect(one=plugin(hook, {"thing": builder}))
    assert found.get(kind, "thing") is builder
    assert found.names(kind) == {"thing": "one"}


@pytest.mark.parametrize("hook", sorted(KINDS.values()))
def test_two_plugins_with_one_name_are_an_error_naming_both(hook: str) -> None:
    with pytest.raises(PluginError, match=r"'(one|two)' and '(one|two)' both offer the .* 'thing'"):
        collect(one=plugin(hook, {"thing": 1}), two=plugin(hook, {"thing": 2}))


@pytest.mark.parametrize("first", ["one", "two"])
def test_an_override_wins_in_either_order(first: str) -> None:
    both = {
        "one": plugin("register_mixers", {"thing": 1}),
        "two": plugin("register_mixers", {"thing": Override(2)}),
    }
    second = "two" if first == "one" else "one"
    assert collect(**{first: both[first], second: both[second]}).get("mixer", "thing") == 2


def test_two_overrides_of_one_name_are_an_error() -> None:
    with pytest.raises(PluginError, match="both offer"):
        collect(
            one=plugin("register_mixers", {"thing": 1}),
            two=plugin("register_mixers", {"thing": Override(2)}),
            three=plugin("register_mixers", {"thing": Override(3)}),
        )


RACE = """
import sys, threading
import mlx_experts.engine.models.decoder
from mlx_experts.plugins.manager import components
sys.setswitchinterval(1e-6)
start, found = threading.Barrier(4), []
def ask():
    start.wait()
    found.append(components())
threads = [threading.Thread(target=ask) for _ in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert len(found) == 4 and len({id(each) for each in found}) == 1
"""


def test_threads_that_ask_first_at_once_get_the_same_pieces() -> None:
    done = subprocess.run([sys.executable, "-c", RACE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_unknown_piece_names_the_nearest() -> None:
    with pytest.raises(PluginError, match="did you mean 'sparsemixer'"):
        components().selection("sparsemixr")


@pytest.mark.parametrize("hook", HOOKS)
def test_every_hook_is_documented(hook: str) -> None:
    assert f"`{hook}(" in (ROOT / "docs" / "hooks.md").read_text()
    assert len(inspect.getdoc(getattr(hookspecs, hook)) or "") > 40


def test_every_hook_has_a_test() -> None:
    assert set(HOOKS) == {*KINDS.values(), "add_families"}


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_the_names_that_are_known_without_the_engine_are_those_that_are_registered(kind: str) -> None:
    assert registered(kind) == set(components().names(kind))


def test_the_activations_that_are_known_without_the_engine_are_those_that_it_has() -> None:
    assert set(ACTIVATIONS) == set(activations.names()) - registered("activation")
    assert set(CONFIG_NAMES.values()) <= set(ACTIVATIONS)


PLUGIN_FILES = {
    "misspelled hook": (
        "from mlx_experts.plugins.hookspecs import hookimpl\n"
        "@hookimpl\ndef register_mixer():\n    return {}\n",
        ["fills a hook that does not exist", "did you mean 'register_mixers'?"],
    ),
    "raises at import": (
        "raise RuntimeError('no such GPU')\n",
        ["cannot be loaded", "RuntimeError: no such GPU"],
    ),
    "does not parse": ("def broken(:\n", ["cannot be loaded", "SyntaxError"]),
    "unknown argument": (
        "from mlx_experts.plugins.hookspecs import hookimpl\n"
        "@hookimpl\ndef register_mixers(model):\n    return {}\n",
        ["cannot be loaded", "model"],
    ),
    "raises when asked": (
        "from mlx_experts.plugins.hookspecs import hookimpl\n"
        "@hookimpl\ndef register_mixers():\n    raise KeyError('x')\n",
        ["cannot register what it has", "KeyError"],
    ),
    "returns a list": (
        "from mlx_experts.plugins.hookspecs import hookimpl\n"
        "@hookimpl\ndef register_mixers():\n    return ['a']\n",
        ["returns no mapping", "list"],
    ),
}
FROM_A_FILE = """
import sys
from pathlib import Path
from mlx_experts.errors import PluginError
from mlx_experts.plugins.manager import add_plugin_file, components
try:
    add_plugin_file(Path(sys.argv[1]))
    components()
except PluginError as error:
    print(error)
    sys.exit(1)
"""


@pytest.mark.parametrize("fault", PLUGIN_FILES)
@pytest.mark.report("M4", "M5")
def test_a_faulty_plugin_is_named_with_its_fault(fault: str, tmp_path: Path) -> None:
    text, wanted = PLUGIN_FILES[fault]
    path = tmp_path / "my_plugin.py"
    path.write_text(text)
    command = [sys.executable, "-c", FROM_A_FILE, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert [part for part in ["'my_plugin'", *wanted] if part not in done.stdout] == []


def test_a_plugin_file_that_is_not_there_or_comes_too_late_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PluginError, match="does not exist"):
        add_plugin_file(tmp_path / "none.py")
    (tmp_path / "late.py").touch()
    components()
    with pytest.raises(PluginError, match="loaded already"):
        add_plugin_file(tmp_path / "late.py")
