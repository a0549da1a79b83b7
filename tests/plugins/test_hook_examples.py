"""Every hook has one example, which runs, and which the page of the hooks shows."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mlx_experts.plugins import hookspecs

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "plugins"
HOOKS = [
    n for n, _ in inspect.getmembers(hookspecs, inspect.isfunction) if n.startswith(("add_", "register_"))
]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    families = tmp_path_factory.mktemp("families")
    command = [sys.executable, str(Path(__file__).with_name("run_examples.py")), str(EXAMPLES), str(families)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    results: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return results


def test_every_hook_has_one_example() -> None:
    assert sorted(path.stem for path in EXAMPLES.glob("*.py")) == sorted(HOOKS)


@pytest.mark.parametrize("hook", [hook for hook in HOOKS if hook != "register_kernels"])
def test_the_family_of_the_example_passes_its_check(hook: str, ran: dict[str, Any]) -> None:
    assert ran[hook] == {"ok": True, "steps": []}


def test_the_pieces_that_no_family_check_shows_were_called(ran: dict[str, Any]) -> None:
    assert ran["counters"]["fallbacks"] > 0
    assert ran["counters"]["caches"] > 0


KERNEL = """
import mlx.core as mx, sys
from pathlib import Path
from mlx_experts.plugins.manager import add_plugin_file
add_plugin_file(Path(sys.argv[1]))
from mlx_experts import trace
from mlx_experts.engine.models.known_families import catalog
from mlx_experts.engine.tools.family_check import build_tiny
from mlx_experts.registry.resolve.tiny_config import tiny_config
family = catalog().load("mixtral")
model = build_tiny(family, tiny_config(family))
model.eval()
mx.eval(model(mx.array([[1]])), model(mx.array([[1, 2, 3]])))
print(*sorted({(row.path, row.rows, row.reason) for row in trace.snapshot()}), sep="\\n")
print(*{row.note for row in trace.snapshot()})
"""


def test_the_kernel_takes_one_row_of_float32_and_says_why_not_more() -> None:
    command = [sys.executable, "-c", KERNEL, str(EXAMPLES / "register_kernels.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "('fused', '1', 'plain_products')" in done.stdout
    assert "plain_products declined" in done.stdout


@pytest.mark.parametrize("hook", HOOKS)
def test_the_page_shows_the_example(hook: str) -> None:
    page = (ROOT / "docs" / "hooks.md").read_text(encoding="utf-8")
    assert (EXAMPLES / f"{hook}.py").read_text(encoding="utf-8").strip() in page
