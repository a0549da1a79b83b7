"""What a token and a conversion cost, as far as it can be counted rather than timed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm import utils
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchGLU

from mlx_experts.engine.dispatch.policy import SWITCH
from mlx_experts.engine.kernels import activations, gather
from mlx_experts.engine.loading.api import save_model
from mlx_experts.engine.models.known_families import catalog
from mlx_experts.engine.tools import bench_experts as measure
from mlx_experts.engine.tools.family_check import build_tiny

FAMILIES = [name for name in catalog().names() if catalog().load(name).backbone is None]


@pytest.mark.report("PRF-01")
def test_a_measured_speed_comes_with_the_bytes_that_were_read() -> None:
    swiglu, storage = activations.make("swiglu"), measure.Storage("affine", 4, 32)
    layer = measure.random_layer(64, 32, 8, 2, swiglu, storage=storage, dtype=mx.float32)
    result = measure.compare(layer, rounds=2)
    # Codes, and two float32 scales for each group of 32: three matrices of two experts.
    assert result.bytes_per_token == 2 * 3 * 64 * 32 * (4 + 2 * 32 / 32) / 8
    assert result.gigabytes_per_second == pytest.approx(result.bytes_per_token / result.fused_us / 1e3)


@pytest.mark.report("PRF-06")
def test_many_tokens_are_three_products_sorted_by_expert(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, bool]] = []
    product = QuantizedSwitchLinear.__call__

    def counted(self: Any, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        ordered = mx.array_equal(mx.sort(indices.flatten()), indices.flatten()).item()
        seen.append((indices.size, sorted_indices and ordered))
        result: mx.array = product(self, x, indices, sorted_indices)
        return result

    monkeypatch.setattr(QuantizedSwitchLinear, "__call__", counted)
    container = SwitchGLU(64, 32, 8)
    nn.quantize(container, 32, 4)
    container.eval()
    x, indices = mx.random.normal((1, 512, 64)), mx.random.randint(0, 8, (1, 512, 2))
    gather.experts(container, activations.make("swiglu"), x, indices, mx.ones((1, 512, 2)))
    assert seen == [(1024, True)] * 3


@pytest.mark.report("PRF-08")
@pytest.mark.parametrize("name", FAMILIES)
def test_no_layer_waits_for_another_while_a_token_is_put_together(
    name: str, lab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefill and a token are one graph each; the CPU's kernels, which read values, are switched off."""
    monkeypatch.setenv(SWITCH, "0")
    # A key that nothing reads gives a model of its own, which has made no decision yet.
    model, _ = lab.tiny(name, {"kernels": "off"})
    cache = make_prompt_cache(model)
    mx.eval(model(lab.ids, cache=cache))
    calls: list[str] = []
    for function in ("eval", "async_eval"):
        monkeypatch.setattr(mx, function, lambda *a, f=function: calls.append(f))
    logits = [model(lab.ids, cache=cache), model(lab.ids[:, :1], cache=cache)]
    monkeypatch.undo()
    assert calls == []
    assert mx.isfinite(logits[1]).all().item()


@pytest.mark.report("MEM-03")
def test_experts_are_cut_out_one_file_at_a_time_while_they_are_written(
    lab: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = lab.resized("dbrx", num_experts=64)
    config["ffn_config"]["ffn_hidden_size"], config["d_model"] = 256, 128
    family = catalog().load("dbrx")
    assert family.checkpoint.save_as == "per_expert"
    model = build_tiny(family, config)
    monkeypatch.setattr(utils, "make_shards", lambda weights, *_: [{n: v} for n, v in weights.items()])
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    save_model(tmp_path, model, config)
    stack = lab.parameters(model)["transformer.blocks.0.ffn.switch_mlp.gate_proj.weight"]
    assert mx.get_peak_memory() - before < stack.nbytes / 4
