"""An installed plugin adds a family and overrides a built-in piece, without a line changed here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PLUGIN = Path(__file__).parent / "example_plugin"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which pip has installed the example plugin."""
    import shutil

    source = tmp_path_factory.mktemp("source") / "plugin"
    shutil.copytree(PLUGIN, source)
    target = tmp_path_factory.mktemp("site")
    options = ["--quiet", "--disable-pip-version-check", "--no-deps", "--no-build-isolation"]
    pip = [sys.executable, "-m", "pip", "install", *options, "--target", str(target), str(source)]
    subprocess.run(pip, check=True)
    return target


def run(site: Path, code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": paths, **environment},
    )


LIST = "from mlx_experts.registry.cli import run; raise SystemExit(run(['list', '--json']))"
BUILD = """
import mlx.core as mx
from mlx_experts.engine.models.known_families import catalog
from mlx_experts.engine.tools.family_check import check_family
from mlx_experts.plugins.manager import components
report = check_family(catalog().load("example_even_moe"))
assert report.ok, report.steps
assert report.fused == report.moe_layers > 0
print(components().names("selection")["sparsemixer"])
"""


def test_plugin_family_is_listed(site: Path) -> None:
    result = run(site, LIST)
    assert result.returncode == 0, result.stderr
    assert "example_even_moe" in {row["family"] for row in json.loads(result.stdout)}


def test_plugin_family_builds_and_dispatches_fused_and_the_override_wins(site: Path) -> None:
    result = run(site, BUILD)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "example"


def test_plugin_can_be_left_out(site: Path) -> None:
    result = run(site, LIST, MLX_EXPERTS_PLUGINS="none")
    assert "example_even_moe" not in {row["family"] for row in json.loads(result.stdout)}


def test_narrowing_to_a_plugin_that_is_not_installed_is_an_error(site: Path) -> None:
    result = run(site, LIST, MLX_EXPERTS_PLUGINS="exampel")
    assert result.returncode == 1
    assert "exampel" in result.stderr
    assert "installed: example" in result.stderr
    assert "Traceback" not in result.stderr


def test_hook_calls_are_printed_on_request(site: Path) -> None:
    result = run(site, LIST, MLX_EXPERTS_TRACE_PLUGINS="1")
    assert "add_families" in result.stderr
