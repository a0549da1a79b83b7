"""Makes of a section the form in which a family file states it.

``Written[S]`` has the keys of the section ``S``. What the section marks as referable may be a reference to
config.json there, and a key that is left out means what the section's marks say. To a type checker the
attributes of ``Written[S]`` are of any type; ``registry.resolve`` makes an ``S`` of it.
"""

from __future__ import annotations

import functools
import operator
import types
from typing import Annotated, Any, ClassVar, Generic, Literal, TypeVar, Union, cast, get_args, get_origin

from pydantic import BeforeValidator, Field, create_model, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from mlx_experts.registry.spec.values import (
    Checked,
    FromConfig,
    Ref,
    Referable,
    Spec,
    WrittenAs,
    references_are_sound,
)

S = TypeVar("S", bound=Spec)


class Written(Spec, Generic[S]):
    """A section as a family file states it: literals and references."""

    section: ClassVar[type[Spec]]
    """The section that it becomes."""

    def __class_getitem__(cls, section: Any) -> Any:
        return _written(section)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{type(self).__name__} has no '{name}'")

    def __reduce__(self) -> tuple[Any, tuple[type[Spec]], dict[Any, Any]]:
        return _blank, (type(self).section,), self.__getstate__()

    def check(self) -> None:
        """Hold to each other what no reference stands for."""
        type(self).section.check(self)

    @model_validator(mode="before")
    @classmethod
    def _names_may_be_references(cls, data: Any) -> Any:
        if not cls.section.names_are_keys or not isinstance(data, dict):
            return data
        return {
            k: {"from": v} if isinstance(v, str) or (isinstance(v, list) and v) else v
            for k, v in data.items()
        }


def _blank(section: type[Spec]) -> Spec:
    """A written section without its state: its class has no name by which a pickle could find it."""
    kind = _written(section)
    return kind.__new__(kind)


def section_of(written: Written[S]) -> type[S]:
    """The section that a written one becomes."""
    return cast(type[S], type(written).section)


def read_elsewhere(section: type[Spec], name: str) -> bool:
    """Whether the resolved field is no reading of the written one."""
    return any(isinstance(mark, WrittenAs) for mark in section.model_fields[name].metadata)


@functools.cache
def has_references(kind: Any) -> bool:
    """Whether a type, or a section in it, holds what may be a reference."""
    if isinstance(kind, type) and issubclass(kind, Spec):
        return any(has_references(info.rebuild_annotation()) for info in kind.model_fields.values())
    if any(
        isinstance(mark, Referable | FromConfig | WrittenAs) for mark in getattr(kind, "__metadata__", ())
    ):
        return True
    return get_origin(kind) is not Literal and any(map(has_references, get_args(kind)))


@functools.cache
def _written(section: type[Spec]) -> type[Spec]:
    fields: dict[str, Any] = {name: _field(info) for name, info in section.model_fields.items()}
    made = create_model(
        section.__name__, __base__=Written, __module__=section.__module__, __doc__=section.__doc__, **fields
    )
    made.section, made.alone = section, section.alone
    return made


def _field(info: FieldInfo) -> tuple[Any, Any]:
    """The type and the field of one key as written."""
    said = next((mark for mark in info.metadata if isinstance(mark, WrittenAs)), None)
    key = next((mark.key for mark in info.metadata if isinstance(mark, FromConfig)), None)
    kind = said.kind if said is not None else _as_written(info.rebuild_annotation())
    default = said.default if said is not None else info.default
    if key is not None:
        absent = {} if default is PydanticUndefined else {"default": default}
        default = Ref.unchecked(keys=(key,), **absent)
    elif isinstance(default, Spec) and not isinstance(default, Written) and has_references(type(default)):
        default = _as_default(default)
    return kind, Field(default, alias=info.alias, description=info.description)


def _as_default(section: Spec) -> Spec:
    """A section of literals as written."""
    stated = section.model_dump(by_alias=True, exclude_unset=True)
    kind = _written(type(section))
    return kind.model_validate(stated) if stated else kind.unchecked()


def _as_written(kind: Any) -> Any:
    """A type in which whatever is marked may be a reference, and sections are as written."""
    if isinstance(kind, type) and issubclass(kind, Spec):
        return _written(kind) if has_references(kind) else kind
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        inner, marks = _as_written(kind.__origin__), []
        referable = None
        for mark in kind.__metadata__:
            if isinstance(mark, Referable):
                referable = mark
            elif not isinstance(mark, FromConfig):
                marks.append(mark)
        if referable is not None and referable.inside:
            return (
                Checked
                if inner is Any
                else Annotated[dict[str, Checked], BeforeValidator(references_are_sound)]
            )
        if marks:
            inner = Annotated[(inner, *marks)]
        return Ref | inner if referable is not None else inner
    if origin is Union or origin is types.UnionType:
        return functools.reduce(operator.or_, map(_as_written, arguments))
    if origin in (tuple, dict, list):
        return origin[tuple(each if each is ... else _as_written(each) for each in arguments)]
    return kind
