"""The CPU kernel against the truth: formats, activations, dtypes, top-k and odd sizes."""

import sys
import threading
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest

from mlx_experts.engine.dispatch import eligibility
from mlx_experts.engine.dispatch.policy import Policy
from mlx_experts.engine.kernels import activations, expert_weights, naive
from mlx_experts.engine.kernels.cpu import driver as cpu_driver
from mlx_experts.engine.kernels.cpu import experts as cpu
from mlx_experts.engine.kernels.cpu import stacks, start, steps, unit
from mlx_experts.engine.kernels.cpu.products import amx
from mlx_experts.engine.kernels.cpu.products import rows as cpu_rows
from mlx_experts.engine.kernels.request import Accept, Projection
from mlx_experts.engine.tools.bench_experts import relative_rms

DTYPES = {"float32": (mx.float32, 1e-5), "bfloat16": (mx.bfloat16, 5e-3), "float16": (mx.float16, 5e-3)}
AFFINE = [("affine", bits, group) for bits in (2, 3, 4, 5, 6, 8) for group in (32, 64, 128)]
OTHERS = [("plain", 0, 0), ("mxfp4", 4, 32), ("mxfp8", 8, 32), ("nvfp4", 4, 16), ("nvfp4", 4, 16, True)]
CONSTANTS = {
    "swiglu_oai": (1.702, 7.0),
    "swiglu_clamp_before": (1.0, 0.5),
    "swiglu_clamp_after": (1.0, 0.3),
    "situ": (4.0, 2.0),
}


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Outputs start as NaN, so that one that is not written is seen."""
    monkeypatch.setattr(stacks, "fresh", lambda shape: np.full(shape, np.nan, np.float32))


def _poison_heap(sizes=(16, 128, 192, 512, 2048, 8192)):
    """Leave NaNs in the memory that the driver's own scratch is likely to get."""
    for size in sizes:
        for array in [np.full(size, np.nan, np.float32) for _ in range(8)]:
            del array


def error_of(container, call, activation):
    """Relative RMS error of the kernel, after asking the gate."""
    experts = expert_weights.read(container, activation)
    request = expert_weights.request_of(
        experts, activation, rows=1, top_k=call.indices.shape[-1], dtype=call.x.dtype, device="cpu"
    )
    assert eligibility.check(request, Policy()) == Accept("cpu")
    run = cpu.prepare(experts, call.x.dtype)
    _poison_heap()
    y = run(*call)
    assert y.dtype == call.x.dtype
    assert y.shape == call.x.shape
    assert mx.array_equal(y, run(*call))
    return relative_rms(y, naive.experts_in_float32(experts, *call))


# Every format with float32 scales; with narrow ones every bit width and every group size.
GRID = [(kind, "float32") for kind in [*AFFINE, *OTHERS]]
GRID += [
    (k, d) for d in ("bfloat16", "float16") for k in [*AFFINE, *OTHERS] if 64 in k or 4 in k or k in OTHERS
]


@pytest.mark.parametrize(
    ("kind", "dtype"), GRID, ids=lambda v: v if isinstance(v, str) else "-".join(map(str, v))
)
def test_every_format_in_every_dtype_matches_the_truth(container, token, stored, kind, dtype):
    narrow, close = DTYPES[dtype]
    c = container(hidden=128, width=384, stored=stored(*kind), dtype=narrow)
    call = token(hidden=128, dtype=narrow, top_k=3)
    assert error_of(c, call, activations.make("swiglu")) < close


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("bias", [False, True], ids=["", "biases"])
@pytest.mark.parametrize("name", activations.names())
def test_every_activation_matches_the_truth(container, token, stored, name, bias, dtype):
    narrow, close = DTYPES[dtype]
    activation = activations.make(name, *CONSTANTS.get(name, ()))
    c = container(name, stored=stored("affine", 4, 64), bias=bias, dtype=narrow)
    assert error_of(c, token(dtype=narrow), activation) < close


@pytest.mark.parametrize(
    "last", [("affine", 6, 64), ("affine", 8, 32), ("mxfp4", 4, 32), ("plain", 0, 0)], ids=str
)
@pytest.mark.parametrize("first", [("affine", 4, 64), ("affine", 3, 32), ("nvfp4", 4, 16, True)], ids=str)
def test_gate_and_up_may_be_stored_otherwise_than_down(container, token, stored, first, last):
    c = container(stored=stored(*first), down=stored(*last), bias=True)
    assert error_of(c, token(), activations.make("swiglu")) < 1e-5


def test_gate_may_be_stored_otherwise_than_up(container, token, stored):
    c = container(stored=stored("affine", 4, 64))
    c.gate_proj = container(stored=stored("affine", 5, 32), seed=3).gate_proj
    assert error_of(c, token(), activations.make("swiglu")) < 1e-5


@pytest.mark.parametrize(
    ("top_k", "experts"), [(1, 1), (1, 5), (2, 2), (7, 9), (8, 128), (32, 40), (32, 3)], ids=str
)
def test_any_number_of_experts_matches_the_truth(container, token, stored, top_k, experts):
    c = container(hidden=64, width=64, experts=experts, stored=stored("affine", 4, 32))
    call = token(hidden=64, experts=experts, top_k=top_k)
    assert error_of(c, call, activations.make("swiglu")) < 1e-5


@pytest.mark.parametrize(("hidden", "width"), [(12, 32), (7, 5), (1, 1), (33, 65), (100, 2880)], ids=str)
def test_plain_weights_of_any_width_match_the_truth(container, token, hidden, width):
    assert (
        error_of(container(hidden=hidden, width=width), token(hidden=hidden), activations.make("swiglu"))
        < 1e-5
    )


@pytest.mark.parametrize(
    ("hidden", "width", "group"),
    [(32, 32, 32), (96, 160, 32), (704, 64, 64), (64, 704, 64), (128, 896, 128)],
    ids=str,
)
@pytest.mark.parametrize("bits", [3, 4])
def test_odd_numbers_of_groups_match_the_truth(container, token, stored, hidden, width, group, bits):
    c = container(hidden=hidden, width=width, stored=stored("affine", bits, group))
    assert error_of(c, token(hidden=hidden), activations.make("swiglu")) < 1e-5


@pytest.mark.parametrize("threads", ["parallel", "serial"])
def test_both_compilations_give_the_same_bits(container, token, stored, monkeypatch, threads):
    c = container(hidden=256, width=704, stored=stored("affine", 4, 64))
    run = cpu.prepare(expert_weights.read(c, activations.make("swiglu")), mx.float32)
    call = token(hidden=256)
    monkeypatch.setattr(start, "PARALLEL_FROM", 1 << 62)
    once = run(*call)
    monkeypatch.setattr(start, "PARALLEL_FROM", 0 if threads == "parallel" else 1 << 62)
    assert all(mx.array_equal(run(*call), once) for _ in range(20))


def test_one_thread_at_a_time_is_in_the_compiled_code(container, token, monkeypatch):
    """numba's portable thread pool, which not every machine gets, ends the process on concurrent use."""
    run = cpu.prepare(expert_weights.read(container(), activations.make("swiglu")), mx.float32)
    call, inside, met = tuple(token()), [], []
    mx.eval(call)

    def entered(*arguments):
        inside.append(0)
        met.append(len(inside))
        time.sleep(0.002)
        inside.pop()
        return -1

    forms = SimpleNamespace(parallel=entered, serial=entered)
    monkeypatch.setattr(steps, "steps", forms)
    threads = [threading.Thread(target=run, args=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert met == [1, 1, 1, 1]


@pytest.mark.parametrize("kind", [("affine", 4, 64), ("mxfp4", 4, 32), ("nvfp4", 4, 16)], ids=str)
def test_signs_zeros_and_large_values_survive(container, token, stored, kind):
    c = container(stored=stored(*kind))
    x, indices, weights = token()
    x = mx.where(mx.arange(128) % 3 == 0, 0, x * 1e4)
    assert error_of(c, type(token())(x, indices, -weights), activations.make("swiglu")) < 1e-5


def test_nan_and_infinity_in_the_input_are_not_hidden(container, token, stored):
    c = container(stored=stored("affine", 4, 64))
    x, indices, weights = token()
    run = cpu.prepare(expert_weights.read(c, activations.make("swiglu")), mx.float32)
    assert mx.all(mx.isnan(run(mx.where(mx.arange(128) == 5, mx.nan, x), indices, weights))).item()
    assert not mx.any(mx.isfinite(run(mx.where(mx.arange(128) == 5, mx.inf, x), indices, weights))).item()


def _row_alone(kind, words, scales, x):
    """A single row times ``x`` (NumPy, in order) through the compiled product of rows."""
    blocks = cpu_rows.blocks_of(kind)
    parts = x.reshape(-1, blocks.weights)
    planes = np.ascontiguousarray((parts * np.array(blocks.scales, np.float32)).T)
    sums, out = parts.sum(axis=1), np.full(1, np.nan, np.float32)
    mx.eval(words, *([] if scales is None else [scales]))
    data = [stacks.address(words), 0 if scales is None else stacks.address(scales), 0]
    rest = [planes.ctypes.data, sums.ctypes.data, len(parts), out.ctypes.data]
    stacks.rows_function(kind).ctypes(*data, 0, 0, 1, *rest)
    return out[0]


def _each_weight_is(kind, words, scales, wanted):
    """Each weight of a finite row, read with an input that is one there and zero elsewhere."""
    wanted = np.array(wanted).reshape(-1)
    assert np.isfinite(wanted).all()
    some = range(wanted.size) if wanted.size <= 256 else range(0, wanted.size, 97)
    for i in some:
        assert _row_alone(kind, words, scales, np.eye(1, wanted.size, i, dtype=np.float32)[0]) == wanted[i], i


@pytest.mark.parametrize(
    ("mode", "group", "scales"),
    [
        ("mxfp8", 32, (1, 120, 127, 240)),
        ("mxfp4", 32, (0, 1, 120, 252)),
        ("nvfp4", 16, (0, 1, 7, 8, 100, 126, 0x88)),
    ],
)
def test_every_small_float_is_decoded_as_mlx_does(mode, group, scales):
    bits = 8 if mode == "mxfp8" else 4
    codes = np.arange(256, dtype=np.uint8)
    codes[[0x7F, 0xFF]] = 0 if bits == 8 else codes[[0x7F, 0xFF]]  # no numbers in mxfp8
    words = mx.array(codes).view(mx.uint32).reshape(1, -1)
    for scale in scales:
        kept = mx.full((1, 256 * 8 // bits // group), scale, mx.uint8)
        wanted = mx.dequantize(words, kept, mode=mode, group_size=group, bits=bits, dtype=mx.float32)
        _each_weight_is(Projection(mode, bits, group, 0, 0, "uint8"), words, kept, wanted)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_every_half_is_read_as_mlx_does(dtype):
    codes = np.arange(1 << 16, dtype=np.uint16)
    halves = mx.array(codes).view(dtype)
    finite = mx.where(mx.isfinite(halves), halves, 0).reshape(1, -1)
    _each_weight_is(
        Projection("plain", 16, 0, 0, 0, expert_weights.dtype_name(dtype)),
        finite,
        None,
        finite.astype(mx.float32),
    )


@pytest.mark.parametrize("value", [mx.inf, -mx.inf, mx.nan])
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32])
def test_infinities_and_nans_among_the_weights_stay(dtype, value):
    kind = Projection("plain", dtype.size * 8, 0, 0, 0, expert_weights.dtype_name(dtype))
    row = mx.array([1.0, value, 2.0, 3.0]).astype(dtype)
    np.testing.assert_equal(_row_alone(kind, row, None, np.ones(4, np.float32)), np.float32(value))


def test_a_code_that_is_no_number_stays_one():
    words = mx.array(np.full(32, 0x7F, np.uint8)).view(mx.uint32)
    scales = mx.array([127], mx.uint8)
    assert np.isnan(
        _row_alone(Projection("mxfp8", 8, 32, 0, 0, "uint8"), words, scales, np.ones(32, np.float32))
    )


MUTATIONS = {
    "mask": (cpu_rows, "mask, start = (1 << bits) - 1", "mask, start = (1 << bits) - 2"),
    "shift": (cpu_rows, "32 - shift)", "31 - shift)"),
    "group": (cpu_rows, "[i * groups // lanes.count", "[0 * groups // lanes.count"),
    "affine bias": (cpu_rows, "builder.fadd(parts[r], shift)", "builder.fsub(parts[r], shift)"),
    "last blocks": (cpu_rows, "return sorted({LANES, last} | middle", "return sorted({LANES} | middle"),
    "last rows of a task": (cpu_rows, "builder.sub(count, done)", "builder.sub(done, done)"),
    "expert weight": (cpu_driver, "read(weights, k)", "read(weights, 0)"),
    "last task": (steps, "-(-f // driver.ROWS_AT_ONCE)", "f // driver.ROWS_AT_ONCE"),
    "last outputs": (steps, "-(-h // at_once)", "h // at_once"),
    "sums": (cpu_driver, "write(sums, block, total)", "write(sums, block, total + total)"),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_planted_fault_is_caught(container, token, stored, monkeypatch, name):
    module, right, wrong = MUTATIONS[name]
    text = Path(module.__file__).read_text()
    assert text.count(right) >= 1
    mutant = ModuleType(f"{module.__name__}_mutant")
    monkeypatch.setitem(sys.modules, mutant.__name__, mutant)
    exec(compile(text.replace(right, wrong), "<mutant>", "exec"), mutant.__dict__)
    if module is cpu_driver:
        monkeypatch.setattr(cpu_driver, "HIDDEN", mutant.HIDDEN)
        monkeypatch.setattr(cpu_driver, "OUTPUT", mutant.OUTPUT)
    elif module is steps:
        monkeypatch.setattr(steps, "StepList", mutant.StepList)
    else:
        monkeypatch.setattr(stacks, "rows_function", mutant.rows_product)
        monkeypatch.setattr(cpu_rows, "blocks_of", mutant.blocks_of)
    # 3-bit groups of 32 leave blocks over after whole steps, a step at 4 bits holds several groups, and
    # 33 plain rows leave rows over.
    shape = {"hidden": 160, "width": 160, "stored": stored("affine", 4 if name == "group" else 3, 32)}
    if name in ("last rows of a task", "last outputs"):
        shape = {"hidden": 33, "width": 65}
    experts = expert_weights.read(container(**shape, bias=True), activations.make("swiglu"))
    call = token(hidden=shape["hidden"], top_k=3)
    made = cpu.prepare(experts, mx.float32)(*call)
    assert not relative_rms(made, naive.experts_in_float32(experts, *call)) < 1e-3


def test_the_driver_reads_beyond_four_gibibytes():
    """An offset of more than 32 bits, from an address made up so that the sum hits a small array."""
    row, cols, expert = np.arange(8, dtype=np.float32), 8, 1 << 28
    stack = np.zeros(14, np.int64)
    stack[cpu_driver.FUNCTION] = stacks.rows_function(Projection("plain", 32, 0, 0, 0, "float32")).address
    stack[cpu_driver.ROWS], stack[cpu_driver.ROW_BYTES], stack[cpu_driver.BLOCKS] = 1, cols * 4, cols
    stack[cpu_driver.WEIGHT] = row.ctypes.data - expert * cols * 4
    x, out = np.ones(8, np.float32), np.zeros(1, np.float32)
    addresses = [each.ctypes.data for each in (stack, x, x, out)]
    cpu_driver.expert_rows(addresses[0], expert, 0, 1, *addresses[1:])
    assert out[0] == row.sum()


SHARED = {
    "plain_float32": dict(mode="plain", dtype=mx.float32, shared=192, weighed=32),
    "four_bits": dict(shared=384, weighed=8),
    "joined_halves_with_bias": dict(shared=64, joined=True, bias=True, weighed=16),
    "without_gate": dict(activation="relu2", dtype=mx.float16, shared=320),
    "mixed_bits": dict(dtype=mx.float32, down=("affine", 6, 32), shared=256),
    "mxfp8": dict(mode="mxfp8", bits=8, group=32, shared=96),
}


@pytest.mark.parametrize("options", SHARED.values(), ids=SHARED)
def test_a_shared_expert_is_added(options, build_case, case_type):
    built = build_case(case_type(**options), "cpu")
    run = cpu.prepare(built.experts, built.x.dtype)
    y = run(built.x, built.indices, built.weights)
    assert built.distance(y) < DTYPES[str(built.x.dtype).rpartition(".")[2]][1]
    assert mx.array_equal(y, run(built.x, built.indices, built.weights))


def test_a_shared_expert_changed_in_place_is_noticed(build_case, case_type):
    built = build_case(case_type(dtype=mx.float32, shared=128, weighed=32), "cpu")
    run = cpu.prepare(built.experts, mx.float32)
    before = run(built.x, built.indices, built.weights)
    for stack in built.experts.shared.stacks():
        array = stack.weight if stack.scales is None else stack.scales
        array[...] = array * 2
        mx.eval(array)
        after = run(built.x, built.indices, built.weights)
        truth = naive.experts_in_float32(built.experts, built.x, built.indices, built.weights)
        assert relative_rms(after, truth) < 1e-5
        assert relative_rms(after, before) > 1e-3
        before = after


@pytest.mark.parametrize("rows", [2, 3, 8, 64, 257])
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        (("affine", 4, 64), "float32"),
        (("affine", 3, 32), "bfloat16"),
        (("mxfp4", 4, 32), "float32"),
        (("nvfp4", 4, 16, True), "float16"),
        (("plain", 0, 0), "bfloat16"),
        (("plain", 0, 0), "float32"),
    ],
    ids=str,
)
def test_many_tokens_match_the_truth(machine, container, stored, kind, dtype, rows):
    """With 5 experts each has many tokens, with 40 some have one and some none."""
    narrow, _ = DTYPES[dtype]
    for experts, top_k in ((5, 2), (40, 3)):
        c = container(hidden=128, width=192, experts=experts, stored=stored(*kind), dtype=narrow, bias=True)
        assert _many(c, rows, experts, top_k, 128, narrow) < (1e-6 if dtype == "float32" else 5e-3)


def _many(c, rows, experts, top_k, hidden, dtype, shared=None):
    """The relative RMS error of a call with many tokens against a NumPy sum in float64."""
    packed = expert_weights.read(c, activations.make("swiglu"))
    mx.random.seed(11)
    x = mx.random.normal((1, rows, hidden)).astype(dtype)
    indices = mx.random.randint(0, experts, (1, rows, top_k))
    weights = mx.random.uniform(shape=(1, rows, top_k))
    run = cpu.prepare(packed, dtype)
    y = run(x, indices, weights)
    assert y.shape == x.shape
    assert y.dtype == dtype
    wide = [
        [np.array(naive.dequantised(stack, e)).astype(np.float64) for e in range(experts)]
        for stack in packed.stacks()
    ]
    biases = [np.array(stack.bias.astype(mx.float32)) for stack in packed.stacks()]
    rows_in, total = np.array(x.astype(mx.float32))[0].astype(np.float64), np.zeros((rows, hidden))
    for t, (picked, shares) in enumerate(zip(np.array(indices)[0], np.array(weights)[0], strict=True)):
        for e, share in zip(picked, shares, strict=True):
            gate, up = (w[e] @ rows_in[t] + b[e] for w, b in zip(wide[:2], biases[:2], strict=True))
            total[t] += share * (wide[2][e] @ (gate / (1 + np.exp(-gate)) * up) + biases[2][e])
    made = np.array(y.astype(mx.float32))[0]
    return np.linalg.norm(made - total) / np.linalg.norm(total)


@pytest.mark.parametrize("options", SHARED.values(), ids=SHARED)
def test_a_shared_expert_is_added_for_many_tokens(options, build_case, case_type):
    built = build_case(case_type(**options), "cpu")
    run = cpu.prepare(built.experts, built.x.dtype)
    tokens = [mx.concatenate([t] * 6, axis=-2) for t in (built.x, built.indices, built.weights)]
    tokens[0] = tokens[0] * mx.arange(1, 7).reshape(-1, 1).astype(tokens[0].dtype)
    truth = naive.experts_in_float32(built.experts, *tokens)
    assert relative_rms(run(*tokens), truth) < DTYPES[str(built.x.dtype).rpartition(".")[2]][1]


def test_an_index_that_is_no_expert_is_named_among_many_tokens(container, token):
    x, indices, weights = token(hidden=128)
    run = cpu.prepare(expert_weights.read(container(), activations.make("swiglu")), mx.float32)
    rows = [mx.concatenate([t] * 3, axis=-2) for t in (x, indices, weights)]
    rows[1][..., 1, 0] = 99
    with pytest.raises(IndexError, match="expert 99"):
        run(*rows)


MANY = {
    "weight of a token": ("read(weights, pair)", "read(weights, pair % top_k)"),
    "token of a pair": ("number(filled, e), pair // top_k", "number(filled, e), pair // pairs"),
}


UNIT = {
    "an expert's rows": (
        "store(order, number(padded, e) + number(filled, e), pair)",
        "store(order, pair, pair)",
    ),
    "parts of hidden values": ("_split(down, hidden + row * f * 4,", "_split(down, hidden,"),
    "gate": ("other = read(from_g, i) if", "other = value if"),
}


@pytest.mark.parametrize("name", UNIT)
def test_a_fault_planted_in_the_matrix_units_order_is_caught(container, stored, monkeypatch, name):
    if not amx.available():
        pytest.skip("the processor has no matrix unit")
    right, wrong = UNIT[name]
    text = Path(unit.__file__).read_text()
    assert text.count(right) == 1
    mutant = ModuleType("unit_mutant")
    monkeypatch.setitem(sys.modules, mutant.__name__, mutant)
    exec(compile(text.replace(right, wrong), "<mutant>", "exec"), mutant.__dict__)
    monkeypatch.setattr(unit, "experts_on_unit", mutant.experts_on_unit)
    c = container(hidden=96, width=160, experts=5, stored=stored("affine", 4, 32), bias=True)
    assert not _many(c, 9, 5, 2, 96, mx.float32) < 1e-3


@pytest.mark.parametrize("name", MANY)
def test_a_planted_fault_among_many_tokens_is_caught(container, stored, monkeypatch, name):
    right, wrong = MANY[name]
    text = Path(cpu_driver.__file__).read_text()
    assert text.count(right) == 1
    mutant = ModuleType("driver_of_many_mutant")
    monkeypatch.setitem(sys.modules, mutant.__name__, mutant)
    exec(compile(text.replace(right, wrong), "<mutant>", "exec"), mutant.__dict__)
    monkeypatch.setattr(start, "_numba", lambda: mutant)
    monkeypatch.setattr(stacks, "unit_functions", lambda projection: None)
    c = container(hidden=96, width=160, experts=5, stored=stored("affine", 4, 32), bias=True)
    assert not _many(c, 9, 5, 2, 96, mx.float32) < 1e-3
