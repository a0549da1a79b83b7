"""Imports run one way: families → registry → engine → api; plugins' specs and manager import none of them."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

HEAVY = ["mlx", "mlx_lm", "numpy", "transformers", "torch", "safetensors", "huggingface_hub", "matplotlib"]

# Imports every module below a package, one after another, and tells what each was first to bring in.
SCRIPT = """
import importlib, json, pkgutil, sys
def modules(name):
    yield name
    module = importlib.import_module(name)
    for info in pkgutil.iter_modules(getattr(module, "__path__", []), f"{name}."):
        yield from modules(info.name)
forbidden, culprits = json.loads(sys.argv[2]), {}
for name in modules(sys.argv[1]) if sys.argv[3] == "deep" else [sys.argv[1]]:
    importlib.import_module(name)
    for other in forbidden:
        if other in sys.modules:
            culprits.setdefault(other, name)
print(json.dumps({"culprits": culprits, "modules": sorted(sys.modules)}))
"""


def imported(module: str, forbidden: list[str], deep: bool = False) -> dict:
    """What importing a module, and with ``deep`` all modules below it, brings into a fresh process."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, module, json.dumps(forbidden), "deep" if deep else ""],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("module", ["mlx_experts", "mlx_experts.families"])
def test_the_package_itself_imports_nothing_of_weight(module):
    forbidden = [*HEAVY, "pydantic", "mlx_experts.registry", "mlx_experts.engine", "mlx_experts.plugins"]
    assert imported(module, forbidden)["culprits"] == {}


def test_no_module_of_the_registry_imports_the_engine_or_an_array_library():
    result = imported(
        "mlx_experts.registry", [*HEAVY, "mlx_experts.engine", "mlx_experts.plugins.builtin"], True
    )
    assert result["culprits"] == {}
    assert {
        "mlx_experts.registry.checkpoint.safetensors_header",
        "mlx_experts.registry.cli.families.check",
    } <= set(result["modules"])


@pytest.mark.parametrize("module", ["mlx_experts.plugins.hookspecs", "mlx_experts.plugins.manager"])
def test_the_plugin_specs_and_manager_import_neither_registry_nor_engine(module):
    forbidden = [
        *HEAVY,
        "pydantic",
        "mlx_experts.registry.spec",
        "mlx_experts.engine",
        "mlx_experts.plugins.builtin",
    ]
    assert imported(module, forbidden)["culprits"] == {}


def test_no_module_of_the_engine_imports_a_verb_of_the_command_line():
    result = imported("mlx_experts.engine", ["mlx_experts.registry.cli"], True)
    assert result["culprits"] == {}
    assert "mlx.core" in result["modules"]


def test_the_fast_check_needs_no_array_library():
    script = (
        "import sys; from mlx_experts.registry.cli import run; code = run(['check', '--fast']); "
        "print(sorted({'mlx', 'numpy', 'mlx_experts.engine'} & set(sys.modules)), file=sys.stderr); "
        "sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "[]\n")


def test_an_import_the_wrong_way_is_seen():
    assert imported("mlx_experts.engine.weights.reader", ["mlx"])["culprits"] == {
        "mlx": "mlx_experts.engine.weights.reader"
    }
