"""Checkpoints that mlx-lm wrote load here with its logits, and what is saved here loads there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model as load_in_mlx_lm
from mlx_lm.utils import quantize_model
from mlx_lm_models import CONFIGS, IDS, PATCHED, config_of, make_model, save_in_mlx_lm

from mlx_experts import adopt, load_model, save_model, trace


def largest_difference(model: Any, other: Any) -> float:
    """Of the logits, relative to the largest."""
    got, want = model(IDS).astype(mx.float32), other(IDS).astype(mx.float32)
    return (mx.abs(got - want).max() / mx.abs(want).max()).item()


@pytest.mark.parametrize("model_type", sorted(CONFIGS))
def test_full_precision_checkpoint_of_mlx_lm_loads_with_its_logits(model_type: str, tmp_path: Path) -> None:
    config = config_of(model_type)
    theirs = make_model(config)
    save_in_mlx_lm(tmp_path, theirs, config)
    ours, _ = load_model(tmp_path)
    assert largest_difference(ours, theirs) < 1e-5


@pytest.mark.parametrize("model_type", sorted(set(CONFIGS) - set(PATCHED)))
def test_four_bit_checkpoint_travels_both_ways(model_type: str, tmp_path: Path) -> None:
    config = config_of(model_type)
    save_in_mlx_lm(tmp_path / "theirs", *quantize_model(make_model(config), config, 32, 4))
    theirs, _ = load_in_mlx_lm(tmp_path / "theirs")
    ours, saved = load_model(tmp_path / "theirs")
    # The CPU's kernels sum in another order than MLX's products.
    assert largest_difference(ours, theirs) < 5e-5
    save_model(tmp_path / "ours", ours, saved)
    back, _ = load_in_mlx_lm(tmp_path / "ours")
    assert largest_difference(back, theirs) < 1e-6


# Whose experts are not in a block of their own, or whose block in mlx-lm lacks a part.
NOT_ADOPTED = {"dbrx": "has no 'switch_mlp'"}
NOT_ADOPTED |= dict.fromkeys(("ernie4_5_moe", "ernie4_5_moe_zero"), "has no 'moe_statics'")
NOT_ADOPTED |= dict.fromkeys(("gemma4", "gemma4_text"), "parts of the decoder layer")


@pytest.mark.parametrize("model_type", sorted(set(CONFIGS) - {"granitemoehybrid_dense"}))
def test_adopting_a_four_bit_model_keeps_its_logits_and_runs_fused(model_type: str) -> None:
    config = config_of(model_type)
    model, _ = quantize_model(make_model(config), config, 32, 4)
    names = {name for name, _ in tree_flatten(model.parameters())}
    want = [model(IDS[:1]), model(IDS[:1, :1])]
    mx.eval(want)
    report = adopt(model)
    assert {name for name, _ in tree_flatten(model.parameters())} == names
    trace.reset()
    got = [model(IDS[:1]), model(IDS[:1, :1])]
    mx.eval(got)
    for after, before in zip(got, want, strict=True):
        assert (mx.abs(after - before).max() < 1e-5 * mx.abs(before).max()).item()
    if model_type in NOT_ADOPTED:
        assert report.kept
        assert not report.replaced
        assert all(NOT_ADOPTED[model_type] in reason for reason in report.kept.values())
    else:
        assert report.replaced
        assert not report.kept
    assert {row.layer for row in trace.snapshot() if row.path == "fused"} == set(report.replaced)
