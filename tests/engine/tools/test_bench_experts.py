"""What is timed is what is claimed: the same tokens on both paths, in turn, held to the truth."""

import mlx.core as mx
import pytest

from mlx_experts.engine.kernels import activations, expert_weights, naive
from mlx_experts.engine.tools import bench_experts as measure
from mlx_experts.registry.catalog.public_shapes import Shape
from mlx_experts.registry.errors import SettingError


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(measure, "SAMPLE_SECONDS", 1e-4)
    monkeypatch.setattr(measure, "EXPERT_BYTES", 1 << 20)


def layer(**changes):
    shape = {"hidden": 128, "width": 256, "experts": 8, "top_k": 2, "activation": activations.make("swiglu")}
    return measure.random_layer(**{**shape, "dtype": mx.float32, **changes})


@pytest.mark.parametrize("mode", ["affine", "mxfp4", "mxfp8", "nvfp4", "plain"])
@pytest.mark.parametrize("name", ["swiglu", "relu2"])
def test_random_experts_give_outputs_of_a_sensible_size(mode, name):
    made = layer(storage=measure.storage_of(mode, 4, 64), activation=activations.make(name), bias=True)
    experts = expert_weights.read(made.container, made.activation)
    size = mx.abs(naive.experts_in_float32(experts, *made.tokens[0])).mean().item()
    assert 1e-3 < size < 1e3
    assert len({tuple(t[1].reshape(-1).tolist()) for t in made.tokens}) > 1


@pytest.mark.parametrize("baseline", ["gather", "mlx-lm"])
@pytest.mark.parametrize(("dtype", "close"), [(mx.float32, 1e-5), (mx.bfloat16, 5e-3)])
def test_compare_reports_times_ratio_and_errors(baseline, dtype, close):
    result = measure.compare(layer(dtype=dtype), rounds=5, baseline=baseline)
    assert result.baseline_us > 0 < result.fused_us
    assert result.ratio == pytest.approx(result.baseline_us / result.fused_us)
    assert result.fused_error < close
    assert result.baseline_error < 0.1
    # 4-bit codes and two 16- or 32-bit numbers for each 64 of them, 2 experts of 3 stacks.
    assert result.bytes_per_token == 2 * 3 * 128 * 256 * (4 + 2 * dtype.size * 8 / 64) / 8
    assert result.gigabytes_per_second == pytest.approx(result.bytes_per_token / result.fused_us / 1e3)


def test_fewer_experts_are_made_when_they_would_not_fit():
    made = layer(experts=512, hidden=512, width=512)
    count = made.container.gate_proj.num_experts
    assert 4 <= count < 512
    assert max(t[1].max().item() for t in made.tokens) < count


def test_calls_alternate_and_warm_ups_are_not_counted():
    order = []
    calls = {"a": lambda n: order.append(("a", n)), "b": lambda n: order.append(("b", n))}
    times = measure.interleaved(calls, rounds=3, warm_up=1)
    assert order == [(name, n) for n in (-1, 0, 1, 2) for name in ("a", "b")]
    assert [len(t) for t in times.values()] == [3, 3]


def test_a_width_that_has_no_whole_groups_is_an_error():
    with pytest.raises(SettingError, match="multiple of 64"):
        layer(width=96)


def test_a_shape_that_no_kernel_takes_is_an_error_that_names_the_rule():
    with pytest.raises(SettingError, match="top_k"):
        measure.compare(layer(experts=40, top_k=33), rounds=3)


def test_storage_options_are_checked():
    assert measure.storage_of("nvfp4", 4, 64) == measure.Storage("nvfp4", 4, 16)
    for bits, group, named in ((7, 64, "bits"), (4, 16, "group size")):
        with pytest.raises(SettingError, match=f"no affine format with this {named}"):
            measure.storage_of("affine", bits, group)


def test_the_read_bandwidth_is_a_plausible_figure():
    assert 1e8 < measure.read_bandwidth(rounds=3) < 1e13


def test_a_public_shape_becomes_its_layer():
    shape = Shape(
        family="a",
        checkpoint="b",
        hidden=64,
        width=128,
        experts=4,
        top_k=2,
        activation="swiglu_oai",
        limit=7.0,
        bias=True,
    )
    made = measure.layer_of(shape, measure.Storage(), "bfloat16")
    assert made.activation == activations.make("swiglu_oai", 1.0, 7.0)
    assert made.tokens[0][0].dtype == mx.bfloat16
    assert "bias" in made.container.down_proj


def test_figures_name_device_version_and_date():
    assert set(measure.about()) == {"device", "mlx", "date"}
