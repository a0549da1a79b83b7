"""Every dtype that safetensors can hold, for every kind of tensor of a model: right, or refused by name."""

from __future__ import annotations

import contextlib
import functools
import json
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_experts.engine.tools.inspect import inspect_checkpoint
from mlx_experts.registry.checkpoint.checkpoint import Checkpoint
from mlx_experts.registry.errors import RegistryError

BITS = {
    "BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8,
    "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32,
    "U32": 32, "F32": 32, "C64": 64, "F64": 64, "I64": 64, "U64": 64,
}  # fmt: skip
FLOATS = ("F16", "BF16", "F32", "F64")


def encoded(value: np.ndarray, dtype: str) -> bytes:
    """The values in a float type, and else as many bits of ones and zeros."""
    if dtype == "BF16":
        return (value.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).tobytes()
    if dtype in FLOATS:
        return value.astype({"F16": np.float16, "F32": np.float32, "F64": np.float64}[dtype]).tobytes()
    return bytes([1, 0] * value.size)[: -(-value.size * BITS[dtype] // 8)] + bytes(
        max(0, value.size * BITS[dtype] // 8 - 2 * value.size)
    )


def write(folder: Path, tensors: Mapping[str, mx.array], odd: str, dtype: str, config: Any) -> Path:
    """A checkpoint in which one tensor has its shape and another dtype; written without a library."""
    header: dict[str, Any] = {}
    body, end = [], 0
    spelled = {mx.float32: "F32", mx.uint32: "U32", mx.uint8: "U8"}
    for name, value in tensors.items():
        kind = dtype if name == odd else spelled[value.dtype]
        held = np.array(value)
        raw = encoded(held, kind) if name == odd else held.tobytes()
        header[name] = {"dtype": kind, "shape": list(value.shape), "data_offsets": [end, end + len(raw)]}
        body.append(raw)
        end += len(raw)
    text = json.dumps(header).encode()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.safetensors").write_bytes(b"".join([struct.pack("<Q", len(text)), text, *body]))
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def kinds(lab: Any, name: str, packed: bool) -> tuple[Any, dict[str, mx.array], dict[str, str], Any]:
    """A model, its tensors, and one name of each kind of them."""
    model, config = lab.tiny(name)
    tensors = lab.parameters(model)
    stack = model.converter.stack(model.plan.moe_layers[-1])
    found = {
        "matrix": next(n for n in tensors if n.endswith("o_proj.weight")),
        "norm": next(n for n in tensors if "norm" in n and tensors[n].ndim == 1),
        "embedding": next(n for n in tensors if "embed" in n),
        "experts": f"{stack.module(-1)}.weight",
        "router": next(n for n in tensors if n.endswith("gate.weight")),
    }
    bias = next((n for n in tensors if n.endswith("correction_bias")), None)
    found |= {} if bias is None else {"selection bias": bias}
    if not packed:
        # One expert of a layer in files that have them one by one.
        tensors = model.converter.export(tensors, 0)
        one = next(n for n in tensors if ".experts.3." in n)
        found = {k: n for k, n in found.items() if n in tensors} | {"one expert": one}
        return model, tensors, found, config
    stored, _ = lab.pack(tensors, only=lambda n: n in (found["matrix"], found["experts"]))
    base = {kind: found[kind].removesuffix("weight") for kind in ("matrix", "experts")}
    parts = {f"{k}'s {leaf}": base[k] + leaf for k in base for leaf in ("weight", "scales", "biases")}
    return model, stored, parts, {**config, "quantization": {"bits": 4, "group_size": 32}}


@pytest.fixture(scope="module")
def truths(lab: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, bool], dict[str, mx.array]]:
    """The parameters of a model whose tensors all have their own dtypes, loaded once."""

    @functools.cache
    def loaded(name: str, packed: bool) -> dict[str, mx.array]:
        _, tensors, _, config = kinds(lab, name, packed)
        folder = lab.write(tmp_path_factory.mktemp("truth"), tensors, config)
        found: dict[str, mx.array] = lab.parameters(lab.load(folder)[0])
        return found

    return loaded


@pytest.mark.report("C4")
@pytest.mark.filterwarnings("ignore:overflow encountered")
@pytest.mark.parametrize("packed", [False, True], ids=["float", "packed"])
@pytest.mark.parametrize("name", ["deepseek_v3", "qwen3_next"])
@pytest.mark.parametrize("dtype", BITS)
def test_every_dtype_of_every_kind_of_tensor_is_right_or_refused_by_name_and_dtype(
    dtype: str, name: str, packed: bool, lab: Any, truths: Any, tmp_path: Path
) -> None:
    _, tensors, found, config = kinds(lab, name, packed)
    rounded = truths(name, packed)
    for kind, odd in found.items():
        own = {mx.float32: "F32", mx.uint32: "U32", mx.uint8: "U8"}[tensors[odd].dtype]
        if dtype == own or (BITS[dtype] < 8 and tensors[odd].size * BITS[dtype] % 8):
            continue
        folder = write(tmp_path / kind.replace(" ", "_"), tensors, odd, dtype, config)
        if own == "F32" and dtype in FLOATS:
            held = lab.parameters(lab.load(folder)[0])
            bound = 2.0**-7 if dtype == "BF16" else 2.0**-10
            assert all(mx.allclose(held[n], v, rtol=bound, atol=1e-5).item() for n, v in rounded.items())
            assert inspect_checkpoint(Checkpoint.open(folder)).loadable
            continue
        with pytest.raises(RegistryError) as caught:
            lab.load(folder)
        said = str(caught.value)
        leaf = odd.rpartition(".")[0].rpartition(".")[2]
        assert leaf in said, f"{kind} as {dtype}: {said}"
        shown = {"BOOL": "bool", "U32": "uint32", "U8": "uint8", "C64": "complex64"}.get(dtype, dtype)
        assert dtype in said or shown in said or shown.replace("I", "int") in said, (
            f"{kind} as {dtype}: {said}"
        )
        with contextlib.suppress(RegistryError):
            assert not inspect_checkpoint(Checkpoint.open(folder)).loadable


def test_a_bfloat16_tensor_is_read_bit_for_bit(lab: Any, tmp_path: Path) -> None:
    _, tensors, found, config = kinds(lab, "deepseek_v3", False)
    folder = write(tmp_path, tensors, found["norm"], "BF16", config)
    got = mx.load(str(folder / "model.safetensors"))[found["norm"]]
    assert got.dtype == mx.bfloat16
