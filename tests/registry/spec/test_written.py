"""A section has two forms: as a family file states it, and with every reference read."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Annotated, Any

import pytest
from pydantic import BaseModel, Field, ValidationError

from mlx_experts.engine.models.known_families import catalog
from mlx_experts.registry.catalog.config_view import ConfigView
from mlx_experts.registry.resolve.planner import resolve
from mlx_experts.registry.resolve.resolver import Resolver
from mlx_experts.registry.resolve.tiny_config import tiny_config
from mlx_experts.registry.spec.family import MoeSpec, RouterSpec, SizesSpec
from mlx_experts.registry.spec.values import Bool, Count, FromConfig, Leaf, Options, Ref, Spec
from mlx_experts.registry.spec.written import Written, has_references, section_of

CATALOG = catalog()


class Inner(Spec):
    """A section in another."""

    alone = "on"

    on: Bool = Field(description="A switch.")


class Outer(Spec):
    """A section."""

    many: Annotated[Count, FromConfig("number")] = Field(3, description="A count that a config may say.")
    needed: Annotated[Count, FromConfig("size")] = Field(description="A count that a config must say.")
    leaf: Leaf = Field("a", description="A name, which no reference gives.")
    inner: Inner = Field(Inner(on=True), description="A section.")
    free: Options = Field({}, description="Anything.")

    def check(self) -> None:
        if self.leaf == "b":
            raise ValueError("b is taken")


def inside(value: Any) -> Iterator[Any]:
    yield value
    if isinstance(value, BaseModel):
        for name in type(value).model_fields:
            yield from inside(getattr(value, name))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for each in dataclasses.fields(value):
            yield from inside(getattr(value, each.name))
    elif isinstance(value, dict):
        yield from (found for each in value.values() for found in inside(each))
    elif isinstance(value, tuple | list):
        yield from (found for each in value for found in inside(each))


def read(stated: dict[str, Any], config: dict[str, Any]) -> Outer:
    written = Written[Outer].model_validate(stated)
    assert section_of(written) is Outer
    return Resolver("a_family", ConfigView(config)).spec(written, 0, "outer")


def test_a_reference_stands_for_what_is_left_out() -> None:
    left_out = Written[Outer]()
    assert isinstance(left_out.many, Ref)
    assert left_out.many.keys == ("number",)
    assert not left_out.many.required
    assert left_out.needed.required
    assert read({}, {"size": 5}) == Outer(needed=5)
    assert read({}, {"size": 5, "number": 7}) == Outer(needed=5, many=7)


def test_references_are_taken_where_they_are_marked_and_nowhere_else() -> None:
    stated = {"needed": 1, "inner": {"from": "switch"}, "free": {"a": [{"from": "deep"}]}}
    assert read(stated, {"switch": False, "deep": 2}) == Outer(
        needed=1, inner=Inner(on=False), free={"a": [2]}
    )
    with pytest.raises(ValidationError):
        Written[Outer].model_validate({"leaf": {"from": "name"}})
    with pytest.raises(ValidationError):
        Outer.model_validate({"needed": {"from": "size"}})


def test_both_forms_are_held_to_what_the_section_demands() -> None:
    with pytest.raises(ValidationError, match="b is taken"):
        Written[Outer].model_validate({"leaf": "b"})
    with pytest.raises(ValidationError, match="b is taken"):
        Outer(needed=1, leaf="b")


def test_a_written_section_is_no_resolved_one() -> None:
    written = Written[Outer].model_validate({"needed": 1})
    assert isinstance(written, Written)
    assert not isinstance(written, Outer)
    assert Written[Outer] is Written[Outer]
    with pytest.raises(AttributeError):
        written.nothing  # noqa: B018


@pytest.mark.parametrize("section", [RouterSpec, MoeSpec, SizesSpec])
def test_both_forms_have_the_same_keys_with_the_same_words(section: type[Spec]) -> None:
    assert has_references(section)
    written = Written[section]  # type: ignore[valid-type]
    described = {name: (each.alias, each.description) for name, each in section.model_fields.items()}
    assert {n: (each.alias, each.description) for n, each in written.model_fields.items()} == described


def test_no_plan_holds_a_reference() -> None:
    for name in CATALOG.names():
        family = CATALOG.load(name)
        plan = resolve(family, tiny_config(family))
        parts = dataclasses.replace(plan, family=None, config=None)  # type: ignore[arg-type]
        left = [each for each in inside(parts) if isinstance(each, Ref | Written)]
        assert not left, (name, left[:3])
