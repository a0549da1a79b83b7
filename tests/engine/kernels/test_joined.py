"""Arrays in one: modules compute as before, launches have few inputs, and odd sizes keep their places."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlx_experts.engine.kernels.gpu.joined import Joined, leaves_of, reading
from mlx_experts.engine.kernels.gpu.source import Launch
from mlx_experts.engine.layers.versioned import Holder


def launch(*inputs):
    return Launch("test", inputs, ("y",), "", "y[0] = x[0];\n", 1, 1)


@pytest.mark.parametrize("mode", ["affine", "mxfp4"])
def test_modules_compute_the_same_over_views(mode):
    layers = [nn.QuantizedLinear.from_linear(nn.Linear(64, n, bias=True), 32, 4, mode) for n in (8, 24)]
    x = mx.random.normal((2, 64))
    want = [layer(x) for layer in layers]
    before = [dict(layer) for layer in layers]
    joined = Joined.of(leaves_of(*layers))
    assert joined is not None
    for layer, first, y in zip(layers, before, want, strict=True):
        assert mx.array_equal(layer(x), y)
        for name, value in first.items():
            if isinstance(value, mx.array):
                assert layer[name] is not value
                assert mx.array_equal(layer[name], value)
                assert id(layer[name]) in joined.begins


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16, mx.float32, mx.uint32, mx.uint8], ids=str)
def test_sizes_that_fill_no_word_keep_their_values(dtype):
    holder = {str(size): mx.random.uniform(0, 200, (size,)).astype(dtype) for size in (1, 7, 65)}
    first = dict(holder)
    joined = Joined.of([(holder, name) for name in holder])
    for name, array in holder.items():
        assert mx.array_equal(array, first[name])
        assert joined.begins[id(array)] % 64 == 0
        at = joined.begins[id(array)]
        assert mx.array_equal(joined.whole[at:].view(dtype)[: array.size], first[name])


def test_a_launch_is_given_the_first_words_of_the_same_memory():
    holder = {name: mx.random.uniform(0, 9, (65,)) for name in "ab"}
    joined = Joined.of([(holder, name) for name in holder])
    assert joined.origin.size == 4

    def start(array):
        return np.array(array, copy=False).ctypes.data

    assert start(joined.origin) == start(joined.whole)
    assert start(holder["b"]) == start(joined.origin) + 4 * joined.begins[id(holder["b"])]


def test_a_launch_reads_them_as_one_input_and_others_as_before():
    holder = {"w": mx.ones((4, 4), mx.uint32), "s": mx.ones((4,), mx.bfloat16), "i": mx.ones((2,), mx.int64)}
    alone = holder["i"]
    joined = Joined.of([(holder, name) for name in holder])
    assert holder["i"] is alone
    held = {"x": None, "w": holder["w"], "other": mx.ones((3,)), "s": holder["s"]}
    made, inputs = reading(launch(*held), held, [joined])
    assert made.inputs == ("x", "other", "me_joined0") == tuple(inputs)
    assert inputs["me_joined0"] is joined.origin
    assert (
        "const __nv_bfloat16* const s = reinterpret_cast<const __nv_bfloat16*>(me_joined0 + " in made.source
    )
    assert made.source.endswith("y[0] = x[0];\n")


def test_a_lone_array_stays_an_input():
    holder = {"w": mx.ones((4,)), "v": mx.ones((4,))}
    joined = Joined.of([(holder, name) for name in holder])
    held = {"x": None, "w": holder["w"]}
    made, inputs = reading(launch(*held), held, [joined])
    assert made.inputs == ("x", "w")
    assert inputs == held


def test_only_leaves_of_mlx_give_their_arrays():
    holder = Holder()
    holder.first, holder.alone = nn.Linear(4, 4), mx.ones((2,))
    version = holder.version
    places = leaves_of(holder, holder.first)
    assert [(leaf is holder.first, name) for leaf, name in places] == [(True, "weight"), (True, "bias")]
    assert Joined.of(places) is not None
    assert holder.version == version
