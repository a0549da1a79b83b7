"""Kernels are compiled beside a load, by several processes, and only what is not on disk."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from numba import types
from numba.core import sigutils

from mlx_experts.engine.kernels.cpu import start, warm
from mlx_experts.engine.kernels.cpu.numba_forms import Forms

if start.unavailable() is not None:
    pytest.skip("no CPU kernels", allow_module_level=True)

# A fresh process with empty caches: what was compiled ahead is what a token called, and nothing was missing.
_FRESH = """
import sys
import mlx.core as mx
mx.set_default_device(mx.cpu)
from mlx_experts import load, stream_generate
from mlx_experts.engine.kernels.cpu import start, warm
model, tokenizer = load("api/demo")
started = len(start.WARMING)
texts = [each.text for each in stream_generate(model, tokenizer, "A mixture-of-experts", max_tokens=3)]
called = [each for each in warm.needed() if each.function().signatures]
loaded = [each.name for each in called if not sum(each.function().stats.cache_hits.values())]
wrong = [each.name for each in called if len(each.function().signatures) != 1]
print(started, len(texts), len(called), loaded, wrong)
"""


def test_a_fresh_machine_compiles_in_several_processes_what_its_first_tokens_call(tmp_path: Path) -> None:
    given = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "numba"), "MLX_EXPERTS_CACHE_DIR": str(tmp_path)}
    for name in [name for name in given if name.startswith("MLX_EXPERTS_FUSED")]:
        del given[name]
    run = subprocess.run(
        [sys.executable, "-c", _FRESH], env=given, capture_output=True, text=True, timeout=400
    )
    started, texts, called, *rest = run.stdout.split(maxsplit=3)
    assert int(started) >= (2 if len(os.sched_getaffinity(0)) > 1 else 0), run.stderr[-800:]
    assert int(texts) == 3
    assert int(called) >= 4
    # Every function came from the disk, with the one signature that was compiled ahead.
    assert rest == ["[] []\n"]


def test_the_shares_hold_everything_once_and_end_at_about_one_time() -> None:
    everything = list(warm.needed())
    shares = warm._shares(everything, 3)
    assert sorted(each.name for share in shares for each in share) == sorted(each.name for each in everything)
    seconds = [sum(each.seconds for each in share) for share in shares]
    assert max(seconds) - min(seconds) <= max(each.seconds for each in everything)
    assert len(warm._shares(everything[:1], 3)) == 1


def test_every_signature_is_one_that_numba_reads_for_a_function_that_is_there() -> None:
    for each in warm.ALL:
        arguments, _ = sigutils.normalize_signature(each.signature)
        found = each.found()
        own = 1 + len(found.parts) if isinstance(found, Forms) else 0
        assert own + len(arguments) == each.function().py_func.__code__.co_argcount, each.name
        assert all(isinstance(argument, types.Type) for argument in arguments)


def test_nothing_is_started_where_everything_is_on_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm.Compiled, "on_disk", lambda self: True)
    monkeypatch.setattr(start, "WARMING", [])
    warm.begin.cache_clear()
    warm.begin()
    assert start.WARMING == []
    warm.begin.cache_clear()
