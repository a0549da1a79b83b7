"""docs/schema.md names everything that a family file may say."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import get_args

import pytest
from mlx_lm.models.cache import CacheList

from mlx_experts.engine.dispatch.eligibility import RULES
from mlx_experts.engine.dispatch.router_eligibility import steps_of
from mlx_experts.engine.kernels.request import Decline
from mlx_experts.engine.tools.family_check import build_tiny
from mlx_experts.plugins import builtin, standard
from mlx_experts.registry.catalog.catalog import Catalog
from mlx_experts.registry.checks.known_names import ACTIVATIONS, CONFIG_NAMES
from mlx_experts.registry.resolve.tiny_config import tiny_config
from mlx_experts.registry.spec import attention, backbone, checkpoint, family, layer_rules, prediction
from mlx_experts.registry.spec.family import RouterSpec
from mlx_experts.registry.spec.values import Spec

PAGE = (Path(__file__).parents[2] / "docs" / "schema.md").read_text(encoding="utf-8")
ROOMS = (attention, backbone, checkpoint, family, layer_rules, prediction)
PIECES = {
    **{path: piece for path, piece in standard.COMPONENTS.items()},
    **{f"{builtin.__name__}.{path}": piece for path, piece in builtin.COMPONENTS.items()},
}
HEADINGS = {"layout operation": "Layout operations", "fallbacks": "Fallbacks"}


def sections(module: object) -> list[type[Spec]]:
    name = module.__name__  # type: ignore[attr-defined]
    return [
        each
        for each in vars(module).values()
        if isinstance(each, type) and issubclass(each, Spec) and each.__module__ == name
    ]


def part(heading: str) -> str:
    """What stands under a heading, up to the next one of any depth."""
    found = re.search(rf"^#+ {re.escape(heading)}\n(.*?)(?=^#+ |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert found is not None, heading
    return found[1]


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: room.__name__.rpartition(".")[2])
def test_every_section_has_a_part_with_each_of_its_keys(room: object) -> None:
    for section in sections(room):
        text = part(section.__name__.removesuffix("Spec"))
        for name, info in section.model_fields.items():
            assert f"| `{info.alias or name}` |" in text, (section.__name__, name)


@pytest.mark.parametrize("path", PIECES)
def test_every_piece_is_listed_with_each_of_its_options(path: str) -> None:
    kind, name = PIECES[path]
    heading = HEADINGS.get(kind, f"{kind.capitalize()}s")
    assert f"| `{name}` |" in part(heading)
    for section in sections(importlib.import_module(path)):
        heading = re.sub(r"Options$", " options", section.__name__.removesuffix("Spec"))
        for key, info in section.model_fields.items():
            assert f"| `{info.alias or key}` |" in part(heading), (section.__name__, key)


def test_every_activation_score_and_selection_is_listed() -> None:
    text = part("Activations")
    for name in ACTIVATIONS:
        assert f"| `{name}` |" in text
    for name in CONFIG_NAMES:
        assert f"`{name}`" in text
    for name in get_args(RouterSpec.model_fields["score"].annotation):
        assert f"| `{name}` |" in part("Scores")
    assert "| `topk` |" in part("Selections")
    assert "| `gqa` |" in part("Mixers")


@pytest.mark.parametrize(
    "name", ["deepseek_v4", "glm5_next", "gemma4_text", "inkling", "longcat_flash_ngram", "nemotron_h"]
)
def test_the_caches_that_models_make_are_those_of_the_page(name: str) -> None:
    rows = re.findall(r"^\| (\w+) \| `(\w+)` \|.*\| ([^|]*) \|$", part("Caches"), re.MULTILINE)
    listed = {(kind, piece): set(re.findall(r"`(\w+)`", classes)) for kind, piece, classes in rows}
    family = Catalog().load(name)
    model = build_tiny(family, tiny_config(family))
    plan = model.plan
    for layer, made in zip(plan.layers, model.decoder.make_caches()[1:], strict=True):
        parts = [("mixer", layer.mixer.kind)] if layer.mixer is not None else []
        known = {each for key in [*parts, ("block", layer.block.kind)] for each in listed.get(key, ())}
        assert classes_of(made) <= known, (layer.index, parts)
    if plan.embedding.kind != "standard":
        found = classes_of(model.decoder.make_caches()[0])
        assert found == listed["embedding", plan.embedding.kind] != set()


def classes_of(made: object) -> set[str]:
    """The names of a cache's class and of those that it holds."""
    held = made.caches if isinstance(made, CacheList) else ()
    own = set() if made is None else {type(made).__name__}
    return own.union(*map(classes_of, held))


def test_every_mixer_says_what_it_keeps() -> None:
    for kind, name in PIECES.values():
        if kind == "mixer":
            assert f"| mixer | `{name}` |" in part("Caches")


def test_what_a_router_can_say_and_the_kernel_cannot_is_listed() -> None:
    text = part("Fallbacks")
    for spec in ({"select": "other"}, {"score_dtype": "logits"}, {"expert_scale": "scale"}):
        declined = steps_of(RouterSpec.model_validate({"score": "softmax", **spec}), 8, 2)
        assert isinstance(declined, Decline)
        assert f"| `{declined.rule}` | {declined.wanted} |" in text
    for rule in RULES:
        assert (rule.__doc__ or "").splitlines()[0] in text


def test_every_link_of_the_page_leads_to_a_heading() -> None:
    headings = {re.sub(r" ", "-", line).lower() for line in re.findall(r"^#+ (.*)$", PAGE, re.MULTILINE)}
    for target in re.findall(r"\]\(#([^)]+)\)", PAGE):
        assert target in headings, target
