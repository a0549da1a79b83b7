"""mlx-lm's adapters on our models: their shapes, their sums, and what fusing them leaves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear
from mlx_lm.tuner.lora import LoRASwitchLinear
from mlx_lm.tuner.utils import linear_to_lora_layers
from representatives import blocks, one_of_each
from stateful import hands_on

from mlx_experts.engine.loading.api import put_adapters, save_model
from mlx_experts.engine.models.known_families import catalog
from mlx_experts.engine.tools.family_check import build_tiny
from mlx_experts.registry.errors import CheckpointError
from mlx_experts.registry.resolve.tiny_config import tiny_config

FAMILIES = [name for name in catalog().names() if catalog().load(name).backbone is None]
SETTINGS = {"rank": 2, "scale": 4.0, "dropout": 0.0}
MODES = {"affine": (4, 32), "mxfp4": (4, 32)}


def adapted(name: str, mode: str = "") -> tuple[Any, dict[str, Any]]:
    """A tiny model whose experts, and nothing else, carry random adapters."""
    family = catalog().load(name)
    config = tiny_config(family)
    model = build_tiny(family, config)
    if mode:
        bits, group = MODES[mode]
        nn.quantize(model, group, bits, mode=mode, class_predicate=lambda _, m: isinstance(m, SwitchLinear))
        config = {**config, "quantization": {"group_size": group, "bits": bits, "mode": mode}}
    layer = model.layers[model.args.plan.moe_layers[0]]
    kinds = (SwitchLinear, QuantizedSwitchLinear)
    experts = {path for path, module in layer.named_modules() if isinstance(module, kinds)}
    linear_to_lora_layers(model, len(model.layers), {**SETTINGS, "keys": experts})
    mx.random.seed(4)
    leaves = [(n, v.shape) for n, v in tree_flatten(model.parameters()) if "lora_" in n]
    model.load_weights([(n, mx.random.normal(shape) * 0.1) for n, shape in leaves], strict=False)
    model.eval()
    return model, config


@pytest.mark.report("LRA-01")
@pytest.mark.parametrize("name", one_of_each(blocks, [name for name in FAMILIES if not hands_on(name)]))
def test_adapters_of_stacked_experts_are_stacked_and_sum_alike_in_any_order(name: str, lab: Any) -> None:
    """64 pairs are sorted by expert, single tokens are not."""
    model, _ = adapted(name)
    found = [m for m in model.modules() if isinstance(m, LoRASwitchLinear)]
    assert found
    for module in found:
        experts, rows, cols = module.linear.weight.shape
        assert module.lora_a.shape == (experts, 2, cols)
        assert module.lora_b.shape == (experts, rows, 2)
    moe = lab.blocks(model)[0]
    mx.random.seed(6)
    x = mx.random.normal((1, 64, moe._router.dims))
    alone = mx.concatenate([moe.routed(x[:, i : i + 1]) for i in range(64)], axis=1)
    assert float(mx.abs(moe.routed(x) - alone).max()) < 1e-5 * float(mx.abs(alone).max())


@pytest.mark.report("LRA-03", "LRA-05")
@pytest.mark.parametrize("mode", ["", *MODES])
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "nemotron_h", "dbrx"])
def test_a_fused_adapter_stays_in_the_experts_and_keeps_their_format(
    name: str, mode: str, lab: Any, tmp_path: Path
) -> None:
    model, config = adapted(name, mode)
    want = lab.logits(model)
    assert lab.distance(lab.logits(lab.tiny(name)[0]), want) > 0.05
    layers = {n: m for n, m in model.named_modules() if isinstance(m, LoRASwitchLinear)}
    wanted = {}
    for path, module in layers.items():
        added = (module.scale * module.lora_b) @ module.lora_a
        wanted[path] = module.linear, values(module.linear) + added
    model.update_modules(tree_unflatten([(n, m.fuse()) for n, m in layers.items()]))
    model.eval()
    save_model(tmp_path, model, config)
    again, _, report = lab.load(tmp_path, dtype="float32")
    assert {found.mode for found in report.formats.values()} == ({mode} if mode else set())
    experts = dict(again.named_modules())
    for path, (base, value) in wanted.items():
        apart = mx.linalg.norm((values(experts[path]) - value).flatten()).item()
        before = mx.linalg.norm((values(base) - value).flatten()).item()
        # Adapted weights are rounded to four bits anew.
        assert apart < before * (0.25 if mode else 1e-6)
    if not mode:
        assert lab.distance(lab.logits(again), want) < 1e-5


def values(module: nn.Module) -> mx.array:
    """The weights of experts in float32."""
    if not isinstance(module, QuantizedSwitchLinear):
        return module.weight
    about = {"group_size": module.group_size, "bits": module.bits, "mode": module.mode}
    return mx.dequantize(module.weight, module.scales, module.get("biases"), **about).astype(mx.float32)


def saved(model: Any, folder: Path, **changes: Any) -> Path:
    folder.mkdir()
    tensors = {n: v for n, v in tree_flatten(model.parameters()) if "lora_" in n}
    mx.save_safetensors(str(folder / "adapters.safetensors"), tensors)
    keys = sorted({n.split(".", 3)[-1].rsplit(".", 1)[0] for n in tensors})
    about = {"num_layers": len(model.layers), "lora_parameters": {**SETTINGS, "keys": keys}, **changes}
    (folder / "adapter_config.json").write_text(json.dumps(about))
    return folder


def test_saved_adapters_are_put_back(lab: Any, tmp_path: Path) -> None:
    model, _ = adapted("qwen3_moe")
    family = catalog().load("qwen3_moe")
    fresh = build_tiny(family, tiny_config(family))
    put_adapters(fresh, saved(model, tmp_path / "a"))
    assert lab.distance(lab.logits(fresh), lab.logits(model)) < 1e-6


@pytest.mark.parametrize("fault", ["absent", "config", "cut", "other", "lacking"])
def test_adapters_that_do_not_fit_are_refused(fault: str, tmp_path: Path) -> None:
    model, _ = adapted("qwen3_moe")
    folder = saved(model, tmp_path / "a")
    file = folder / "adapters.safetensors"
    if fault == "absent":
        folder = tmp_path / "nowhere"
    elif fault == "config":
        (folder / "adapter_config.json").write_text("{")
    elif fault == "cut":
        file.write_bytes(file.read_bytes()[:-100])
    elif fault == "other":
        mx.save_safetensors(str(file), {"model.layers.0.mlp.other.lora_a": mx.zeros((2, 2))})
    else:
        tensors = dict(mx.load(str(file)))
        mx.save_safetensors(str(file), dict(list(tensors.items())[:-1]))
    family = catalog().load("qwen3_moe")
    with pytest.raises(CheckpointError, match=r"adapter|tensor file"):
        put_adapters(build_tiny(family, tiny_config(family)), folder)
