"""Run mlx-lm's own tests twice, on its classes and on this package's, and compare what passes.

The tests come from the source package of the installed mlx-lm, which is fetched with pip and not kept here.
The checkpoint that they would download is replaced by the demo with a chat template. A test that passes on
mlx-lm's classes and not on these is a difference; each must stand with its reason in
mlx_lm_test_differences.yaml.

    python scripts/run_mlx_lm_tests.py [FILE ...] [-k EXPRESSION]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from importlib.metadata import version
from pathlib import Path

import yaml

ROOT = Path(__file__).parent.parent
DEMO = ROOT / "api" / "demo"
DIFFERENCES = Path(__file__).parent / "mlx_lm_test_differences.yaml"
FILES = (
    "test_models.py",
    "test_generate.py",
    "test_prompt_cache.py",
    "test_server.py",
    "test_tuner_utils.py",
    "test_tuner_trainer.py",
    "test_finetune.py",
    "test_utils.py",
    "test_awq.py",
    "test_gptq.py",
    "test_chat.py",
    "test_evaluate.py",
    "test_muse_spark.py",
    "test_deepseek_v41.py",
)
REMOTE = "mlx-community/Qwen1.5-0.5B-Chat-4bit"
# The reason of differences that not every processor has.
BY_PROCESSOR = "precision:"
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"
Results = dict[str, dict[str, str]]


def fetch(folder: Path) -> Path:
    """The tests of the installed version's source package, pointed at the demo."""
    wanted = f"mlx-lm=={version('mlx-lm')}"
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:", wanted]
    subprocess.run([*pip, "--dest", str(folder)], check=True, stderr=subprocess.DEVNULL)
    with tarfile.open(next(folder.glob("*.tar.gz"))) as archive:
        archive.extractall(folder, filter="data")
    tests = next(folder.glob("mlx_lm-*/tests"))
    demo = folder / "demo"
    shutil.copytree(DEMO, demo)
    (demo / "chat_template.jinja").write_text(TEMPLATE)
    for path in tests.glob("*.py"):
        path.write_text(path.read_text(encoding="utf-8").replace(REMOTE, str(demo)), encoding="utf-8")
    return tests


def run(tests: Path, engine: str, files: list[str], expression: str | None) -> Results:
    """Outcome of every test and subtest, by its name."""
    results = tests.parent / f"{engine}.json"
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(__file__).parent),
        "MLX_LM_TESTS_ENGINE": engine,
        "MLX_LM_TESTS_RESULTS": str(results),
        "HF_HUB_OFFLINE": "1",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "mlx_lm_tests_plugin", "-p", "no:cacheprovider"]
    command += ["-W", "ignore", "--tb=line", "--no-header", "-c", os.devnull, "--rootdir", str(tests)]
    selected = ["-k", expression] if expression else []
    subprocess.run([*command, *selected, *files], cwd=tests, env=environment, check=False, stdout=sys.stderr)
    found: Results = json.loads(results.read_text(encoding="utf-8"))
    return found


def differences(theirs: Results, ours: Results) -> dict[str, str]:
    """Tests that pass on mlx-lm's classes and not on ours, with what ours says."""
    nothing: dict[str, str] = {"outcome": "nothing", "says": "it did not run"}
    found = {}
    for name, each in theirs.items():
        other = ours.get(name, nothing)
        if each["outcome"] == "passed" and other["outcome"] not in ("passed", "skipped"):
            found[name] = other["says"]
    for name, each in ours.items():
        if each["outcome"] == "failed" and name not in theirs:
            # A subtest is reported where it fails.
            found[name] = each["says"]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "files", nargs="*", metavar="FILE", help="test files; all that are compared without any"
    )
    parser.add_argument("-k", dest="expression", help="as pytest's")
    asked = parser.parse_args()
    known: dict[str, str] = yaml.safe_load(DIFFERENCES.read_text(encoding="utf-8")) or {}
    with tempfile.TemporaryDirectory() as folder:
        tests = fetch(Path(folder))
        files = asked.files or list(FILES)
        theirs = run(tests, "mlx_lm", files, asked.expression)
        ours = run(tests, "mlx_experts", files, asked.expression)
    found = differences(theirs, ours)
    passed = [name for name, each in theirs.items() if each["outcome"] == "passed"]
    both = [name for name in passed if ours.get(name, {}).get("outcome") == "passed"]
    print(f"mlx-lm {version('mlx-lm')}: {len(passed)} pass on its classes, {len(both)} of these on ours")
    print(f"{len(found)} differences, {len(known)} of them listed")
    new = {name: says for name, says in found.items() if name not in known}
    for name, says in new.items():
        print(f"not listed: {name}\n    {says}")
    whole = not asked.files and not asked.expression
    constant = [name for name, reason in known.items() if not reason.startswith(BY_PROCESSOR)]
    gone = [name for name in constant if name not in found and (whole or name in both)]
    for name in gone:
        print(f"listed, and no longer different: {name}")
    return 2 if new or gone else 0


if __name__ == "__main__":
    sys.exit(main())
