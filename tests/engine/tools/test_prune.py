"""What is cut is what the measure says, and what is left is the model without those experts."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest

from mlx_experts import load, load_model, save_model
from mlx_experts.engine.models.base import LanguageModel
from mlx_experts.engine.tools import texts
from mlx_experts.engine.tools.prune import Cut, config_after, cut_experts, plan_cuts
from mlx_experts.engine.tools.routing import LayerRouting, Routing, blocks_of, digest_of, record_routing
from mlx_experts.registry.cli import run
from mlx_experts.registry.errors import SettingError

DEMO = Path(str(files("mlx_experts").joinpath("demo")))
TEXT = Path(__file__).parents[3] / "scripts" / "demo_text" / "01_ideas.md"
IDS = mx.array([[5, 9, 2, 7, 30, 8, 100, 6, 11, 3, 250, 17]])


def statistics(model: LanguageModel, picks: list[int], effects: list[float]) -> Routing:
    layers = []
    for index, block in blocks_of(model):
        layer = LayerRouting(index, block.name, block.experts, block.top_k, sum(picks))
        layer.picks, layer.effects = np.array(picks), np.array(effects)
        layers.append(layer)
    return Routing(model.plan.family.family, digest_of(model), layers)


def test_reap_keeps_what_matters_when_picked_and_frequency_what_is_picked_often() -> None:
    model, _ = load_model(DEMO)
    picks = [100] * 8 + [10] * 8
    effects = [100.0] * 8 + [90.0] * 8
    routing = statistics(model, picks, effects)
    assert plan_cuts(model, routing, 0.5, "reap")[0].kept == tuple(range(8, 16))
    assert plan_cuts(model, routing, 0.5, "frequency")[0].kept == tuple(range(8))


def test_a_model_without_experts_that_nothing_picks_is_the_same_model() -> None:
    model, _ = load_model(DEMO)
    with record_routing(model) as routing:
        before = np.array(model(IDS))
    dead = [layer.dead for layer in routing.layers]
    assert all(dead)
    cuts = [
        Cut(layer.layer, tuple(e for e in range(layer.experts) if e not in layer.dead[:1]), layer.experts)
        for layer in routing.layers
    ]
    cut_experts(model, cuts)
    assert {block.experts for _, block in blocks_of(model)} == {15}
    np.testing.assert_allclose(np.array(model(IDS)), before, atol=1e-5)


@pytest.mark.parametrize("unequal", [False, True])
def test_what_is_left_is_saved_and_loads_here_and_in_mlx_lm_where_counts_are_equal(
    tmp_path: Path, unequal: bool
) -> None:
    model, config = load_model(DEMO)
    kept = [12, 14, 10, 12] if unequal else [12] * 4
    cuts = [Cut(i, tuple(range(n)), 16) for i, n in enumerate(kept)]
    changed = config_after(config, model, cuts)
    cut_experts(model, cuts)
    want = np.array(model(IDS))
    save_model(tmp_path / "pruned", model, changed)
    assert json.loads((tmp_path / "pruned" / "config.json").read_text())["num_experts"] == (
        kept if unequal else 12
    )
    again, _ = load_model(tmp_path / "pruned")
    np.testing.assert_allclose(np.array(again(IDS)), want, atol=1e-5)
    if not unequal:
        theirs, _ = mlx_lm.utils.load_model(tmp_path / "pruned")
        np.testing.assert_allclose(np.array(theirs(IDS).astype(mx.float32)), want, atol=0.2, rtol=0.1)


def test_the_best_of_the_whole_model_may_be_unequal_and_never_fewer_than_a_token_picks() -> None:
    model, _ = load_model(DEMO)
    with record_routing(model) as routing:
        mx.eval(model(IDS))
    cuts = plan_cuts(model, routing, 0.5, "reap", "layer")
    top_k = blocks_of(model)[0][1].top_k
    assert len({len(cut.kept) for cut in cuts}) > 1
    assert all(len(cut.kept) >= top_k for cut in cuts)


@pytest.mark.parametrize(("keep", "words"), [(0.1, "cannot pick from"), (0.0, "share"), (1.5, "share")])
def test_shares_that_leave_too_few_are_refused(keep: float, words: str) -> None:
    model, _ = load_model(DEMO)
    with record_routing(model) as routing:
        mx.eval(model(IDS))
    with pytest.raises(SettingError, match=words):
        plan_cuts(model, routing, keep)


def test_statistics_of_another_model_are_refused() -> None:
    model, _ = load_model(DEMO)
    with record_routing(model) as routing:
        mx.eval(model(IDS))
    cut_experts(model, [Cut(0, tuple(range(12)), 16)])
    with pytest.raises(SettingError, match="another model"):
        plan_cuts(model, routing, 0.75)


def test_the_command_states_perplexity_before_and_after(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "pruned"
    command = ["prune", str(DEMO), "--keep", "0.75", "--text", str(TEXT), "--tokens", "300"]
    assert run([*command, "--output", str(out), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    model, tokenizer = load(DEMO)
    given = texts.windows([TEXT.read_text()], tokenizer, 512, 300)
    assert said["perplexity"]["before"] == pytest.approx(texts.perplexity(model, given), rel=1e-5)
    left, tokenizer = load(out)
    assert said["perplexity"]["after"] == pytest.approx(texts.perplexity(left, given), rel=1e-4)
    assert run([*command, "--output", str(out)]) == 1
    assert "is there already" in capsys.readouterr().err


def test_reap_keeps_the_demos_perplexity_better_than_frequency_or_dropping_the_most_used() -> None:
    model, tokenizer = load(DEMO)
    sources = [path.read_text() for path in sorted(TEXT.parent.iterdir())]
    given = texts.windows(sources, tokenizer, 256, 5000)
    with record_routing(model) as routing:
        for window in given:
            texts.evaluate(model, window)
    left = {}
    for measure in ("reap", "frequency", "unused"):
        pruned, _ = load_model(DEMO)
        cut_experts(pruned, plan_cuts(pruned, routing, 0.75, measure))  # type: ignore[arg-type]
        left[measure] = texts.perplexity(pruned, given)
    assert left["reap"] < left["frequency"] < left["unused"], left
