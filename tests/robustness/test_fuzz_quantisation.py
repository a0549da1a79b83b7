"""Any quantisation entry over any planes ends in a model that runs or in one clear error.

Every run tries the same few examples; `pytest --hypothesis-profile long` goes looking for new ones.
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_experts.engine.loading.api import load_model
from mlx_experts.engine.tools.inspect import inspect_checkpoint
from mlx_experts.registry.checkpoint.checkpoint import Checkpoint
from mlx_experts.registry.errors import RegistryError

MODES = {"affine": (4, 32), "mxfp4": (4, 32), "mxfp8": (8, 32), "nvfp4": (4, 16)}
FAMILIES = ("qwen3_moe", "deepseek_v3", "gpt_oss")
ROOM = 64_000_000

PLAIN = (
    st.none()
    | st.booleans()
    | st.sampled_from([-1, 0, 1, 2, 3, 4, 5, 6, 7, 8, 16, 32, 64, 128, 2**31, 10**30, 0.5, float("inf")])
    | st.sampled_from(["affine", "mxfp4", "nvfp4", "fp8", "int", "4", "", "pack-quantized", "dense", "NVFP4"])
    | st.text(max_size=4)
)
SCALARS = st.fixed_dictionaries(
    {}, optional={"bits": PLAIN, "group_size": PLAIN, "mode": PLAIN, "global_scale": PLAIN}
)
MODULES = st.sampled_from(
    [
        "lm_head",
        "model.embed_tokens",
        "model.layers.1.mlp.gate",
        "model.layers.1.mlp.switch_mlp.down_proj",
        "model.layers.0.self_attn.q_proj",
        "language_model.model.layers.0.self_attn.o_proj",
        "model.layers.1.mlp.experts.3.up_proj",
        "model.layers.99.mlp",
        "*",
        "",
    ]
)
OWN = st.builds(
    lambda scalars, rest: {**scalars, **rest},
    SCALARS,
    st.dictionaries(MODULES, PLAIN | SCALARS | st.lists(PLAIN, max_size=2), max_size=3),
)
GROUP = st.fixed_dictionaries(
    {},
    optional={
        "format": PLAIN,
        "weights": PLAIN
        | st.fixed_dictionaries(
            {}, optional={"num_bits": PLAIN, "group_size": PLAIN, "type": PLAIN, "block_structure": PLAIN}
        ),
        "targets": PLAIN,
    },
)
FOREIGN = st.fixed_dictionaries(
    {
        "quant_method": PLAIN
        | st.sampled_from(["fp8", "awq", "gptq", "compressed-tensors", "modelopt", "mxfp4", "mxfp8"])
    },
    optional={
        "bits": PLAIN,
        "group_size": PLAIN,
        "weight_block_size": PLAIN | st.lists(PLAIN, max_size=3),
        "format": PLAIN,
        "config_groups": PLAIN
        | st.dictionaries(st.sampled_from(["group_0", "a"]), PLAIN | GROUP, max_size=2),
        "quant_algo": PLAIN,
        "quantization": PLAIN | SCALARS,
        "version": PLAIN,
        "checkpoint_format": PLAIN,
        "scale_fmt": PLAIN,
    },
)
ENTRIES = st.fixed_dictionaries(
    {}, optional={"quantization": OWN | FOREIGN | PLAIN, "quantization_config": FOREIGN | OWN | PLAIN}
)
DTYPES = (mx.uint8, mx.uint32, mx.int32, mx.float16, mx.bfloat16, mx.float32)
# What may happen to one tensor on its way to disk.
CHANGES = st.sampled_from(
    ["cast", "view", "cut", "longer", "turned", "flat", "scalar", "gone", "scale_inv", "packed"]
)


def changed(tensors: dict[str, mx.array], name: str, change: str, dtype: mx.Dtype) -> dict[str, mx.array]:
    """The tensors with one of them in another type, shape or company."""
    value, result = tensors[name], dict(tensors)
    if change == "gone":
        del result[name]
    elif change == "cast":
        result[name] = value.astype(dtype)
    elif change == "view" and value.ndim and value.shape[-1] * value.dtype.size % dtype.size == 0:
        result[name] = value.view(dtype)
    elif change == "cut" and value.ndim and value.shape[-1] > 1:
        result[name] = value[..., : value.shape[-1] // 2]
    elif change == "longer" and value.ndim:
        result[name] = mx.concatenate([value, value], axis=-1)
    elif change == "turned" and value.ndim > 1:
        result[name] = value.swapaxes(-1, -2)
    elif change == "flat":
        result[name] = value.flatten()
    elif change == "scalar":
        result[name] = value.flatten()[0]
    elif change == "scale_inv":
        result[f"{name}_scale_inv"] = mx.ones((1, 1), dtype=dtype)
    elif change == "packed" and name.endswith(".weight"):
        result[f"{name}_packed"] = result.pop(name).astype(mx.uint8)
    return {n: mx.contiguous(v) for n, v in result.items()}


def test_any_entry_over_any_planes_gives_a_model_that_runs_or_an_error(lab: Any, tmp_path: Path) -> None:
    stored = {}
    for name in FAMILIES:
        model, config = lab.tiny(name)
        for mode, (bits, group) in MODES.items():
            stored[name, mode] = lab.pack(lab.parameters(model), bits, group, mode)[0], config
        stored[name, "plain"] = lab.parameters(model), config

    @given(
        st.sampled_from(sorted(stored)),
        ENTRIES,
        st.lists(st.tuples(st.integers(0, 10**6), CHANGES, st.sampled_from(DTYPES)), max_size=2),
    )
    def holds(base: tuple[str, str], entry: dict[str, Any], changes: list[tuple[int, str, mx.Dtype]]) -> None:
        tensors, config = stored[base]
        for number, change, dtype in changes:
            names = sorted(tensors)
            tensors = changed(tensors, names[number % len(names)], change, dtype)
        folder = lab.write(tmp_path, tensors, {**config, **entry})
        size = (folder / "model.safetensors").stat().st_size
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        with lab.within(20), suppress(RegistryError):
            inspect_checkpoint(Checkpoint.open(folder))
            loaded, _ = load_model(folder)
            mx.eval(loaded(mx.array([[1, 2, 3]])))
            mx.eval(loaded(mx.array([[4]])))
        assert mx.get_peak_memory() - before < 16 * size + ROOM

    holds()


@pytest.mark.parametrize("entry", [7, [], "4", {"bits": 4, "quant_method": "nf5"}])
def test_an_entry_that_is_none_is_named(entry: Any, lab: Any, tmp_path: Path) -> None:
    model, config = lab.tiny("qwen3_moe")
    folder = lab.write(tmp_path, lab.parameters(model), {**config, "quantization_config": entry})
    with pytest.raises(RegistryError, match="quantization_config"):
        load_model(folder)
    assert json.loads((folder / "config.json").read_text())["quantization_config"] == entry
