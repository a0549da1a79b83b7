"""Any family file ends in a family that is used or in one error that names the file.

Every run tries the same few examples; `pytest --hypothesis-profile long` goes looking for new ones.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from mlx_experts.engine.tools.family_check import build_tiny
from mlx_experts.registry.catalog.catalog import Catalog
from mlx_experts.registry.checks.static_check import check_fast
from mlx_experts.registry.cli import run
from mlx_experts.registry.errors import RegistryError
from mlx_experts.registry.resolve.tiny_config import tiny_config

ROOT = Path(__file__).parent.parent.parent
FILES = {path.stem: path.read_text(encoding="utf-8") for path in sorted((ROOT / "families").glob("*.yaml"))}
Where = tuple[str | int, ...]

WORDS = st.sampled_from(
    [
        "softmax",
        "sigmoid",
        "topk",
        "gqa",
        "mla",
        "full_attention",
        "*",
        "{layer}",
        "a.b",
        "..",
        "per_expert",
        "",
    ]
)
PLAIN = (
    st.none()
    | st.booleans()
    | st.sampled_from([-1, 0, 1, 2, 2**31, 10**30, 0.5, -0.5, float("nan"), float("inf")])
    | WORDS
    | st.text(max_size=4)
)
REFERENCES = st.fixed_dictionaries(
    {"from": WORDS | st.lists(WORDS, max_size=2) | PLAIN},
    optional={
        "default": PLAIN,
        "map": st.dictionaries(WORDS | st.booleans(), PLAIN, max_size=2) | PLAIN,
        "if_null": PLAIN,
        "times": PLAIN,
        "present": PLAIN,
        "length": PLAIN,
        "per_layer": PLAIN,
        "zero_is_absent": PLAIN,
    },
)
VALUES = (
    PLAIN
    | REFERENCES
    | st.lists(PLAIN, max_size=3)
    | st.dictionaries(st.sampled_from(["kind", "path", "name", "op"]) | WORDS, PLAIN, max_size=3)
)


def places(value: Any, above: Where = ()) -> Iterator[Where]:
    """The way to every entry of nested mappings and lists."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*above, key)
        yield from places(inner, (*above, key))


def change(data: Any, where: Where, value: Any) -> None:
    """Set an entry, where an earlier change has left a way to it."""
    with suppress(IndexError, KeyError, TypeError):
        for part in where[:-1]:
            data = data[part]
        data[where[-1]] = value


@st.composite
def files(draw: st.DrawFn) -> tuple[str, str]:
    """A name and the text of its family file, with entries or characters changed."""
    name = draw(st.sampled_from(sorted(FILES)))
    text = FILES[name]
    if draw(st.integers(0, 3)) == 0:
        start = draw(st.integers(0, len(text)))
        end = draw(st.integers(start, min(start + 40, len(text))))
        return name, text[:start] + draw(
            st.text(max_size=6) | st.sampled_from(["&a", "*a", "!!python", "\t", "{", "- "])
        ) + text[end:]
    data = copy.deepcopy(yaml.safe_load(text))
    for _ in range(draw(st.integers(1, 2))):
        where = draw(st.sampled_from(list(places(data))))
        if draw(st.integers(0, 4)) == 0:
            where = (*where[:-1], draw(WORDS))
        change(data, where, draw(VALUES))
    return name, yaml.safe_dump(data, sort_keys=False)


def _tries(folder: Path, name: str) -> None:
    """Read the catalogue, check the family, build its tiny model and run it."""
    own = Catalog(bundled=folder)
    check_fast(own, own.names())
    family = own.load(name)
    if family.backbone is None:
        model = build_tiny(family, tiny_config(family))
        mx.eval(model(mx.array([[1, 2, 3]])))


def test_any_family_file_gives_a_family_or_an_error(lab: Any, tmp_path: Path) -> None:
    bases = {name: yaml.safe_load(text).get("extends") for name, text in FILES.items()}

    @given(files())
    def holds(example: tuple[str, str]) -> None:
        name, text = example
        for old in tmp_path.glob("*.yaml"):
            old.unlink()
        if bases[name] is not None:
            (tmp_path / f"{bases[name]}.yaml").write_text(FILES[bases[name]], encoding="utf-8")
        (tmp_path / f"{name}.yaml").write_text(text, encoding="utf-8")
        with lab.within(20), suppress(RegistryError):
            _tries(tmp_path, name)

    holds()


@pytest.mark.parametrize(
    "text", ["", "a: [", "- a", "\0", "family: x\nmodel_types: [x]\narchitectures: []\n" * 2]
)
def test_a_file_that_is_none_is_your_error(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "x.yaml").write_text(text)
    assert run(["check", "x", "--families", str(tmp_path)]) in (1, 2)
    error = capsys.readouterr().err
    assert str(tmp_path / "x.yaml") in error
    assert "Traceback" not in error
