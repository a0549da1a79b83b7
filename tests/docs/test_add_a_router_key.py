"""docs/add-a-router-key.md: its three changes, applied to a copy of the package, are all that a key needs."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "add-a-router-key.md").read_text(encoding="utf-8")
ROOMS = {"api": "", "registry": "registry", "engine": "engine", "families": "families", "plugins": "plugins"}
CHANGES = re.findall(r"```diff\n(.*?)```", PAGE, re.DOTALL)

USE = """
import mlx.core as mx
import mlx.nn as nn
from mlx_experts.engine.dispatch.router_eligibility import steps_of
from mlx_experts.engine.kernels.request import Decline
from mlx_experts.engine.layers.router import Router
from mlx_experts.registry.spec.family import RouterSpec
from mlx_experts.registry.spec.json_schema import family_schema
from mlx_experts.registry.spec.written import Written

stated = Written[RouterSpec].model_validate({"score": "softmax", "drop_below": {"from": "least"}})
assert stated.drop_below.keys == ("least",)
assert "drop_below" in family_schema()["$defs"]["RouterSpec"]["else"]["properties"]
spec = RouterSpec.model_validate({"score": "softmax", "drop_below": 0.3})
router, moe = Router(spec, 4, 4, 3, 1e-6), nn.Module()
router.build(moe)
moe.gate.weight = mx.diag(mx.log(mx.array([0.5, 0.3125, 0.125, 0.0625])))
for x in (mx.ones((1, 4)), mx.ones((2, 4))):
    weights = mx.sort(router.bind(moe)(x)[1], axis=-1)
    assert mx.allclose(weights, mx.array([0.0, 0.3125, 0.5])), weights
reason = steps_of(spec, 4, 3)
assert isinstance(reason, Decline) and reason.rule == "drop_below", reason
assert not isinstance(steps_of(RouterSpec.model_validate({"score": "softmax"}), 4, 3), Decline)
"""


def applied(change: str, package: Path) -> Path:
    """Apply the hunk of a change; the file that it changes."""
    head, _, body = change.partition("\n@@")
    name = re.search(r"^\+\+\+ b/(\S+)$", head, re.MULTILINE)
    assert name is not None
    lines = body.splitlines()[1:]
    before, after = ("\n".join(line[1:] for line in lines if line[:1] != sign) for sign in "+-")
    path = package / name[1]
    text = path.read_text(encoding="utf-8")
    assert text.count(before) == 1, f"{name[1]} has changed; write the change in the page again"
    path.write_text(text.replace(before, after), encoding="utf-8")
    return path


@pytest.fixture
def package(tmp_path: Path) -> Path:
    copy = tmp_path / "mlx_experts"
    for room, place in ROOMS.items():
        shutil.copytree(ROOT / room, copy / place, ignore=shutil.ignore_patterns("demo", "__pycache__"))
    return copy


def run(package: Path) -> subprocess.CompletedProcess[str]:
    start = f"import sys; sys.path.insert(0, {str(package.parent)!r}); sys.meta_path[:] = "
    start += "[each for each in sys.meta_path if 'editable' not in str(each).lower()]\n"
    return subprocess.run([sys.executable, "-c", start + USE], capture_output=True, text=True)


def test_three_changes_make_a_key(package: Path) -> None:
    changed = [applied(change, package) for change in CHANGES]
    assert [path.relative_to(package).as_posix() for path in changed] == [
        "registry/spec/family.py",
        "engine/layers/router.py",
        "engine/dispatch/router_eligibility.py",
    ]
    done = run(package)
    assert done.returncode == 0, done.stderr
