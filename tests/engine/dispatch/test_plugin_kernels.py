"""Kernels that plugins offer: when they are asked, when they run, and what runs otherwise."""

from types import SimpleNamespace

import mlx.core as mx
import pytest
from mlx_lm.tuner.lora import LoRASwitchLinear

from mlx_experts.engine.dispatch import expert_dispatch, tuning_cache
from mlx_experts.engine.dispatch.expert_dispatch import ExpertDispatch
from mlx_experts.engine.dispatch.policy import SWITCH, WIDTH_BOUND
from mlx_experts.engine.kernels import activations, expert_weights, gather, naive
from mlx_experts.engine.kernels.request import Accept, Decline
from mlx_experts.engine.layers.mlp import MLP
from mlx_experts.engine.tools.bench_experts import relative_rms

SWIGLU = activations.make("swiglu")


@pytest.fixture(autouse=True)
def own_settings(monkeypatch, tmp_path):
    """No setting of the machine that runs the tests."""
    monkeypatch.delenv(SWITCH, raising=False)
    monkeypatch.delenv(WIDTH_BOUND, raising=False)
    monkeypatch.setenv(tuning_cache.CACHE_DIR, str(tmp_path))


def reasons(trace):
    return {(r.path, r.rows, r.reason): r.count for r in trace.snapshot()}


class Offered:
    """A plugin's kernel: the truth times a factor, for any number of rows."""

    def __init__(self, verdict=Accept("cpu"), prepared=None, factor=1.0):
        self.verdict, self.prepared, self.factor, self.asked = verdict, prepared, factor, []

    def gate(self, request, policy):
        self.asked.append(request.rows)
        return self.verdict

    def prepare(self, experts, dtype):
        return self.prepared or (lambda *token: self.factor * naive.experts(experts, *token))


NO = Decline("mine", "another call", "this one", "None.")


@pytest.fixture
def offer(monkeypatch):
    """Installs a plugin's kernel under a name."""

    def install(kernel, name="mine"):
        found = SimpleNamespace(names=lambda kind: {name: "a plugin"}, get=lambda kind, name: kernel)
        monkeypatch.setattr(expert_dispatch, "components", lambda: found)
        return kernel

    return install


def test_a_plugins_kernel_comes_before_the_back_ends_own_for_any_rows(container, token, fresh_trace, offer):
    kernel = offer(Offered())
    c, dispatch = container(), ExpertDispatch("layers.0", SWIGLU)
    for rows in (1, 5, 1):
        call = token(rows=rows)
        truth = naive.experts_in_float32(expert_weights.read(c, SWIGLU), *call)
        assert relative_rms(dispatch(c, *call), truth) < 1e-5
    assert reasons(fresh_trace) == {("fused", "1", "mine"): 2, ("fused", "5-8", "mine"): 1}
    assert kernel.asked == [1, 5]


def test_a_plugins_kernel_leaves_the_shared_expert_to_the_block(container, token, offer):
    offer(Offered())
    c, call, shared = container(), token(), MLP(128, 64, SWIGLU)
    modules = expert_weights.SharedModules(shared.projections(), SWIGLU, None)
    wanted = naive.experts_in_float32(expert_weights.read(c, SWIGLU), *call)
    made, added = ExpertDispatch("layers.0", SWIGLU).bind(c, modules)(*call, "cpu")
    assert not added
    assert relative_rms(made, wanted) < 1e-5


@pytest.mark.parametrize("kernel", [Offered(verdict=NO), Offered(prepared=NO)], ids=["gate", "prepare"])
def test_where_a_plugins_kernel_declines_the_back_ends_own_runs(container, token, fresh_trace, offer, kernel):
    offer(kernel)
    ExpertDispatch("layers.0", SWIGLU)(container(), *token())
    assert reasons(fresh_trace) == {("fused", "1", "cpu"): 1}
    assert fresh_trace.snapshot()[0].note == f"mine declined, {NO}. {NO.hint}"


def test_a_plugins_kernel_that_computes_something_else_is_not_used(container, token, fresh_trace, offer):
    offer(Offered(factor=3.0), name="wrong")
    c, call = container(), token()
    with pytest.warns(RuntimeWarning, match="'wrong' computes something else"):
        made = ExpertDispatch("layers.0", SWIGLU)(c, *call)
    assert relative_rms(made, naive.experts_in_float32(expert_weights.read(c, SWIGLU), *call)) < 1e-5
    assert reasons(fresh_trace) == {("fused", "1", "cpu"): 1}


def test_a_kernel_that_could_not_be_tried_is_tried_by_the_next_layer(container, token, offer):
    """While the weights are differentiated there are no values to compare."""
    c, call = container(), token()
    offer(Offered(prepared=lambda *token: 3 * gather.experts(c, SWIGLU, *token)), name="untried")
    weight = c.up_proj.weight

    def loss(value):
        c.up_proj.weight = value
        return ExpertDispatch("layers.0", SWIGLU)(c, *call).sum()

    mx.grad(loss)(weight)
    c.up_proj.weight = weight
    with pytest.warns(RuntimeWarning, match="'untried' computes something else"):
        ExpertDispatch("layers.1", SWIGLU)(c, *call)


def test_a_plugins_kernel_is_not_asked_when_switched_off_or_adapted(container, token, fresh_trace, offer):
    kernel, c = offer(Offered()), container()
    ExpertDispatch("layers.0", SWIGLU, False)(c, *token())
    c.up_proj = LoRASwitchLinear.from_base(c.up_proj, r=2)
    ExpertDispatch("layers.0", SWIGLU)(c, *token())
    assert kernel.asked == []
    assert fresh_trace.total("gather") == 2
