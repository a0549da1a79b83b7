"""Values in a family file: a literal, or a reference to a key of the checkpoint's config.json.

To a type checker the aliases below are the plain types, because everything downstream of
``registry.resolve`` sees resolved values only; at run time they also admit a :class:`Ref`.
"""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    StrictFloat,
    StrictInt,
    StrictStr,
    ValidationInfo,
    model_validator,
)
from pydantic_core import PydanticCustomError

RESOLVED: Final = {"resolved": True}
"""The context of validating values that a config gave: an object among them is never a reference."""
SIZE_BOUND = 2**28
"""No width, count or number of rows of a model comes near it, and products of two fit in 64 bits."""

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

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=False)
    alone: ClassVar[str | None] = None
    """The key whose value may stand for the whole section."""

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


def is_reference(value: Any) -> bool:
    """Whether a value of a family file is a reference to config.json."""
    return isinstance(value, dict) and "from" in value


def _references_are_sound(value: Any, info: ValidationInfo) -> Any:
    """The value as it is, where every reference in it is one; what a config gave holds none."""
    if info.context is not RESOLVED:
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        for each in inner:
            _references_are_sound(each, info)
        if isinstance(value, dict) and "from" in value:
            Ref.model_validate(value)
    return value


Checked = Annotated[Any, BeforeValidator(_references_are_sound)]
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
    outer: bool = Field(False, description="The top level wins over nested text settings, not they over it.")

    @model_validator(mode="before")
    @classmethod
    def _one_key_may_stand_alone(cls, data: Any, info: ValidationInfo) -> Any:
        if info.context is RESOLVED:
            raise PydanticCustomError("reference", "a config cannot hold references")
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


def from_config(key: str, default: Any) -> Any:
    """A reference as the default of a field: what a section means where a family file leaves the key out."""
    return Ref.model_validate({"from": key, "default": default})


if TYPE_CHECKING:
    Int = int
    Count = int
    Width = int
    Num = float
    Positive = float
    NotNegative = float
    Bool = bool
    Str = str
    AnyValue = Any
    Leaf = str
    ModulePath = str
    ModulePathOrNone = str
    SharedPath = str
    LayerPath = str
    DiskPath = str
    Options = dict[str, Any]
else:
    Int = Ref | StrictInt
    Count = Ref | Annotated[StrictInt, Field(ge=0, lt=SIZE_BOUND)]
    Width = Ref | Annotated[StrictInt, Field(gt=0, lt=SIZE_BOUND)]
    _WHOLE, _REAL = Annotated[StrictInt, Field(ge=-(2**63), lt=2**63)], Field(allow_inf_nan=False)
    Num = Ref | _WHOLE | Annotated[StrictFloat, _REAL]
    Positive = Ref | Annotated[_WHOLE, Field(gt=0)] | Annotated[StrictFloat, Field(gt=0), _REAL]
    NotNegative = Ref | Annotated[_WHOLE, Field(ge=0)] | Annotated[StrictFloat, Field(ge=0), _REAL]
    Bool = Ref | StrictBool
    Str = Ref | StrictStr
    AnyValue = Checked
    Leaf, ModulePath, ModulePathOrNone, SharedPath, LayerPath, DiskPath = (
        Annotated[str, Field(pattern=pattern)] for pattern in PATH_WORDS
    )
    Options = Annotated[dict[str, Checked], BeforeValidator(_references_are_sound)]
