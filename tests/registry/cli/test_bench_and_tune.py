"""The verbs that measure: what they print, keep and draw."""

import json
import sys

import pytest
import typer
from typer.testing import CliRunner

from mlx_experts.engine.dispatch import tuning_cache
from mlx_experts.engine.dispatch.policy import Bounds, Tuned
from mlx_experts.engine.tools import bench_experts as measure
from mlx_experts.registry.catalog import public_shapes as shapes
from mlx_experts.registry.catalog.public_shapes import Shape
from mlx_experts.registry.cli import plot
from mlx_experts.registry.cli.devices.bench import bench
from mlx_experts.registry.cli.devices.tune import tune as tune_verb
from mlx_experts.registry.errors import SettingError

SMALL = (
    Shape(family="narrow", checkpoint="none", hidden=64, width=64, experts=4, top_k=2),
    Shape(family="wide", checkpoint="none", hidden=64, width=128, experts=4, top_k=2, activation="relu2"),
)


@pytest.fixture(autouse=True)
def quick(monkeypatch, tmp_path):
    """Two tiny shapes, and a folder of its own for what is kept."""
    monkeypatch.setattr(measure, "SAMPLE_SECONDS", 1e-4)
    monkeypatch.setattr(measure, "EXPERT_BYTES", 1 << 20)
    monkeypatch.setattr(shapes, "shapes", lambda: SMALL)
    monkeypatch.setenv(tuning_cache.CACHE_DIR, str(tmp_path / "kept"))


def run(verb, *arguments):
    app = typer.Typer()
    app.command()(verb)
    return CliRunner().invoke(app, list(arguments), catch_exceptions=True)


def test_bench_prints_one_row_a_family_with_device_and_date():
    result = run(bench, "--rounds", "3")
    assert result.exit_code == 0, result.output
    assert "narrow" in result.output
    assert "wide" in result.output
    assert measure.about()["device"] in result.output
    assert measure.about()["date"] in result.output


def test_bench_as_json_names_the_conditions_and_holds_every_figure():
    result = run(bench, "wide", "--rounds", "3", "--json", "--dtype", "bfloat16", "--mode", "mxfp4")
    report = json.loads(result.output)
    assert (report["dtype"], report["storage"]["mode"], report["baseline"]) == ("bfloat16", "mxfp4", "gather")
    (entry,) = report["shapes"]
    assert entry["family"] == "wide"
    assert entry["ratio"] == pytest.approx(entry["baseline_us"] / entry["fused_us"])
    assert entry["fused_error"] < 5e-3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bench_puts_a_shared_expert_in_both_paths(dtype):
    results = [
        run(bench, "wide", "--rounds", "3", "--json", "--dtype", dtype, *more)
        for more in ([], ["--shared", "192"])
    ]
    without, beside = (json.loads(r.output) for r in results)
    assert beside["shared"] == 192
    (alone,), (both,) = without["shapes"], beside["shapes"]
    # Two matrices of 192 rows more, in four bits with two scales of the dtype for every 64.
    wide = 2 if dtype == "bfloat16" else 4
    assert both["bytes_per_token"] - alone["bytes_per_token"] == 2 * 192 * (64 // 2 + 2 * wide)
    assert max(both["fused_error"], both["baseline_error"]) < 5e-2
    assert both["fused_error"] < 5e-3


@pytest.mark.parametrize("name", ["ratio.svg", "ratio.png"])
def test_bench_draws_the_ratio(tmp_path, name):
    pytest.importorskip("matplotlib")
    result = run(bench, "--rounds", "3", "--plot", str(tmp_path / name))
    assert result.exit_code == 0, result.output
    drawn = (tmp_path / name).read_bytes()
    if name.endswith("svg"):
        assert b"<svg" in drawn
        assert b"break-even" in drawn
        assert b"narrow" in drawn
    else:
        assert drawn.startswith(b"\x89PNG")


def test_a_picture_that_cannot_be_drawn_is_refused_before_measuring(tmp_path, monkeypatch):
    with pytest.raises(SettingError, match=r"\.svg or \.png"):
        plot.check_plot(tmp_path / "a.gif")
    with pytest.raises(SettingError, match="folder"):
        plot.check_plot(tmp_path / "no" / "a.svg")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(plot, "find_spec", lambda name: None)
    with pytest.raises(SettingError, match=r"mlx-experts\[plot\]"):
        plot.check_plot(tmp_path / "a.svg")


def test_tune_keeps_a_bound_and_says_where(tmp_path):
    result = run(tune_verb, "--rounds", "5", "--storages", "2", "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.output)
    for storage in ("affine 4-bit g64", "mxfp4 4-bit g32"):
        its = [t for t in report["timings"] if t["storage"] == storage and t["rows"] == 1]
        assert [(t["width"], t["path"]) for t in its] == [(64, "fused"), (128, "fused")]
    assert {t["rows"] for t in report["timings"]} == {1, 2, 4, 8, 16}
    assert report["file"] == str(tmp_path / "kept" / "tune.json")
    bounds = {storage: Bounds(**b) for storage, b in report["bounds"].items()}
    assert tuning_cache.bound("cpu") == Tuned(bounds)


def test_tune_prints_a_table_and_its_outcome():
    result = run(tune_verb, "narrow", "--rounds", "5", "--storages", "1")
    assert result.exit_code == 0, result.output
    assert "fused" in result.output
    assert str(tuning_cache.cache_file()) in result.output


@pytest.fixture
def small_model(monkeypatch):
    """One whole model, small enough to decode in a test."""
    from mlx_experts.registry.catalog import public_models

    known = public_models.public_model("olmoe")
    sizes = {"hidden_size": 64, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
    small = known.model_copy(
        update={"config": known.config | sizes | {"num_experts": 4, "num_experts_per_tok": 2}}
    )
    monkeypatch.setattr(public_models, "models", lambda: (small,))


def test_bench_decodes_a_whole_model_against_mlx_lm(small_model, tmp_path):
    picture = tmp_path / "token.svg"
    arguments = ("--decode", "olmoe", "--layers", "2", "--vocab", "64", "--tokens", "6", "--rounds", "3")
    result = run(bench, *arguments, "--prefill", "4", "--json", "--plot", str(picture))
    assert result.exit_code == 0, result.output
    report = json.loads(result.output)
    assert (report["family"], report["layers"], report["vocabulary"]) == ("olmoe", 2, 64)
    assert report["ratio"] == pytest.approx(
        report["ours"]["tokens_per_second"] / report["theirs"]["tokens_per_second"]
    )
    assert report["agree"] == report["tokens"] == 14
    assert "encoding" in picture.read_text(encoding="utf-8")


def test_bench_prints_the_parts_of_a_token(small_model):
    result = run(
        bench, "--decode", "olmoe", "--layers", "1", "--vocab", "64", "--tokens", "4", "--rounds", "3"
    )
    assert result.exit_code == 0, result.output
    assert all(word in result.output for word in ("mlx-lm", "mlx-experts (", "Python ms", "encoding ms"))


def test_a_prompt_is_timed_on_a_whole_model_only():
    result = run(bench, "--prefill", "16")
    assert isinstance(result.exception, SettingError)
    assert result.exception.where == "--prefill"
