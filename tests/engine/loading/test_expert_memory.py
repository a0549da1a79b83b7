"""A model whose experts stay in files computes what the whole one does; what breaks it has a message."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
from copy import deepcopy
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.utils import quantize_model

from mlx_experts import load, load_model, save_model, stream_generate, trace
from mlx_experts.engine.dispatch.expert_dispatch import in_slots
from mlx_experts.engine.dispatch.trace import memory_line
from mlx_experts.engine.kernels import expert_weights
from mlx_experts.engine.kernels.cpu import experts as cpu
from mlx_experts.engine.kernels.memory.slots import ExpertSlots
from mlx_experts.engine.kernels.request import Decline
from mlx_experts.engine.layers.module_tree import find
from mlx_experts.engine.loading import expert_memory
from mlx_experts.engine.models.base import LanguageModel
from mlx_experts.engine.tools.inspect import inspect
from mlx_experts.engine.tools.memory.pack import Quantised, pack
from mlx_experts.engine.tools.routing import blocks_of, record_routing
from mlx_experts.registry.cli import run
from mlx_experts.registry.errors import CheckpointError, ConfigError, SettingError

DEMO = Path(str(files("mlx_experts").joinpath("demo")))
IDS = mx.array([[5, 9, 2, 7, 30, 8, 100, 6, 11, 3, 250, 17]])
TEXT = "A mixture-of-experts model"


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The demo checkpoint in files that a test may break."""
    return Path(shutil.copytree(DEMO, tmp_path / "demo"))


def text_of(tokens: int = 12, **options: object) -> str:
    model, tokenizer = load(DEMO, **options)
    return "".join(each.text for each in stream_generate(model, tokenizer, TEXT, max_tokens=tokens))


@pytest.mark.parametrize("fused", [None, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tokens_and_logits_are_those_of_the_whole_model(fused: bool | None, dtype: str) -> None:
    whole, _ = load_model(DEMO, fused=fused, dtype=dtype)
    part, _ = load_model(DEMO, fused=fused, dtype=dtype, expert_memory="0.6MB")
    assert {block.slots.slots for _, block in blocks_of(part) if block.slots} == {5, 6}
    for ids in (IDS, IDS[:, :1], IDS[:, :2]):
        np.testing.assert_array_equal(*(np.array(model(ids).astype(mx.float32)) for model in (whole, part)))


def test_generated_text_is_the_same() -> None:
    assert text_of(expert_memory="0.6MB") == text_of()


def test_the_trace_counts_hits_misses_and_bytes() -> None:
    model, _ = load_model(DEMO, expert_memory="1MB")
    mx.eval(model(IDS[:, :1]))
    trace.reset()
    mx.eval(model(IDS[:, :1]))
    total = trace.memory_total()
    assert total is not None
    assert (total.calls, total.misses, total.bytes_read) == (4, 0, 0)
    assert total.hits == sum(block.top_k for _, block in blocks_of(model))
    mx.eval(model(IDS))
    total = trace.memory_total()
    assert total is not None
    slots = blocks_of(model)[0][1].slots
    assert slots is not None
    assert total.misses > 0
    assert total.bytes_read == total.misses * slots.bytes_each
    assert total.stall > 0
    assert memory_line(total) in str(trace)


def test_the_least_recently_used_expert_leaves() -> None:
    model, _ = load_model(DEMO, expert_memory="0.6MB")
    slots = blocks_of(model)[0][1].slots
    assert slots is not None
    trace.reset()
    for expert in range(slots.slots):
        list(slots.parts(np.array([expert])))
    list(slots.parts(np.array([0])))
    list(slots.parts(np.array([slots.slots])))
    assert (slots.account.row.hits, slots.account.row.misses) == (1, slots.slots + 1)
    list(slots.parts(np.array([0])))
    assert slots.account.row.misses == slots.slots + 1
    list(slots.parts(np.array([1])))
    assert slots.account.row.misses == slots.slots + 2


def test_a_budget_for_all_experts_keeps_the_layers_whole() -> None:
    model, _ = load_model(DEMO, expert_memory="1GB")
    assert all(block.slots is None for _, block in blocks_of(model))


def test_an_index_that_is_no_expert_is_named() -> None:
    model, _ = load_model(DEMO, expert_memory="0.6MB")
    slots = blocks_of(model)[0][1].slots
    assert slots is not None
    with pytest.raises(IndexError, match="expert 16 of 16"):
        list(slots.parts(np.array([1, 16])))


def test_routing_is_recorded_as_for_the_whole_model() -> None:
    found = []
    for budget in (None, "0.6MB"):
        model, _ = load_model(DEMO, expert_memory=budget)
        with record_routing(model) as routing:
            mx.eval(model(IDS))
        found.append(routing)
    for whole, part in zip(found[0].layers, found[1].layers, strict=True):
        np.testing.assert_array_equal(whole.picks, part.picks)
        np.testing.assert_array_equal(whole.saliency, part.saliency)


def test_what_needs_all_experts_is_refused(tmp_path: Path) -> None:
    model, config = load_model(DEMO, expert_memory="0.6MB")
    with pytest.raises(SettingError, match="cannot be written"):
        save_model(tmp_path / "out", model, config)
    with pytest.raises(SettingError, match="cannot be copied"):
        deepcopy(model)
    with pytest.raises(ConfigError, match="cannot be left out"):
        blocks_of(model)[0][1].keep_experts([0, 1, 2, 3])
    with pytest.raises(ConfigError, match="spread over ranks"):
        blocks_of(model)[0][1].cuts()


def test_a_budget_below_the_least_says_the_least(capsys: pytest.CaptureFixture[str]) -> None:
    least = inspect(DEMO, expert_memory="1MB").memory
    assert least is not None
    for arguments in (["inspect", str(DEMO)], ["generate", str(DEMO), "--prompt", "A"]):
        assert run([*arguments, "--expert-memory", "100kB"]) == 1
        said = capsys.readouterr().err
        assert "does not hold the experts of one token" in said
        assert f"{-(-least.least_budget // 1000) / 1000:.3f}MB" in said
    load_model(DEMO, expert_memory=least.least_budget)
    with pytest.raises(SettingError, match="does not hold"):
        load_model(DEMO, expert_memory=least.least_budget - 1)


def test_a_file_that_is_written_to_is_noticed(copy: Path) -> None:
    model, _ = load_model(copy, expert_memory="0.6MB")
    (file,) = copy.glob("*.safetensors")
    os.utime(file, (1, 1))
    with pytest.raises(CheckpointError, match="changed while its experts were in use") as caught:
        mx.eval(model(IDS))
    assert str(file) in str(caught.value)


def test_a_file_that_is_cut_short_is_noticed(copy: Path) -> None:
    model, _ = load_model(copy, expert_memory="0.6MB")
    (file,) = copy.glob("*.safetensors")
    os.truncate(file, 1000)
    with pytest.raises(CheckpointError, match="changed while its experts were in use"):
        mx.eval(model(IDS))


def test_a_file_that_is_removed_is_read_to_the_end(copy: Path) -> None:
    model, _ = load_model(copy, expert_memory="0.6MB")
    whole, _ = load_model(copy)
    (file,) = copy.glob("*.safetensors")
    file.unlink()
    np.testing.assert_array_equal(np.array(model(IDS)), np.array(whole(IDS)))


def test_after_a_failed_read_nothing_wrong_is_in_the_slots(copy: Path) -> None:
    whole, _ = load_model(copy)
    model, _ = load_model(copy, expert_memory="0.6MB")
    (file,) = copy.glob("*.safetensors")
    before = file.stat()
    os.utime(file, (1, 1))
    with pytest.raises(CheckpointError):
        mx.eval(model(IDS))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    np.testing.assert_array_equal(np.array(model(IDS)), np.array(whole(IDS)))


def test_the_plan_is_what_loading_takes() -> None:
    found = inspect(DEMO, expert_memory="1MB")
    assert found.memory is not None
    model, _ = load_model(DEMO, expert_memory="1MB")
    blocks = [block for _, block in blocks_of(model)]
    held = [block.slots.slots * block.slots.bytes_each for block in blocks if block.slots]
    assert found.memory.slot_bytes == sum(held) <= 10**6
    slots = [block.slots.slots for block in blocks if block.slots]
    assert found.memory.slots == (min(slots), max(slots))
    assert found.memory.peak_bytes > found.memory.process_bytes + found.weight_bytes


def test_planning_takes_no_memory() -> None:
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    found = inspect(DEMO, expert_memory="1MB")
    assert mx.get_peak_memory() - before < found.weight_bytes / 20


def test_fewer_experts_a_token(capsys: pytest.CaptureFixture[str]) -> None:
    model, config = load_model(DEMO, experts_per_token=1)
    other, _ = load_model(DEMO, model_config={"num_experts_per_tok": 1})
    assert {block.top_k for _, block in blocks_of(model)} == {1}
    assert config["num_experts_per_tok"] == 1
    np.testing.assert_array_equal(np.array(model(IDS)), np.array(other(IDS)))
    assert run(["generate", str(DEMO), "-p", "A", "-m", "1", "--experts-per-token", "17"]) == 1
    assert "from 1 to 16" in capsys.readouterr().err


@pytest.mark.parametrize("options", [{"experts_per_token": 1}, {"model_config": {"num_experts_per_tok": 1}}])
def test_another_number_of_experts_is_said(
    options: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    load_model(DEMO, **options)
    assert "a token picks 1 experts; the checkpoint was made for" in caplog.text


def logits(model: LanguageModel, ids: mx.array = IDS) -> np.ndarray:
    return np.array(model(ids % model.plan.sizes.vocab_size).astype(mx.float32))


def test_a_packed_checkpoint_is_the_same_model(tmp_path: Path) -> None:
    whole, _ = load_model(DEMO)
    pack(DEMO, tmp_path / "packed")
    for options in ({}, {"expert_memory": "0.6MB"}):
        np.testing.assert_array_equal(logits(load_model(tmp_path / "packed", **options)[0]), logits(whole))
    assert (tmp_path / "packed" / "tokenizer.json").is_file()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["packed"]


def test_packing_to_four_bits_is_what_mlx_lm_quantises(tmp_path: Path) -> None:
    source = Path(__file__).parents[2] / "cases" / "qwen3_moe" / "yarn" / "hub"
    model, config = load_model(source, dtype="stored")
    model, _ = quantize_model(model, config, 32, 4)
    pack(source, tmp_path / "packed", quantised=Quantised(4, 32))
    loaded, _ = load_model(tmp_path / "packed", dtype="stored")
    stored, packed = (dict(tree_flatten(each.parameters())) for each in (loaded, model))
    assert stored.keys() == packed.keys()
    for name, value in packed.items():
        assert mx.array_equal(stored[name], value).item(), name
    trial, _ = load_model(tmp_path / "packed", expert_memory="20kB")
    np.testing.assert_allclose(logits(trial), logits(loaded), atol=1e-4)


def test_a_format_that_mlx_lacks_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["pack", str(DEMO), "--output", str(tmp_path / "out"), "--bits", "7"]) == 1
    assert "MLX has no such format" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_packing_does_not_overwrite(tmp_path: Path) -> None:
    (tmp_path / "note").write_text("mine")
    with pytest.raises(SettingError, match="there already"):
        pack(DEMO, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["note"]


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path) -> None:
    """A limit on the size of files stands for the disk's end."""
    limit = 1_000_000

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    command = [sys.executable, "-m", "mlx_experts", "pack", str(DEMO), "--output", str(tmp_path / "out")]
    done = subprocess.run(command, preexec_fn=limited, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert "The checkpoint cannot be written." in done.stderr
    assert "nothing was left behind" in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def updated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots as a GPU has them: arrays that MLX updates, and not memory that is written to."""

    def made(*arguments: Any, in_place: bool, **options: Any) -> ExpertSlots:
        return ExpertSlots(*arguments, in_place=False, **options)

    monkeypatch.setattr(expert_memory, "ExpertSlots", made)


def test_slots_that_are_updated_hold_what_those_that_are_written_to_hold(updated: None) -> None:
    whole, _ = load_model(DEMO, fused=False)
    part, _ = load_model(DEMO, fused=False, expert_memory="0.6MB")
    for ids in (IDS, IDS[:, :1], IDS[:, :2]):
        np.testing.assert_array_equal(logits(part, ids), logits(whole, ids))


def test_a_kernel_that_reads_slots_is_given_slots(updated: None) -> None:
    """As a GPU's kernel is: it knows nothing of files, and leaves what does not fit to gathered products."""
    whole, part = (blocks_of(load_model(DEMO, expert_memory=b)[0])[0][1] for b in (None, "0.6MB"))
    experts = [expert_weights.read(find(b, b.experts_path), b.activation) for b in (whole, part)]
    assert experts[0] is not None
    assert experts[1] is not None
    slots = experts[1].slots
    assert slots is not None
    runs = [cpu.prepare(replace(each, slots=None), mx.float32) for each in experts]
    placed = in_slots(runs[1], experts[1])
    x = mx.random.normal((1, whole.input_width), key=mx.random.key(3))
    for first in range(0, 12, 3):
        picks, shares = mx.array([[first, first + 2]]), mx.array([[0.25, 0.75]])
        got, want = placed(x, picks, shares), runs[0](x, picks, shares)
        assert isinstance(got, mx.array)
        np.testing.assert_array_equal(np.array(got), np.array(want))
    many = mx.arange(slots.slots + 1)[None]
    declined = placed(x, many, mx.ones(many.shape))
    assert isinstance(declined, Decline)
    assert declined.rule == "expert memory"
