"""Rules that the project holds itself to, read off its own files."""

from __future__ import annotations

import re
import statistics
import tomllib
from fnmatch import fnmatch
from pathlib import Path

from mlx_experts.registry.catalog.catalog import Catalog
from mlx_experts.registry.checks.static_check import MAX_LINES
from mlx_experts.registry.settings import variables

ROOT = Path(__file__).parent.parent
PACKAGE = [ROOT / folder for folder in ("api", "registry", "engine", "plugins")]
MODULES = sorted(path for folder in PACKAGE for path in folder.rglob("*.py"))
ENVIRONMENT = ROOT / "docs" / "environment.md"
FAMILIES = sorted((ROOT / "families").glob("*.yaml"))


def test_family_files_are_short() -> None:
    lines = {path.stem: len(path.read_text(encoding="utf-8").splitlines()) for path in FAMILIES}
    assert max(lines.values()) <= MAX_LINES, max(lines, key=lambda name: lines[name])
    assert statistics.median(lines.values()) <= 32
    assert statistics.mean(lines.values()) <= 33


def test_every_family_file_names_the_schema_for_editors() -> None:
    first = "# yaml-language-server: $schema=family.schema.json"
    assert [p.name for p in FAMILIES if p.read_text(encoding="utf-8").splitlines()[0] != first] == []


def test_no_family_is_named_outside_families_and_plugins() -> None:
    """Docstrings may cite the files that mathematics was read from; code may not branch on names."""
    names = {*Catalog().names(), *(t for e in Catalog().entries.values() for t in e.model_types)}
    quoted = re.compile("|".join(rf"[\"']{re.escape(n)}[\"']" for n in sorted(names)))
    found = []
    for path in MODULES:
        if path.is_relative_to(ROOT / "plugins"):
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if quoted.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()}")
    assert found == []


def test_the_modules_are_found() -> None:
    """Else the rules below hold for nothing."""
    folders = {path.relative_to(ROOT).parts[0] for path in MODULES}
    assert folders == {"api", "registry", "engine", "plugins"}
    assert len(FAMILIES) == len(Catalog().names())


def test_every_environment_variable_is_listed() -> None:
    # Most modules ask for a setting and not for its variable.
    used = {
        name
        for path in MODULES
        for name in re.findall(r"MLX_EXPERTS_[A-Z][A-Z_]*", path.read_text(encoding="utf-8"))
    }
    assert used <= {*variables()}
    assert {*variables()} == set(re.findall(r"`(MLX_EXPERTS_\w+)`", ENVIRONMENT.read_text(encoding="utf-8")))


def test_no_module_probes_or_swallows() -> None:
    """No `hasattr`, and no broad `except` but where strangers' code is called.

    What a plugin raises while it is imported or asked is told as the plugin's, and what a command of mlx-lm
    raises as that command's, in the server's thread too. The tokenizers library panics past ``Exception``,
    with a class that cannot be imported. The command line's outermost frame reports bugs, and that of a
    process that runs kernels hands them to the one that asked.
    """
    broad = []
    for path in MODULES:
        text = path.read_text(encoding="utf-8")
        assert "hasattr(" not in text, path
        at = str(path.relative_to(ROOT))
        broad += [at for _ in re.findall(r"^\s*except(?:[ (].*\b(?:Base)?Exception\b.*)?:", text, re.M)]
    assert broad == [
        "engine/loading/api.py",
        "engine/loading/api.py",
        "engine/tools/device/workers.py",
        "engine/tools/mlx_lm_tools.py",
        "engine/tools/mlx_lm_tools.py",
        "plugins/manager.py",
        "plugins/manager.py",
        "registry/cli/__init__.py",
    ]


def test_carried_cases_stay_small() -> None:
    size = sum(path.stat().st_size for path in (ROOT / "tests" / "cases").rglob("*") if path.is_file())
    assert size <= 30_000_000


def test_a_wheel_holds_every_package_and_every_data_file() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    tops = ("registry", "engine", "plugins", "families")
    folders = {path.parent for top in tops for path in (ROOT / top).rglob("__init__.py")}
    names = {"mlx_experts", *(f"mlx_experts.{'.'.join(f.relative_to(ROOT).parts)}" for f in folders)}
    assert set(settings["packages"]) == names
    for folder in folders:
        name = f"mlx_experts.{'.'.join(folder.relative_to(ROOT).parts)}"
        patterns = settings["package-data"].get(name, [])
        data = [p.name for p in folder.iterdir() if p.is_file() and p.suffix not in (".py", ".pyc")]
        assert [each for each in data if not any(fnmatch(each, pattern) for pattern in patterns)] == [], name
