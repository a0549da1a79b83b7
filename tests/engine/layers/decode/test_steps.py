"""Pure steps merge into one function that hands on only what is read later, and sees weights as they are."""

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlx_experts.engine.dispatch.trace import Trace, TraceKey
from mlx_experts.engine.kernels.gpu.pieces.packed import PackedValue, laid, viewed
from mlx_experts.engine.kernels.request import Decline
from mlx_experts.engine.layers.decode.steps import Call, Merged, Pure, Unit
from mlx_experts.engine.layers.decode.watched import Watched
from mlx_experts.engine.layers.forward_context import ForwardState
from mlx_experts.engine.layers.versioned import Holder

NONE = Decline("kernel", "one", "none", "")
STATE = ForwardState(mx.array([[1]]))


def product(layer, reads=("x",), writes=("x",), runs=None, tallies=()):
    """A step of one matrix, which adds its inputs before."""

    def run(modules, *inputs):
        if runs is not None:
            runs.append(reads)
        return (modules[0](sum(inputs[1:], inputs[0])),) * len(writes)

    return Pure.of("product", reads, writes, Watched(layer), run, lambda: NONE, tallies=tallies)


def call(reads, writes):
    def run(values, state, caches):
        caches.append(reads)
        values.update(dict.fromkeys(writes, sum(values[name] for name in reads)))

    return Call(reads, writes, run)


def test_neighbours_are_one_function_and_calls_stay_between():
    layers = [nn.Linear(4, 4) for _ in range(4)]
    steps = [product(layers[0]), product(layers[1]), call(("x",), ("y",)), product(layers[2], ("y",), ("z",))]
    made = Merged(steps, ("z",), compiled=False)
    assert [type(each) is Unit for each in made.runs] == [True, False, True]
    assert made.runs[0].outputs == ("x",)
    x = mx.random.normal((1, 1, 4))
    values = {"x": x}
    made(values, STATE, [])
    assert mx.allclose(values["z"], layers[2](layers[1](layers[0](x))))


def test_what_is_made_anew_before_it_is_read_is_not_handed_on():
    layer = nn.Linear(4, 4)
    steps = [
        product(layer, ("x",), ("a", "b", "c")),
        call(("a",), ("b",)),
        product(layer, ("b", "c"), ("h",)),
    ]
    first = Merged(steps, ("h",), compiled=False).runs[0]
    assert first.outputs == ("a", "c")


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("change", ["replaced", "other shape"])
def test_weights_are_those_of_the_moment(compiled, change):
    layer = nn.Linear(4, 4)
    run = Merged([product(layer)], ("x",), compiled)
    x = mx.random.normal((1, 1, 4))
    run({"x": x}, STATE, [])
    match change:
        case "replaced":
            layer.weight = layer.weight * 2
        case "other shape":
            layer.weight, layer.bias = mx.random.normal((3, 4)), mx.zeros((3,))
    values = {"x": x}
    run(values, STATE, [])
    assert mx.allclose(values["x"], layer(x))


def launch(reads, writes, run):
    """A step with a form of its own, which gives values in one array and notes how it gets them."""
    seen = []

    def fused(modules, *inputs):
        seen.append([type(value) for value in inputs])
        made = dict(zip(writes, run(*map(viewed, inputs)), strict=True))
        return tuple(laid(made, "cuda").values())

    def plain(modules, *inputs):
        raise AssertionError("it has a form of its own")

    return Pure.of("launch", reads, writes, Watched(), plain, lambda: fused), seen


@pytest.mark.parametrize("compiled", [True, False])
def test_what_a_launch_left_is_handed_on_in_its_array_where_no_call_reads_it(compiled):
    first, _ = launch(("x",), ("y", "z", "w"), lambda x: (x * 2, x + 1, x - 1))
    second, seen = launch(("y", "z", "w"), ("h",), lambda y, z, w: (y + z * w,))
    run = Merged([first, call(("y",), ("y", "w")), second], ("h",), compiled)
    for x in (3.0, 5.0):
        values = {"x": mx.full((1, 1, 4), x)}
        run(values, STATE, [])
        assert mx.allclose(values["h"], mx.full((1, 1, 4), 2 * x + (x + 1) * 2 * x))
        assert "z" not in values
        assert all(isinstance(value, mx.array) for value in values.values())
    # The call made y and w anew; only z is where the first launch left it.
    assert seen == [[mx.array, PackedValue, mx.array]] * (1 if compiled else 2)


def test_a_step_in_plain_mlx_gets_a_view_of_what_a_launch_left():
    first, _ = launch(("x",), ("y", "z"), lambda x: (x * 2, x + 1))
    layer = nn.Linear(4, 4)
    run = Merged([first, call(("x",), ("x",)), product(layer, ("y", "z"), ("h",))], ("h",), compiled=True)
    values = {"x": mx.random.normal((1, 1, 4))}
    want = layer(values["x"] * 3 + 1)
    run(values, STATE, [])
    assert mx.allclose(values["h"], want, atol=1e-6)


def test_a_compiled_function_is_traced_once_for_many_tokens_and_positions():
    runs = []
    layer = nn.Linear(4, 4)
    run = Merged([product(layer, ("x", "p"), runs=runs)], ("x",), compiled=True)
    for offset in range(5):
        run({"x": mx.ones((1, 1, 4)), "p": mx.array([offset] * 4)}, STATE, [])
    assert len(runs) == 1


def test_each_call_is_counted_though_it_was_traced_once():
    trace = Trace()
    tally = trace.piece_tally(TraceKey("layers.0", "compiled", "1", "cuda"), "router: cuda")
    run = Merged([product(nn.Linear(4, 4), tallies=(tally,))], ("x",), compiled=True)
    for _ in range(3):
        run({"x": mx.ones((1, 1, 4))}, STATE, [])
    (row,) = trace.pieces()
    assert (row.count, row.note) == (3, "router: cuda")
    assert trace.snapshot() == []


def test_an_array_that_is_assigned_is_noticed_wherever_it_lies():
    holder = Holder()
    holder.first, holder.second, holder.alone = nn.Linear(4, 4), nn.Linear(4, 4), mx.ones((2,))
    watched = Watched(holder, without=(holder.second,))
    assert len(watched.holders) == 3
    holder.second.weight = mx.zeros((4, 4))
    assert watched.stands()
    holder.first.weight = mx.zeros((4, 4))
    assert not watched.stands()
    assert watched.again().stands()


def test_a_position_is_the_first_of_four_values_and_one_array_for_equal_offsets():
    state = ForwardState(mx.array([[1]]))
    assert state.position(7) is state.position(7)
    assert state.position(7).tolist()[0] == 7
    assert state.position(7).shape == (4,)
    assert state.position(mx.array([9])).tolist() == [9] * 4
