"""docs/schema.md names everything that a family file may say."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import get_args

import pytest

from mlx_experts.plugins import builtin, standard
from mlx_experts.registry.checks.known_names import ACTIVATIONS, CONFIG_NAMES
from mlx_experts.registry.spec import attention, backbone, checkpoint, family, layer_rules, prediction
from mlx_experts.registry.spec.family import RouterSpec
from mlx_experts.registry.spec.values import Spec

PAGE = (Path(__file__).parents[2] / "docs" / "schema.md").read_text(encoding="utf-8")
ROOMS = (attention, backbone, checkpoint, family, layer_rules, prediction)
PIECES = {
    **{path: piece for path, piece in standard.COMPONENTS.items()},
    **{f"{builtin.__name__}.{path}": piece for path, piece in builtin.COMPONENTS.items()},
}
NAMED = {kind for kind, _ in PIECES.values()} - {"cache", "fallbacks"}


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


@pytest.mark.parametrize("path", [path for path, (kind, _) in PIECES.items() if kind in NAMED])
def test_every_piece_is_listed_with_each_of_its_options(path: str) -> None:
    kind, name = PIECES[path]
    heading = {"layout operation": "Layout operations"}.get(kind, f"{kind.capitalize()}s")
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


def test_every_link_of_the_page_leads_to_a_heading() -> None:
    headings = {re.sub(r" ", "-", line).lower() for line in re.findall(r"^#+ (.*)$", PAGE, re.MULTILINE)}
    for target in re.findall(r"\]\(#([^)]+)\)", PAGE):
        assert target in headings, target
