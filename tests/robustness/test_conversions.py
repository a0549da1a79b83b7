"""Converting twice changes nothing, and stored offsets are undone exactly once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_experts.engine.loading.api import save_model
from mlx_experts.engine.models.known_families import catalog
from mlx_experts.engine.weights.conversion_ops import ConvOperation

FAMILIES = [name for name in catalog().names() if catalog().load(name).backbone is None]
OFFSET = [name for name in FAMILIES if catalog().load(name).norm.offset == "load"]


def kernels(model: Any) -> list[str]:
    """Names in the tree of the convolutions that original files turn."""
    found = []
    for op in model.converter.ops:
        if isinstance(op, ConvOperation):
            names = [op.target.fill({"layer": i}) for i in range(model.args.plan.sizes.num_layers)]
            found += [name for name in names if name in model.converter.tree.shapes]
    return found


def head() -> dict[str, mx.array]:
    """A tensor of a prediction head, which every family ignores."""
    return {"mtp.norm.weight": mx.ones((64,))}


@pytest.mark.report("NRM-01")
@pytest.mark.parametrize("name", OFFSET)
def test_an_original_is_shifted_and_a_conversion_that_keeps_its_prediction_head_is_not(
    name: str, lab: Any, tmp_path: Path
) -> None:
    model, config = lab.tiny(name)
    want = lab.parameters(model)
    converted = model.converter.written(want) | head()
    original = model.converter.export(want, 0) | head()
    norms = [n for n in want if model.converter._is_centred_norm(n)]
    assert norms
    assert sum(mx.array_equal(original.get(n, mx.array(0)), want[n]).item() for n in norms) == 0
    for label, tensors in (("converted", converted), ("original", original)):
        loaded, _, _ = lab.load(lab.write(tmp_path / label, tensors, config))
        got = lab.parameters(loaded)
        assert all(mx.allclose(got[n], want[n], atol=1e-6).item() for n in norms)


@pytest.mark.report("NRM-01")
@pytest.mark.parametrize("name", [n for n in OFFSET if n != "step3p5"])
@pytest.mark.parametrize("turned", [True, False])
def test_the_kernels_tell_an_original_even_where_experts_were_rearranged(
    name: str, turned: bool, lab: Any, tmp_path: Path
) -> None:
    """Experts one by one beside converted kernels are no original; stacked ones beside raw kernels are."""
    model, config = lab.tiny(name)
    want = lab.parameters(model)
    raw = model.converter.export(want, 0)
    tree = model.converter.written(want)
    tensors = dict(tree)
    if turned:
        for kernel in kernels(model):
            tensors[kernel] = tensors[kernel].swapaxes(1, 2)
        tensors |= {n: v - 1.0 for n, v in tree.items() if model.converter._is_centred_norm(n)}
    else:
        tensors = {n: v for n, v in tensors.items() if "switch_mlp" not in n}
        tensors |= {n: v for n, v in raw.items() if ".experts." in n}
    loaded, _, _ = lab.load(lab.write(tmp_path, tensors, config))
    got = lab.parameters(loaded)
    assert all(mx.allclose(got[n], want[n], atol=1e-6).item() for n in want)


@pytest.mark.report("NRM-03")
@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_saved_is_loaded_and_saved_again_bit_by_bit(name: str, lab: Any, tmp_path: Path) -> None:
    model, config = lab.tiny(name)
    files = []
    for turn in "abc":
        save_model(tmp_path / turn, model, config)
        model, config, _ = lab.load(tmp_path / turn, dtype="float32")
        files.append(dict(mx.load(str(tmp_path / turn / "model.safetensors"))))
    assert lab.same(files[1], files[0]) == []
    assert lab.same(files[2], files[0]) == []
