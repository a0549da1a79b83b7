"""Values of a family file, and what every section of it has.

A section is declared once, with the types that it has when every reference is read. What may be a reference
to config.json carries the mark :data:`REFERABLE`; ``registry.spec.written`` makes of a section the form in
which a family file states it.
"""

import difflib
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Final, Self, TypeVar, cast

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    StrictFloat,
    StrictInt,
    StrictStr,
    model_validator,
)
from pydantic_core import PydanticCustomError

T = TypeVar("T")
SIZE_BOUND = 2**28
"""No width, count or number of rows of a model comes near it, and products of two fit in 64 bits."""
MOST_TIMES = 256
"""Nothing in a model is done so often for each token: loops of it have no tensor that must fit."""

_PART, _ON_DISK = r"[A-Za-z_][A-Za-z0-9_]*", r"([A-Za-z0-9_-]|\{layer\}|\{expert\})+"
_MODULE = rf"{_PART}(\.{_PART})*"
MODULE_PATH: Final = rf"^{_MODULE}$"
PATH_WORDS: Final = {
    rf"^{_PART}$": "the name of a module or parameter: letters, digits and _",
    MODULE_PATH: "a module path: names joined by dots, such as mlp.gate",
    rf"^({_MODULE})?$": "a module path: names joined by dots, such as mlp.gate, or nothing",
    rf"^(\.\./)?{_MODULE}$": "a module path: names joined by dots, such as mlp.gate, perhaps after ../",
    rf"^({_ON_DISK}(\.{_ON_DISK})*)?$": "a name on disk: parts joined by dots, such as mlp.experts",
    rf"^\.?{_ON_DISK}(\.{_ON_DISK})*(\.?\*)?$": "a name on disk: parts joined by dots, such as .mlp.gate",
}
"""Patterns of the paths in a family file, each with what it means to a reader."""


class Spec(BaseModel):
    """Base of every section of a family file: frozen, and closed to unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=False, defer_build=True)
    alone: ClassVar[str | None] = None
    """The key whose value may stand for the whole section."""
    names_are_keys: ClassVar[bool] = False
    """Whether a bare name, or a list of names, is a reference to the config keys of these names."""

    @model_validator(mode="before")
    @classmethod
    def _unknown_keys_are_named(cls, data: Any) -> Any:
        scalar = not isinstance(data, dict | list | BaseModel | None)
        if cls.alone is not None and (scalar or isinstance(data, Ref) or is_reference(data)):
            return {cls.alone: data}
        if isinstance(data, dict):
            known = [field.alias or name for name, field in cls.model_fields.items()]
            for key in data:
                if key not in known:
                    near = difflib.get_close_matches(str(key), known, n=1, cutoff=0.5)
                    raise PydanticCustomError(
                        "unknown_key",
                        "unknown key '{key}'",
                        {"key": str(key), "near": near[0] if near else "", "known": ", ".join(sorted(known))},
                    )
        return data

    @classmethod
    def unchecked(cls, **stated: Any) -> Self:
        """The section with its defaults, and literals that need no check.

        No validator is built for it: those of all defaults together would be half of a command's start.
        """
        return cast(Self, cls.model_construct(**stated))

    def check(self) -> None:
        """Hold values to each other; the form as written is held to the same.

        Raises:
            ValueError: they cannot stand together.
        """

    @model_validator(mode="after")
    def _values_stand_together(self) -> Self:
        self.check()
        return self


def is_reference(value: Any) -> bool:
    """Whether a value of a family file is a reference to config.json."""
    return isinstance(value, dict) and "from" in value


def references_are_sound(value: Any) -> Any:
    """The value as it is, where every reference in it is one."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for each in inner:
        references_are_sound(each)
    if is_reference(value):
        Ref.model_validate(value)
    return value


Checked = Annotated[Any, BeforeValidator(references_are_sound)]
"""Anything, in which a mapping with the key `from` is a reference."""


class Ref(Spec):
    """A reference to config.json: `{from: key}`, `{from: [key, older_key], default: value}`.

    The first key that is present and not null is used. A dotted key reads a nested object, and
    `{layer}` in it stands for the layer's index. A list with one entry a layer is read at the layer's
    index where `per_layer` is set.
    """

    keys: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        alias="from", min_length=1, description="Config keys, the first present one wins."
    )
    default: Checked = Field(
        None,
        description="The value, or another reference, when no key is present; not stated, a key is needed.",
    )
    if_null: Checked = Field(None, description="The value where a key is there and null, if not the default.")
    times: StrictInt | StrictFloat | None = Field(None, description="A number is multiplied by this.")
    map: dict[str | bool | int, Checked] | None = Field(
        None,
        min_length=1,
        description="Config values to words or further references; a value not listed is refused.",
    )
    only: tuple[str | bool | int, ...] | None = Field(
        None, min_length=1, description="The values that the family knows; another one is refused."
    )
    present: Checked = Field(
        None, description="What any value that is present stands for (a value or a reference), where stated."
    )
    per_layer: bool = Field(False, description="A list holds one value for each layer; a scalar serves all.")
    length: bool = Field(False, description="A list or a string stands for the number of its entries.")
    zero_is_absent: bool = Field(False, description="A key with the number 0 does not count as present.")
    outer: bool = Field(False, description="The top level wins over nested text settings, not they over it.")

    @model_validator(mode="before")
    @classmethod
    def _one_key_may_stand_alone(cls, data: Any) -> Any:
        if isinstance(data, dict) and isinstance(data.get("from"), str):
            data = {**data, "from": [data["from"]]}
        return data

    @property
    def required(self) -> bool:
        """Whether the config must hold one of the keys."""
        return "default" not in self.model_fields_set

    def __str__(self) -> str:
        return " or ".join(self.keys)


def short_reference(ref: Ref) -> str:
    """A reference as a family file writes it in one line, where it fits in one."""
    keys = ("outer." if ref.outer else "config.") + " or ".join(ref.keys)
    if ref.required:
        return keys
    words = {None: "null", True: "true", False: "false"}
    bare = ref.default is None or isinstance(ref.default, bool)
    return f"{keys} else {words[ref.default] if bare else ref.default}"


@dataclass(frozen=True)
class Referable:
    """Marks what may be a reference to config.json where a family file states it.

    Args:
        inside: the references stand inside of a free value, at any depth.
    """

    inside: bool = False


@dataclass(frozen=True)
class FromConfig:
    """Marks a field that a family file may leave out: it is then a reference to this config key.

    Without the key the field's own default holds; a field without one needs the key.
    """

    key: str


@dataclass(frozen=True)
class WrittenAs:
    """Marks a field whose written form has nothing in common with the resolved one.

    Args:
        kind: the type as written.
        default: the value where a family file leaves it out.
    """

    kind: Any
    default: Any = None


REFERABLE: Final = Referable()
Configurable = Annotated[T, REFERABLE]
"""A literal; as written it may be a reference."""

_REAL = Field(allow_inf_nan=False)
_WHOLE = Annotated[StrictInt, Field(ge=-(2**63), lt=2**63)]
Int = Annotated[StrictInt, REFERABLE]
Count = Annotated[StrictInt, Field(ge=0, lt=SIZE_BOUND), REFERABLE]
Width = Annotated[StrictInt, Field(gt=0, lt=SIZE_BOUND), REFERABLE]
# How often something is done that no tensor has the size of.
Times = Annotated[StrictInt, Field(gt=0, le=MOST_TIMES), REFERABLE]
Num = Annotated[_WHOLE | Annotated[StrictFloat, _REAL], REFERABLE]
Positive = Annotated[Annotated[_WHOLE, Field(gt=0)] | Annotated[StrictFloat, Field(gt=0), _REAL], REFERABLE]
NotNegative = Annotated[
    Annotated[_WHOLE, Field(ge=0)] | Annotated[StrictFloat, Field(ge=0), _REAL], REFERABLE
]
Bool = Annotated[StrictBool, REFERABLE]
Str = Annotated[StrictStr, REFERABLE]
AnyValue = Annotated[Any, Referable(inside=True)]
Options = Annotated[dict[str, Any], Referable(inside=True)]
_LEAF, _PATH, _PATH_OR_NONE, _SHARED, _LAYER, _DISK = PATH_WORDS
Leaf = Annotated[str, Field(pattern=_LEAF)]
ModulePath = Annotated[str, Field(pattern=_PATH)]
ModulePathOrNone = Annotated[str, Field(pattern=_PATH_OR_NONE)]
SharedPath = Annotated[str, Field(pattern=_SHARED)]
LayerPath = Annotated[str, Field(pattern=_LAYER)]
DiskPath = Annotated[str, Field(pattern=_DISK)]
