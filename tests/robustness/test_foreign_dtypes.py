"""Every dtype that safetensors can hold, for every plane of other libraries' formats: right, or refused."""

from __future__ import annotations

import functools
import json
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from foreign_encoders import Encoder, Planes, compressed, integers, nvfp4

from mlx_experts.registry.errors import RegistryError

BITS = {
    "BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8,
    "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32,
    "U32": 32, "F32": 32, "C64": 64, "F64": 64, "I64": 64, "U64": 64,
}  # fmt: skip
OWN = {mx.float32: "F32", mx.uint32: "U32", mx.int32: "I32", mx.int64: "I64", mx.uint8: "U8"}
NUMPY = {"F16": np.float16, "F32": np.float32, "F64": np.float64}
WHOLE = {f"{sign}{bits}": np.dtype(f"{sign.lower()}{bits // 8}") for sign in "IU" for bits in (8, 16, 32, 64)}


def gptq(weight: mx.array, number: int) -> tuple[Planes, mx.array]:
    """GPTQ's words of four bits, along the input axis, with zero points stored less one."""
    planes, value = integers(4, 32)(weight, number)
    scale = planes["weight_scale"].T
    zeros = mx.full((scale.shape[0], scale.shape[1] // 8), 0x77777777, dtype=mx.int32)
    return {"qweight": planes["weight_packed"].T, "qzeros": zeros, "scales": mx.contiguous(scale)}, value


def fp8(weight: mx.array, number: int) -> tuple[Planes, mx.array]:
    """DeepSeek's: bytes of e4m3, and a scale for each block of 128 by 128."""
    scale = mx.full((-(-weight.shape[0] // 128), -(-weight.shape[1] // 128)), 0.03125)
    packed = mx.to_fp8(weight / 0.03125)
    return {"weight": packed, "weight_scale_inv": scale}, mx.from_fp8(packed, mx.float32) * 0.03125


def awq(weight: mx.array, number: int) -> tuple[Planes, mx.array]:
    """AWQ's words of four bits, along the output axis, of every eight neighbours the even ones first."""
    planes, value = gptq(weight, number)
    levels = (
        planes["qweight"].view(mx.uint32)[:, None] >> mx.arange(0, 32, 4, dtype=mx.uint32)[:, None]
    ) & 15
    levels = levels.reshape(-1, weight.shape[0])
    zeros = mx.full((planes["scales"].shape[0], weight.shape[0] // 8), 0x88888888, dtype=mx.uint32)
    cut = levels.reshape(levels.shape[0], -1, 8)[..., [0, 2, 4, 6, 1, 3, 5, 7]]
    words = mx.sum(cut << mx.arange(0, 32, 4, dtype=mx.uint32), axis=-1).astype(mx.uint32)
    return {
        "qweight": words.view(mx.int32),
        "qzeros": zeros.view(mx.int32),
        "scales": planes["scales"],
    }, value


def microscaled(mode: str, names: tuple[str, str], container: mx.Dtype = mx.uint8) -> Encoder:
    """Numbers of four or eight bits, and an exponent as a byte for each 32 of them.

    Args:
        names: what a file calls both planes.
        container: what the numbers lie in.
    """

    def encode(weight: mx.array, number: int) -> tuple[Planes, mx.array]:
        packed, exponents = mx.quantize(weight, mode=mode)
        value = mx.dequantize(packed, exponents, mode=mode, dtype=mx.float32)
        return {names[0]: packed.view(container), names[1]: exponents}, value

    return encode


def own(mode: str) -> dict[str, Any]:
    """What MLX's tools write of a mode."""
    return {"group_size": 32, "bits": int(mode[-1]), "mode": mode}


FORMATS: dict[str, tuple[Callable[..., tuple[Planes, mx.array]], dict[str, Any]]] = {
    "compressed": (integers(4, 32), compressed(4, 32)),
    "nvfp4": (nvfp4, {"quant_method": "modelopt", "quant_algo": "NVFP4"}),
    "gptq": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True}),
    "fp8": (fp8, {"quant_method": "fp8", "weight_block_size": [128, 128]}),
    "awq": (awq, {"quant_method": "awq", "version": "gemm", "bits": 4, "group_size": 32}),
    "mxfp4": (
        microscaled("mxfp4", ("weight_packed", "weight_scale")),
        compressed(4, 32, "mxfp4-pack-quantized"),
    ),
    "mxfp8": (microscaled("mxfp8", ("weight", "weight_scale_inv")), {"quant_method": "mxfp8"}),
    "mxfp4 of MLX": (microscaled("mxfp4", ("weight", "scales"), mx.uint32), own("mxfp4")),
    "mxfp8 of MLX": (microscaled("mxfp8", ("weight", "scales"), mx.uint32), own("mxfp8")),
}
# What each plane is, where its bytes are no uint8.
STORED = {
    ("fp8", "weight"): "F8_E4M3",
    ("nvfp4", "weight_scale"): "F8_E4M3",
    ("mxfp8", "weight"): "F8_E4M3",
}
# Planes whose values nothing reads, and dtypes that make a plane one of another format.
UNREAD = {"input_scale", "weight_shape"}
OTHERS = {
    "fp8": {("weight", "F8_E5M2"), ("weight_scale_inv", "U8"), ("weight_scale_inv", "F8_E8M0")},
    # Values of four bits with such scales are mxfp4.
    "mxfp8": {("weight", "F4")},
}


def held(value: np.ndarray, own: str, dtype: str) -> bytes | None:
    """The same values in another type; None where that type has no such values or no such number of bytes."""
    if own == "F32" and dtype in NUMPY:
        return value.astype(NUMPY[dtype]).tobytes()
    if own == "F32" and dtype == "BF16":
        return (value.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    if own in WHOLE and dtype in WHOLE and WHOLE[own].itemsize == WHOLE[dtype].itemsize:
        return value.tobytes()
    if {own, dtype} <= {"F8_E4M3", "U8"} or (own, dtype) == ("U8", "F8_E8M0"):
        return value.tobytes()
    return None


def write(
    folder: Path, tensors: Mapping[str, mx.array], kinds: Mapping[str, str], odd: str, dtype: str, config: Any
) -> bool:
    """A checkpoint in which one tensor has another dtype; says whether its values are the same."""
    header: dict[str, Any] = {}
    body, end = [], 0
    same = True
    for name, array in tensors.items():
        value, kind = np.array(array), kinds[name]
        raw = value.tobytes()
        if name == odd:
            kept = held(value, kind, dtype)
            same, kind = kept is not None, dtype
            raw = kept if kept is not None else bytes([1] * (value.size * BITS[dtype] // 8))
        header[name] = {"dtype": kind, "shape": list(value.shape), "data_offsets": [end, end + len(raw)]}
        body.append(raw)
        end += len(raw)
    text = json.dumps(header).encode()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.safetensors").write_bytes(b"".join([struct.pack("<Q", len(text)), text, *body]))
    (folder / "config.json").write_text(json.dumps(config))
    return same


@functools.cache
def blocks(lab: Any) -> tuple[Planes, dict[str, str], dict[str, str], Any, Planes]:
    """The same of stacks as gpt_oss has them: gate and up in turn, the 16 bytes of a group on an axis."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    model, config = lab.tiny("gpt_oss", sizes)
    values = model.converter.export(lab.parameters(model), 1)
    disk, planes = dict(values), {}
    for name in [n for n in disk if n.endswith(("gate_up_proj", "down_proj"))]:
        packed, exponents = mx.quantize(disk.pop(name), mode="mxfp4")
        value = mx.dequantize(packed, exponents, mode="mxfp4", dtype=mx.float32)
        # Full precision is stored turned.
        values[name] = mx.contiguous(value.swapaxes(1, 2))
        disk[f"{name}_blocks"] = packed.view(mx.uint8).reshape(*exponents.shape, 16)
        disk[f"{name}_scales"] = exponents
        leaf = name.rpartition(".")[2]
        planes |= {f"{leaf}: {plane}": f"{name}_{plane}" for plane in ("blocks", "scales")}
    kinds = {name: OWN[array.dtype] for name, array in disk.items()}
    return disk, kinds, planes, {**config, "quantization_config": {"quant_method": "mxfp4"}}, values


@functools.cache
def stored(lab: Any, form: str) -> tuple[Planes, dict[str, str], dict[str, str], Any, Planes]:
    """A checkpoint of a format, its dtypes, a name of each plane, its config, and what it stands for."""
    encode, entry = FORMATS[form]
    sizes = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 1}
    model, config = lab.tiny("olmoe", sizes)
    disk = model.converter.export(lab.parameters(model), 0)
    values, kinds, planes = dict(disk), {}, {}
    for number, name in enumerate([n for n in disk if n.endswith("proj.weight")]):
        parts, values[name] = encode(disk.pop(name), number)
        base = name.removesuffix("weight")
        disk |= {f"{base}{plane}": mx.contiguous(array) for plane, array in parts.items()}
        for plane in parts:
            kinds[f"{base}{plane}"] = STORED.get((form, plane), OWN[parts[plane].dtype])
            place = "experts" if ".experts.2." in name else "attention"
            planes.setdefault(f"{place}: {plane}", f"{base}{plane}")
    kinds = {name: kinds.get(name, "F32") for name in disk}
    both = {"quantization": entry} if "mode" in entry else {}
    return disk, kinds, planes, {**config, "quantization_config": entry, **both}, values


@pytest.mark.report("C4")
@pytest.mark.filterwarnings("ignore:overflow encountered")
@pytest.mark.parametrize("form", [*FORMATS, "blocks of gpt_oss"])
def test_every_dtype_of_every_plane_of_other_formats_is_right_or_refused(
    form: str, lab: Any, tmp_path: Path
) -> None:
    disk, kinds, planes, config, values = stored(lab, form) if form in FORMATS else blocks(lab)
    plain = {key: value for key, value in config.items() if not key.startswith("quantization")}
    want = lab.logits(lab.load(lab.write(tmp_path / "plain", values, plain))[0])
    wrong = []
    for place, odd in planes.items():
        for dtype, bits in BITS.items():
            if bits < 8 and disk[odd].size * bits % 8:
                continue
            folder = tmp_path / f"{odd}-{dtype}"
            same = write(folder, disk, kinds, odd, dtype, config)
            try:
                got = lab.logits(lab.load(folder)[0])
            except RegistryError as error:
                if dtype == kinds[odd]:
                    wrong.append(f"{place} as {dtype}: refused though it is its own: {error}")
                continue
            leaf, off = odd.rpartition(".")[2], lab.distance(got, want)
            other = (leaf, dtype) in OTHERS.get(form, ())
            if not (off < 2e-2 if same or leaf in UNREAD else other):
                wrong.append(f"{place} as {dtype} {'with' if same else 'without'} its values: {off:.2g} off")
    assert not wrong, "\n".join(wrong)
