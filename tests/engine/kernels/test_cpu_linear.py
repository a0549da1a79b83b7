"""The CPU's kernel for linear layers against the float32 truth: formats, dtypes, rows and odd sizes."""

import os
import subprocess
import sys
import threading
import time
from functools import cache
from pathlib import Path
from types import ModuleType

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlx_experts.engine.kernels import expert_weights, naive
from mlx_experts.engine.kernels.cpu import driver, linear, native, stacks, start, unit
from mlx_experts.engine.kernels.cpu.products import amx, tiles
from mlx_experts.engine.kernels.cpu.products import rows as cpu_rows
from mlx_experts.engine.kernels.request import Decline

CLOSE = {mx.float32: 1e-6, mx.bfloat16: 5e-3, mx.float16: 5e-3}
ROWS = (1, 2, 3, 8, 64, 257)
AFFINE = [("affine", bits, group) for bits in (2, 3, 4, 5, 6, 8) for group in (32, 64, 128)]
FORMATS = [*AFFINE, ("mxfp4", 4, 32), ("mxfp8", 8, 32), ("nvfp4", 4, 16), ("plain", 0, 0)]


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Outputs start as NaN, so that one that is not written is seen."""
    monkeypatch.setattr(stacks, "fresh", lambda shape: np.full(shape, np.nan, np.float32))


def layer(kind, outputs, inputs, dtype, bias=False, seed=0):
    """A linear layer of MLX's in one storage format."""
    mode, bits, group = kind
    mx.random.seed(seed)
    made = nn.Linear(inputs, outputs, bias=bias)
    made.set_dtype(dtype)
    return made if mode == "plain" else nn.QuantizedLinear.from_linear(made, group, bits, mode)


def truth(stack, x):
    """The product in float64 of the decoded weights."""
    wide = np.array(naive.dequantised(stack, 0)).astype(np.float64)
    y = np.array(x.astype(mx.float32)).astype(np.float64) @ wide.T
    return y if stack.bias is None else y + np.array(stack.bias.astype(mx.float32))


def error_of(module, x):
    """The kernel's relative RMS error."""
    stack = expert_weights.read_dense(module)
    y = linear.prepare(stack)(x)
    assert y.shape == (*x.shape[:-1], stack.projection.rows)
    assert y.dtype == module(x).dtype
    wanted = truth(stack, x)
    return np.linalg.norm(np.array(y.astype(mx.float32)) - wanted) / np.linalg.norm(wanted)


def inputs_of(rows, width, dtype):
    return mx.random.normal((rows, width), key=mx.random.key(7)).astype(dtype)


@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize("kind", FORMATS, ids=str)
def test_every_format_matches_the_truth_for_any_number_of_rows(monkeypatch, kind, dtype):
    monkeypatch.setattr(stacks, "unit_functions", lambda projection: None)
    module = layer(kind, 37, 384, dtype, bias=True)
    for rows in ROWS:
        assert error_of(module, inputs_of(rows, 384, dtype)) <= CLOSE[dtype], rows


# Each cut of a row, group size and dtype of the scales once: compiling is what takes time.
ON_UNIT = [
    *(((mode, bits, group), mx.float32) for mode, bits, group in AFFINE if group == 64 or bits == 4),
    *((("affine", 4, 64), dtype) for dtype in (mx.bfloat16, mx.float16)),
    *(((kind, bits, 32), mx.bfloat16) for kind, bits in (("mxfp4", 4), ("mxfp8", 8))),
    (("plain", 0, 0), mx.bfloat16),
]
ODD = [(1, 32), (3, 96), (65, 160), (130, 2880), (5, 32 * 67)]
needs_unit = pytest.mark.skipif(not amx.available(), reason="the processor has no matrix unit")


@needs_unit
@pytest.mark.parametrize(("kind", "dtype"), ON_UNIT, ids=str)
def test_the_matrix_unit_is_as_exact_as_float32(kind, dtype):
    module = layer(kind, 37, 384, dtype, bias=True)
    assert linear.prepare(expert_weights.read_dense(module))._plan.on_unit
    for rows in ROWS[1:]:
        assert error_of(module, inputs_of(rows, 384, dtype)) <= CLOSE[dtype], rows


@needs_unit
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [(("plain", 0, 0), mx.float16), (("plain", 0, 0), mx.float32), (("nvfp4", 4, 16), mx.float32)],
    ids=str,
)
def test_weights_that_are_no_bfloat16_are_left_to_vectors(kind, dtype):
    assert not linear.prepare(expert_weights.read_dense(layer(kind, 37, 384, dtype)))._plan.on_unit


@needs_unit
@pytest.mark.parametrize(("outputs", "inputs"), ODD, ids=str)
def test_odd_sizes_match_the_truth_on_the_matrix_unit(outputs, inputs):
    module = layer(("affine", 4, 32), outputs, inputs, mx.float32)
    for rows in (4, 7, 19):
        assert error_of(module, inputs_of(rows, inputs, mx.float32)) <= 1e-6, rows


@pytest.mark.parametrize(("outputs", "inputs"), ODD, ids=str)
@pytest.mark.parametrize(
    "kind", [("affine", 4, 32), ("affine", 3, 32), ("mxfp4", 4, 32), ("plain", 0, 0)], ids=str
)
def test_odd_sizes_match_the_truth(monkeypatch, kind, outputs, inputs):
    monkeypatch.setattr(stacks, "unit_functions", lambda projection: None)
    module = layer(kind, outputs, inputs, mx.float32)
    for rows in (1, 4, 7, 19):
        assert error_of(module, inputs_of(rows, inputs, mx.float32)) <= 1e-6, rows


@pytest.mark.parametrize("width", [1, 7, 33, 100])
def test_plain_weights_of_any_width_match_the_truth(width):
    for dtype in CLOSE:
        for rows in (1, 5):
            module = layer(("plain", 0, 0), 9, width, dtype)
            assert error_of(module, inputs_of(rows, width, dtype)) <= CLOSE[dtype]


def test_several_axes_and_no_rows_keep_their_shape():
    module = layer(("affine", 4, 64), 40, 128, mx.float32)
    run = linear.prepare(expert_weights.read_dense(module))
    assert run(mx.zeros((2, 3, 128))).shape == (2, 3, 40)
    assert run(mx.zeros((2, 0, 128))).shape == (2, 0, 40)


@pytest.mark.parametrize("rows", [1, 5])
def test_threads_give_the_same_bits_as_one(monkeypatch, rows):
    module, x = layer(("affine", 4, 64), 700, 512, mx.float32), inputs_of(rows, 512, mx.float32)
    run = linear.prepare(expert_weights.read_dense(module))
    monkeypatch.setattr(start, "PARALLEL_FROM", 1 << 62)
    once = run(x)
    monkeypatch.setattr(start, "PARALLEL_FROM", 0)
    assert all(mx.array_equal(run(x), once) for _ in range(5))


def test_the_setting_bounds_the_threads(monkeypatch):
    most = start._threads()
    for said, wanted in (("1", 1), ("999", most), ("0", most)):
        monkeypatch.setenv("MLX_EXPERTS_CPU_THREADS", said)
        start._threads.cache_clear()
        assert start._threads() == wanted
    monkeypatch.delenv("MLX_EXPERTS_CPU_THREADS")
    start._threads.cache_clear()


def test_two_threads_at_once_get_right_products(monkeypatch):
    monkeypatch.setattr(start, "PARALLEL_FROM", 0)
    modules = [layer(("affine", 4, 64), 300, 256, mx.float32, seed=i) for i in range(2)]
    x, wrong = inputs_of(6, 256, mx.float32), []
    runs = [linear.prepare(expert_weights.read_dense(m)) for m in modules]
    wanted = [np.array(run(x)) for run in runs]
    row = np.array(x)

    def many(i):
        for _ in range(50):
            out = np.full((6, 300), np.nan, np.float32)
            runs[i].fill(row, out)
            if not np.array_equal(out, wanted[i]):
                wrong.append(i)

    threads = [threading.Thread(target=many, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.skipif(sys.platform == "win32", reason="there are no forks")
@pytest.mark.parametrize("rows", [1, 6])
def test_a_forked_process_gets_right_products(monkeypatch, rows):
    """OpenMP's threads are not in it: asking for them would end the process."""
    monkeypatch.setattr(start, "PARALLEL_FROM", 0)
    run = linear.prepare(expert_weights.read_dense(layer(("affine", 4, 64), 300, 256, mx.float32)))
    row, wanted = np.array(inputs_of(rows, 256, mx.float32)), np.empty((rows, 300), np.float32)
    run.fill(row, wanted)
    with start.LOCK:  # held by a thread that the child does not have
        child = os.fork()
        if child == 0:
            out = np.full((rows, 300), np.nan, np.float32)
            try:
                run.fill(row, out)
            finally:
                os._exit(0 if np.array_equal(out, wanted) else 1)
    until = time.monotonic() + 60
    while (ended := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < until:
        time.sleep(0.02)
    if ended[0] == 0:
        os.kill(child, 9)
        os.waitpid(child, 0)
    assert ended == (child, 0)


def test_weights_changed_in_place_are_noticed():
    module = layer(("affine", 4, 64), 40, 128, mx.float32)
    run, x = linear.prepare(expert_weights.read_dense(module)), inputs_of(1, 128, mx.float32)
    before = run(x)
    module.scales[...] = module.scales * 2
    assert not mx.allclose(run(x), before)
    assert error_of(module, x) <= 1e-6


def test_inside_a_transformation_it_declines():
    module = layer(("affine", 4, 64), 40, 128, mx.float32)
    run, said = linear.prepare(expert_weights.read_dense(module)), []

    def loss(x):
        y = run(x)
        said.append(y)
        return x.sum()

    mx.grad(loss)(inputs_of(1, 128, mx.float32))
    assert isinstance(said[0], Decline)
    assert said[0].rule == "transformation"


MUTATIONS = {
    "scale of a decoded weight": (tiles, "weight = builder.fmul(weight, scale)", "weight = weight"),
    "bias of a decoded weight": (tiles, "weight = builder.fadd(weight, shift)", "weight = weight"),
    "place of a decoded weight": (
        tiles,
        "ir.Constant(I64, position)), block)",
        "ir.Constant(I64, 0)), block)",
    ),
    "inputs left over": (
        tiles,
        "for together in range(1, form.inputs)",
        "for together in range(2, form.inputs)",
    ),
    "rows left over": (tiles, "builder.sub(rows, builder.mul(whole, tile_rows))", "builder.sub(rows, rows)"),
    "first part of a row": (tiles, "builder.fadd(part, before)", "part"),
    "last tile": (driver, "(rows + height - 1) // height", "rows // height"),
    "bias of the layer": (driver, "value += read(number(stack, BIAS)", "value -= read(number(stack, BIAS)"),
    "order of inputs": (driver, "write(row, position * blocks + i,", "write(row, i * size + position,"),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_planted_fault_is_caught(monkeypatch, name):
    module, right, wrong = MUTATIONS[name]
    text = Path(module.__file__).read_text()
    assert text.count(right) >= 1
    mutant = ModuleType(f"{module.__name__}_mutant")
    monkeypatch.setitem(sys.modules, mutant.__name__, mutant)
    exec(compile(text.replace(right, wrong), "<mutant>", "exec"), mutant.__dict__)
    monkeypatch.setattr(stacks, "unit_functions", lambda projection: None)
    if module is driver:
        monkeypatch.setattr(start, "_numba", lambda: mutant)
    else:
        monkeypatch.setattr(stacks, "decode_function", mutant.decode_rows)
        monkeypatch.setattr(stacks, "dot_function", cache(mutant.dot_tile))
    made = layer(("affine", 4, 64), 37, 2560, mx.float32, bias=True)
    # Seven inputs: a whole step of six and one that is left over.
    assert not error_of(made, inputs_of(7, 2560, mx.float32)) < 1e-3


UNIT_MUTATIONS = {
    "third part of an input": (
        amx,
        "for part in range(PARTS):\n                    bits",
        "for part in range(2):\n                    bits",
    ),
    "order of the weights": (amx, "8 * block + j + 4 * k", "8 * block + 2 * j + k"),
    "scale of a group": (amx, "value = builder.fmul(value, scale)", "value = value"),
    "bias of a group": (amx, "builder.fmul(shift, total)", "shift"),
    "earlier groups": (amx, "builder.fadd(before, value)", "value"),
    "last rows": (unit, "tiles = (rows + HEIGHT - 1) // HEIGHT", "tiles = rows // HEIGHT"),
    "later blocks": (unit, "parts + row * number(stack, INPUT)", "parts"),
    "bias of the layer": (unit, "if number(stack, BIAS) != 0", "if number(stack, BIAS) < 0"),
}


@needs_unit
@pytest.mark.parametrize("name", UNIT_MUTATIONS)
def test_a_fault_planted_in_the_matrix_units_code_is_caught(monkeypatch, name):
    module, right, wrong = UNIT_MUTATIONS[name]
    text = Path(module.__file__).read_text()
    assert text.count(right) >= 1
    mutant = ModuleType(f"{module.__name__}_mutant")
    monkeypatch.setitem(sys.modules, mutant.__name__, mutant)
    exec(compile(text.replace(right, wrong), "<mutant>", "exec"), mutant.__dict__)
    if module is unit:
        monkeypatch.setattr(linear, "linear_on_unit", lambda: mutant.linear_on_unit)
    else:
        monkeypatch.setattr(stacks, "unit_functions", cache(mutant.functions))
    made = layer(("affine", 4, 64), 37, 2560, mx.float32, bias=True)
    # Six blocks of fifteen inputs, five of them padding; a lost third part shows in the last bits only.
    assert not error_of(made, inputs_of(85, 2560, mx.float32)) < 1e-6


def test_machine_code_is_kept_and_what_is_damaged_is_made_again(monkeypatch, tmp_path):
    monkeypatch.setattr(native, "folder", lambda: tmp_path)
    module = layer(("affine", 5, 64), 12, 128, mx.float32)
    kind = stacks.kind_of(expert_weights.read_dense(module).projection)
    first = cpu_rows.rows_product(kind)
    (kept,) = tmp_path.iterdir()
    stamp = kept.stat().st_mtime_ns
    assert cpu_rows.rows_product(kind).address != first.address
    assert kept.stat().st_mtime_ns == stamp
    whole = kept.read_bytes()
    kept.write_bytes(whole[:-8] + bytes(8))
    cpu_rows.rows_product(kind)
    assert kept.read_bytes() == whole


def test_a_folder_that_cannot_be_written_costs_nothing_but_time(monkeypatch, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setattr(native, "folder", lambda: blocked / "kernels")
    module = layer(("affine", 4, 64), 12, 128, mx.float32)
    assert cpu_rows.rows_product(stacks.kind_of(expert_weights.read_dense(module).projection)).address


OLD_CPU = """
import mlx.core as mx, mlx.nn as nn
from mlx_experts.engine.kernels.cpu import start
print(start.unavailable())
"""


def test_a_processor_without_avx2_is_declined():
    """numba compiles for an older processor of the same kind when it is told its name."""
    if native.is_arm():
        pytest.skip("every 64-bit ARM processor has the instructions")
    ran = subprocess.run(
        [sys.executable, "-c", OLD_CPU],
        env={"NUMBA_CPU_NAME": "nehalem", "NUMBA_CPU_FEATURES": "", "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith("processor: wanted AVX2")
