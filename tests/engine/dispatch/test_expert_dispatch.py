"""The dispatch takes the path that the request allow, says so, and notices when the request change."""

import copy
import pickle
import shutil
import sys
import threading
from types import SimpleNamespace

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from mlx_lm.tuner.lora import LoRALinear, LoRASwitchLinear

from mlx_experts.engine.dispatch import expert_dispatch, tuning_cache
from mlx_experts.engine.dispatch.expert_dispatch import ExpertDispatch
from mlx_experts.engine.dispatch.policy import SWITCH, WIDTH_BOUND
from mlx_experts.engine.kernels import activations, expert_weights, gather, naive
from mlx_experts.engine.kernels.cpu import experts as cpu
from mlx_experts.engine.kernels.cpu import start
from mlx_experts.engine.kernels.expert_weights import SharedModules
from mlx_experts.engine.layers.mlp import MLP
from mlx_experts.engine.tools.bench_experts import relative_rms
from mlx_experts.registry.errors import SettingError

SWIGLU = activations.make("swiglu")


@pytest.fixture(autouse=True)
def own_settings(monkeypatch, tmp_path):
    """No setting of the machine that runs the tests."""
    monkeypatch.delenv(SWITCH, raising=False)
    monkeypatch.delenv(WIDTH_BOUND, raising=False)
    monkeypatch.setenv(tuning_cache.CACHE_DIR, str(tmp_path))


def reasons(trace):
    return {(r.path, r.rows, r.reason): r.count for r in trace.snapshot()}


def test_one_row_and_many_rows_run_fused(container, token, fresh_trace):
    c, dispatch = container(), ExpertDispatch("layers.0", SWIGLU)
    for rows in (1, 1, 5, 2):
        call = token(rows=rows)
        truth = naive.experts_in_float32(expert_weights.read(c, SWIGLU), *call)
        assert relative_rms(dispatch(c, *call), truth) < 1e-5
    assert reasons(fresh_trace) == {
        ("fused", "1", "cpu"): 2,
        ("fused", "5-8", "cpu"): 1,
        ("fused", "2", "cpu"): 1,
    }


def test_rows_are_the_product_of_the_leading_dimensions(container, token, fresh_trace):
    c, dispatch = container(), ExpertDispatch("layers.0", SWIGLU)
    x, indices, weights = token()
    y = dispatch(c, x, indices, weights)
    for lead in ((), (1,), (1, 1, 1)):
        shaped = [a.reshape(*lead, a.shape[-1]) for a in (x, indices, weights)]
        made = dispatch(c, *shaped)
        assert made.shape == shaped[0].shape
        assert mx.array_equal(made.reshape(-1), y.reshape(-1))
    assert fresh_trace.total("fused") == 4


def test_a_bound_below_the_width_moves_every_call_to_gather(container, token, fresh_trace, monkeypatch):
    c = container(width=192)
    for bound, fused in (("192", 1), ("191", 0)):
        monkeypatch.setenv(WIDTH_BOUND, bound)
        fresh_trace.reset()
        ExpertDispatch("layers.0", SWIGLU)(c, *token())
        assert fresh_trace.total("fused") == fused
        assert fresh_trace.total("gather", reason="width_bound") == 1 - fused


@pytest.mark.parametrize(
    ("argument", "text", "fused"), [(None, "off", 0), (True, "off", 1), (False, "", 0), (None, "", 1)]
)
def test_switch_and_argument(container, token, fresh_trace, monkeypatch, argument, text, fused):
    monkeypatch.setenv(SWITCH, text)
    ExpertDispatch("layers.0", SWIGLU, argument)(container(), *token())
    assert fresh_trace.total("fused") == fused
    assert fresh_trace.total("gather", reason="switch") == 1 - fused


def test_a_bound_that_cannot_be_read_is_an_error(container, token, monkeypatch):
    monkeypatch.setenv(WIDTH_BOUND, "wide")
    with pytest.raises(SettingError, match=WIDTH_BOUND):
        ExpertDispatch("layers.0", SWIGLU)(container(), *token())


def test_the_hot_path_reads_no_environment(container, token, fresh_trace, monkeypatch):
    c, dispatch = container(), ExpertDispatch("layers.0", SWIGLU)
    dispatch(c, *token())
    monkeypatch.setenv(SWITCH, "off")
    monkeypatch.setenv(WIDTH_BOUND, "wide")
    dispatch(c, *token())
    assert fresh_trace.total("fused") == 2


def test_a_kernel_is_prepared_once_for_each_kind_of_call(container, token, monkeypatch):
    """Dtype, picks a token and device: a kernel compiled for one kind must not serve another."""
    prepared = []

    def kernel(device):
        def prepare(experts, dtype):
            prepared.append((device, dtype))
            return cpu.prepare(experts, dtype)

        return SimpleNamespace(unavailable=lambda: None, prepare=prepare)

    monkeypatch.setattr(expert_dispatch, "fused_kernel", kernel)
    c, dispatch = container(), ExpertDispatch("layers.0", SWIGLU)
    for _ in range(2):
        dispatch(c, *token())
        dispatch(c, *token(dtype=mx.bfloat16))
        dispatch(c, *token(top_k=3))
    monkeypatch.setattr(expert_dispatch, "current_device", lambda: "cuda")
    dispatch(c, *token())
    kinds = [("cpu", mx.float32), ("cpu", mx.bfloat16), ("cpu", mx.float32), ("cuda", mx.float32)]
    assert prepared == kinds


def test_a_decision_made_while_another_thread_replaces_weights_is_not_kept(container, token, monkeypatch):
    c, dispatch, call, prepare = container(), ExpertDispatch("layers.0", SWIGLU), token(), cpu.prepare

    def interrupted(experts, dtype):
        monkeypatch.setattr(cpu, "prepare", prepare)
        run = prepare(experts, dtype)
        c.up_proj.weight = c.up_proj.weight * 2
        dispatch(c, *call)
        return run

    monkeypatch.setattr(cpu, "prepare", interrupted)
    dispatch(c, *call)
    truth = naive.experts_in_float32(expert_weights.read(c, SWIGLU), *call)
    assert relative_rms(dispatch(c, *call), truth) < 1e-5


def test_a_tuned_bound_is_used(container, token, fresh_trace):
    c = container(width=192)
    storage = expert_weights.read(c, SWIGLU).up.projection.storage
    timings = [
        tuning_cache.Timing(100, 2.0, 1.0, 0.01, storage),
        tuning_cache.Timing(192, 1.0, 2.0, 0.01, storage),
    ]
    tuning_cache.save("cpu", timings)
    ExpertDispatch("layers.0", SWIGLU)(c, *token())
    (row,) = fresh_trace.snapshot()
    assert (row.path, row.reason) == ("gather", "width_bound")
    assert "registry tune" in row.note


def test_training_mode_gathers(container, token, fresh_trace):
    c, dispatch = container(), ExpertDispatch("layers.0", SWIGLU)
    c.train()
    dispatch(c, *token())
    c.eval()
    dispatch(c, *token())
    assert reasons(fresh_trace) == {("gather", "1", "training"): 1, ("fused", "1", "cpu"): 1}


@pytest.mark.parametrize("what", ["x", "weights", "experts"])
def test_an_input_that_needs_a_gradient_gathers_and_gets_it(container, token, fresh_trace, what):
    c, dispatch = container(), ExpertDispatch("layers.0", SWIGLU)
    x, indices, weights = token()
    mx.eval(dispatch(c, x, indices, weights))
    fresh_trace.reset()

    def loss(path):
        def of(value):
            if what == "experts":
                c.up_proj.weight = value
            inputs = {"x": x, "weights": weights, what: value}
            return path(inputs["x"], indices, inputs["weights"]).square().sum()

        return of

    start = {"x": x, "weights": weights, "experts": c.up_proj.weight}[what]
    grad = mx.grad(loss(lambda *a: dispatch(c, *a)))(start)
    wanted = mx.grad(loss(lambda *a: gather.experts(c, SWIGLU, *a)))(start)
    assert mx.abs(wanted).max().item() > 0
    assert mx.array_equal(grad, wanted)
    assert reasons(fresh_trace) == {("gather", "1", "transformation"): 1}


@pytest.mark.skipif(shutil.which("g++") is None, reason="mx.compile needs a C++ compiler on the CPU")
def test_inside_a_compiled_function_the_call_gathers(container, token, fresh_trace):
    c, dispatch = container(), ExpertDispatch("layers.0", SWIGLU)
    x, indices, weights = token()
    made = mx.compile(lambda v: dispatch(c, v, indices, weights))(x)
    assert (
        relative_rms(made, naive.experts_in_float32(expert_weights.read(c, SWIGLU), x, indices, weights))
        < 1e-5
    )
    assert fresh_trace.total("gather", reason="transformation") == 1


def test_quantising_and_adapting_after_the_first_call_are_noticed(container, token, fresh_trace):
    c, dispatch, call = container(), ExpertDispatch("layers.0", SWIGLU), token()
    plain = dispatch(c, *call)
    nn.quantize(c, 64, 4)
    c.eval()
    packed = dispatch(c, *call)
    assert relative_rms(packed, naive.experts_in_float32(expert_weights.read(c, SWIGLU), *call)) < 1e-5
    assert relative_rms(packed, plain) > 1e-3
    adapter = LoRASwitchLinear.from_base(c.up_proj, r=2)
    adapter.lora_b = mx.random.normal(adapter.lora_b.shape)
    c.up_proj = adapter
    c.eval()
    adapted = dispatch(c, *call)
    assert relative_rms(adapted, packed) > 1e-3
    assert mx.array_equal(adapted, gather.experts(c, SWIGLU, *call))
    assert reasons(fresh_trace) == {("fused", "1", "cpu"): 2, ("gather", "1", "adapted"): 1}


@pytest.mark.parametrize(
    ("part", "leaves"),
    [
        ("down_proj", ("scales", "biases")),
        ("up_proj", ("weight",)),
        ("gate_proj", ("bias",)),
        ("down_proj", ("bias",)),
    ],
)
def test_weights_changed_in_place_are_read_anew(container, token, stored, part, leaves):
    c = container(stored=stored("affine", 4, 64), bias=True)
    dispatch, call = ExpertDispatch("layers.0", SWIGLU), token()
    before = dispatch(c, *call)
    mx.eval(before)
    for leaf in leaves:
        c[part][leaf][call.indices[0, 0, 0].item()] = 3
    made = dispatch(c, *call)
    assert relative_rms(made, before) > 1e-3
    assert relative_rms(made, naive.experts_in_float32(expert_weights.read(c, SWIGLU), *call)) < 1e-5


def test_inputs_may_be_views_with_gaps(container, token, fresh_trace):
    c, dispatch = container(), ExpertDispatch("layers.0", SWIGLU)
    x, indices, weights = token()
    wide = [mx.repeat(a, 2, axis=-1)[..., ::2] for a in (x, indices, weights)]
    assert mx.array_equal(dispatch(c, *wide), dispatch(c, x, indices, weights))
    assert fresh_trace.total("fused") == 2


def test_replaced_weights_are_let_go(container, token):
    c, dispatch = container(), ExpertDispatch("layers.0", SWIGLU)
    dispatch(c, *token())
    dispatch(c, *token(rows=5))
    old = c.up_proj.weight
    held = sys.getrefcount(old)
    c.up_proj.weight = mx.zeros(old.shape)
    mx.eval(dispatch(c, *token()))
    assert sys.getrefcount(old) < held
    assert sys.getrefcount(old) == 2


def test_dtypes_in_turn_are_each_right(container, token, fresh_trace):
    c, dispatch = container(), ExpertDispatch("layers.0", SWIGLU)
    for dtype, close in ((mx.float16, 5e-3), (mx.bfloat16, 5e-3), (mx.float32, 1e-5), (mx.float16, 5e-3)):
        call = token(dtype=dtype)
        made = dispatch(c, *call)
        assert made.dtype == dtype
        assert relative_rms(made, naive.experts_in_float32(expert_weights.read(c, SWIGLU), *call)) < close
    assert fresh_trace.total("fused") == 4


def test_copies_are_independent_and_know_nothing_yet(container, token):
    c, dispatch = container(), ExpertDispatch("layers.0", SWIGLU, True)
    y = dispatch(c, *token())
    for other in (copy.deepcopy(dispatch), copy.copy(dispatch), pickle.loads(pickle.dumps(dispatch))):
        assert (other.layer, other.activation, other.fused) == ("layers.0", SWIGLU, True)
        assert other._bound is None
        assert mx.array_equal(other(copy.deepcopy(c), *token()), y)


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.switch_mlp = c
        self._dispatch = ExpertDispatch("layers.0", SWIGLU)

    def __call__(self, *call):
        return self._dispatch(self.switch_mlp, *call)


def test_a_module_that_holds_it_has_only_its_own_parameters(container, token):
    block = Block(container())
    names = {name for name, _ in tree_flatten(block.parameters())}
    mx.eval(block(*token()))
    assert {name for name, _ in tree_flatten(block.parameters())} == names
    twin = copy.deepcopy(block)
    assert mx.array_equal(twin(*token()), block(*token()))


def test_threads_get_equal_results_and_every_call_is_counted(container, token, fresh_trace, monkeypatch):
    monkeypatch.setattr(start, "PARALLEL_FROM", 0)
    c, dispatch = container(), ExpertDispatch("layers.0", SWIGLU)
    calls = [token(seed=s) for s in range(4)]
    wanted = [dispatch(c, *call) for call in calls]
    mx.eval(wanted)
    wrong = []

    def many(number):
        for _ in range(25):
            if not mx.array_equal(dispatch(c, *calls[number]), wanted[number]):
                wrong.append(number)

    threads = [threading.Thread(target=many, args=(n,)) for n in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert wrong == []
    assert fresh_trace.total("fused") == 104


def test_without_numba_calls_gather_and_the_trace_says_how_to_get_it(
    container, token, fresh_trace, monkeypatch
):
    for name in [
        n for n in sys.modules if n.startswith(("numba", "llvmlite", "mlx_experts.engine.kernels.cpu."))
    ]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr("mlx_experts.engine.kernels.cpu.driver", raising=False)
    monkeypatch.setitem(sys.modules, "numba", None)
    monkeypatch.setitem(sys.modules, "llvmlite", None)
    start._numba.cache_clear()
    try:
        ExpertDispatch("layers.0", SWIGLU)(container(), *token())
    finally:
        start._numba.cache_clear()
    (row,) = fresh_trace.snapshot()
    assert (row.path, row.reason) == ("gather", "numba")
    assert "mlx-experts[cpu]" in row.note


def test_views_with_gaps_gather(token, container, fresh_trace):
    c = container(width=192)
    both = mx.concatenate([c.gate_proj.weight, c.up_proj.weight], axis=1)
    mx.eval(both)
    c.gate_proj.weight, c.up_proj.weight = both[:, :192], both[:, 192:]
    call = token()
    made = ExpertDispatch("layers.0", SWIGLU)(c, *call)
    assert relative_rms(made, naive.experts_in_float32(expert_weights.read(c, SWIGLU), *call)) < 1e-5
    assert reasons(fresh_trace) == {("gather", "1", "contiguous"): 1}


@pytest.mark.parametrize("bad", [6, 2**31])
def test_an_index_that_is_no_expert_is_an_error(container, token, bad):
    x, _, weights = token()
    with pytest.raises(IndexError, match="of 6"):
        ExpertDispatch("layers.0", SWIGLU)(container(), x, mx.array([[[0, bad]]], dtype=mx.uint32), weights)


class Beside:
    """A shared expert with a gate of its own, handed to a dispatch as a block does it."""

    def __init__(self, x):
        self.x, self.expert, self.gate = x, MLP(128, 64, SWIGLU), nn.Linear(128, 1)
        self.bind()

    def bind(self):
        self.held = None
        self.modules = SharedModules(self.expert.projections(), SWIGLU, self.gate)

    def experts(self, dispatch, container):
        if self.held is None or self.held[0] is not dispatch:
            self.held = dispatch, dispatch.bind(container, self.modules)
        return self.held[1]

    def add(self, y):
        return y + mx.sigmoid(self.gate(self.x)) * self.expert(self.x)

    def run(self, dispatch, container, call):
        y, added = self.experts(dispatch, container)(*call, "cpu")
        return y if added else self.add(y)


@pytest.fixture
def beside(token):
    return Beside(token().x)


def test_a_shared_expert_is_added_by_the_kernel_or_apart_with_one_result(
    container, token, fresh_trace, beside
):
    c, call = container(), token()
    wanted = beside.add(naive.experts_in_float32(expert_weights.read(c, SWIGLU), *call))
    for fused in (True, False):
        made = beside.run(ExpertDispatch("layers.0", SWIGLU, fused), c, call)
        assert relative_rms(made, wanted) < 1e-5
    fused, gathered = fresh_trace.snapshot()
    assert (fused.path, fused.note) == ("fused", "with the shared expert")
    assert gathered.path == "gather"


@pytest.mark.parametrize("change", ["projection", "weight", "gate's weight"])
def test_a_shared_expert_that_is_replaced_is_noticed(container, token, beside, change):
    c, call, shared = container(), token(), beside.expert
    dispatch, routed = ExpertDispatch("layers.0", SWIGLU), naive.experts_in_float32
    before = beside.run(dispatch, c, call)
    match change:
        case "projection":
            shared.up_proj = nn.Linear(128, 64, bias=False)
            beside.bind()
        case "weight":
            shared.down_proj.weight = shared.down_proj.weight * 3
        case "gate's weight":
            beside.gate.weight = beside.gate.weight * 3 + 0.1
    wanted = beside.add(routed(expert_weights.read(c, SWIGLU), *call))
    made = beside.run(dispatch, c, call)
    assert relative_rms(made, wanted) < 1e-5
    assert relative_rms(made, before) > 1e-3


def test_a_shared_expert_under_an_adapter_is_added_apart_and_the_trace_says_why(
    container, token, fresh_trace, beside
):
    c, call = container(), token()
    beside.expert.down_proj = LoRALinear.from_base(beside.expert.down_proj)
    beside.bind()
    wanted = beside.add(naive.experts_in_float32(expert_weights.read(c, SWIGLU), *call))
    assert relative_rms(beside.run(ExpertDispatch("layers.0", SWIGLU), c, call), wanted) < 1e-5
    (row,) = fresh_trace.snapshot()
    assert row.path == "fused"
    assert "adapter" in row.note


@pytest.mark.parametrize("beside", [False, True], ids=["alone", "with a shared expert still to be added"])
def test_many_rows_take_the_path_that_was_found_to_pay(container, token, fresh_trace, beside):
    c = container(width=192)
    storage = expert_weights.read(c, SWIGLU).up.projection.storage
    timings = [
        tuning_cache.Timing(192, 1.0, 2.0, 0.01, storage, 2),
        tuning_cache.Timing(192, 2.0, 1.0, 0.01, storage, 32, "many"),
    ]
    tuning_cache.save("cpu", timings)
    call = tuple(token(rows=40))
    shared = None
    if beside:
        width = call[0].shape[-1]
        parts = {n: nn.Linear(width, width) for n in ("gate", "up", "down")}
        shared = expert_weights.SharedModules(parts, SWIGLU, None)
    y, added = ExpertDispatch("layers.0", SWIGLU).bind(c, shared)(*call, "cpu")
    (row,) = fresh_trace.snapshot()
    assert (row.path, row.rows, row.reason) == ("dequantized", "33-64", "cpu")
    truth = naive.experts_in_float32(expert_weights.read(c, SWIGLU), *call)
    assert relative_rms(y, truth) < 1e-5
    assert not added
