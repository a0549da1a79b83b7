"""A tied head is the embedding, in full precision and packed, whether or not a copy of it is stored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_experts.engine.loading.api import save_model
from mlx_experts.engine.models.known_families import catalog
from mlx_experts.registry.spec.values import Ref


def _tied(name: str) -> dict[str, Any] | None:
    """What to state in a config so that the family ties its head; None where it never does."""
    family = catalog().load(name)
    tied = family.head.tied
    if family.backbone is not None or tied is False or family.embedding.kind != "standard":
        return None
    if tied is True:
        return {}
    assert isinstance(tied, Ref)
    flat = dict.fromkeys(tied.keys, True)
    return {**flat, family.text_keys[0]: flat} if family.text_config else flat


FAMILIES = [name for name in catalog().names() if _tied(name) is not None]


@pytest.mark.report("TIE-01", "TIE-03", "C13")
@pytest.mark.parametrize("name", FAMILIES)
def test_a_tied_head_is_the_embedding(name: str, lab: Any, tmp_path: Path) -> None:
    """Without a head on disk and with a copy of the embedding; anything else is a head of its own."""
    model, config = lab.tiny(name, _tied(name))
    assert model.args.plan.head.tied
    tensors, want = lab.parameters(model), lab.logits(model)
    names, head = model.args.plan.family.names, model.args.plan.head
    wrapper = f"{names.wrapper}." if names.wrapper else ""
    embedding, copy = f"{wrapper}{names.root}.{names.embed}.", f"{wrapper}{head.path}."
    plain = lab.load(lab.write(tmp_path / "plain", tensors, config), dtype="float32")[0]
    assert lab.distance(lab.logits(plain), want) < 1e-6
    held = lab.parameters(plain)
    both = {**tensors, f"{copy}weight": tensors[f"{embedding}weight"]}
    loaded, _, report = lab.load(lab.write(tmp_path / "copy", both, config), dtype="float32")
    # Of one config, and with the same parameters, it is the same model.
    assert lab.same(lab.parameters(loaded), held) == []
    assert report.ignored["head equal to the tied embedding"] == 1
    other = {**tensors, f"{copy}weight": tensors[f"{embedding}weight"] + 1}
    own, settled, report = lab.load(lab.write(tmp_path / "other", other, config), dtype="float32")
    assert "another head, which is used" in " ".join(report.notices)
    wide = mx.array_equal(lab.parameters(own)[f"{copy}weight"], tensors[f"{embedding}weight"] + 1)
    assert wide.item()
    untied = lab.logits(own)
    assert lab.distance(untied, want) > 1e-3
    save_model(tmp_path / "again", own, settled)
    again = lab.load(tmp_path / "again", dtype="float32")
    assert lab.distance(lab.logits(again[0]), untied) < 1e-6
    assert again[2].notices == []
    moved = {**tensors, f"{copy}weight": tensors[f"{embedding}weight"]}
    if mx.array_equal(moved.pop(f"{embedding}weight"), tensors[f"{embedding}weight"]).item():
        swapped = lab.load(lab.write(tmp_path / "swapped", moved, config), dtype="float32")[0]
        assert lab.same(lab.parameters(swapped), held) == []
    packed, values = lab.pack(tensors, only=lambda n: n.startswith(embedding))
    quantised = {**config, "quantization": {"bits": 4, "group_size": 32}}
    truth = lab.logits(lab.load(lab.write(tmp_path / "values", values, config), dtype="float32")[0])
    got = lab.load(lab.write(tmp_path / "packed", packed, quantised), dtype="float32")[0]
    assert lab.distance(lab.logits(got), truth) < 1e-4
    twice = packed | _renamed(packed, embedding, copy)
    second = lab.load(lab.write(tmp_path / "packed copy", twice, quantised), dtype="float32")[0]
    assert lab.same(lab.parameters(second), lab.parameters(got)) == []


def _renamed(tensors: dict[str, mx.array], old: str, new: str) -> dict[str, mx.array]:
    return {new + n.removeprefix(old): value for n, value in tensors.items() if n.startswith(old)}
