"""Rules that say, for every layer, whether it has experts and which type it is.

Rules stand in a list; the first whose config key is present is used. Each is expanded at build time
into one value per layer, so that a rule has references and no resolved form.
"""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, StrictBool, StrictInt

from mlx_experts.registry.spec.values import Checked, Ref, Spec


def _a_key_alone_is_a_list(value: Any) -> Any:
    return {"kind": "list", "key": value} if isinstance(value, str) else value


class AllLayers(Spec):
    """Every layer."""

    kind: Literal["all"] = Field(description="Every layer has experts.")
    enabled: Ref | StrictBool = Field(True, description="Whether any layer has experts.")


class ListRule(Spec):
    """A config list with one entry a layer; its key may stand alone."""

    kind: Literal["list"] = Field(description="Layers with the entry `sparse`, or a number other than 0.")
    key: str = Field(description="Config key of the list.")


class FirstDense(Spec):
    """Layers from an index on, optionally every n-th."""

    kind: Literal["from_layer"] = Field(description="Layer i has experts when i >= first.")
    first: Ref | StrictInt = Field(description="First layer with experts.")
    every: Ref | StrictInt = Field(1, description="And i is a multiple of this.")


class SparseStep(Spec):
    """Every n-th layer except a list."""

    kind: Literal["sparse_step"] = Field(description="(i + 1) % step == 0 and i is not excepted.")
    step: Ref | StrictInt = Field(description="The step.")
    dense: str = Field(description="Config key with the list of excepted layers.")
    otherwise: tuple[int, ...] = Field((), description="The excepted layers where that key is absent.")


class Periodic(Spec):
    """Every n-th layer from an offset."""

    kind: Literal["periodic"] = Field(description="i % period == offset.")
    period: Ref | StrictInt = Field(description="The period.")
    offset: Ref | StrictInt | Literal["last"] = Field(description="The offset; `last` for period - 1.")


class RangeRule(Spec):
    """A range of layers at an interval."""

    kind: Literal["range"] = Field(description="start <= i <= end and (i + 1) % interval == 0.")
    start: Checked = Field(description="First layer (a list gives its smallest).")
    end: Checked = Field(description="Last layer (a list gives its largest); null or -1 for the last one.")
    interval: Ref | StrictInt = Field(description="The interval.")


class IndexRule(Spec):
    """Explicit layer indices."""

    kind: Literal["indices"] = Field(description="The layers that a config key lists.")
    key: str = Field(description="Config key: a list, or a comma-separated string.")


LayerRule = Annotated[
    AllLayers | ListRule | FirstDense | SparseStep | Periodic | RangeRule | IndexRule,
    Field(discriminator="kind"),
    BeforeValidator(_a_key_alone_is_a_list),
]


class TypeList(Spec):
    """A config list of layer types; its key may stand alone."""

    kind: Literal["list"] = Field(description="A list with one entry for each layer.")
    key: str = Field(description="Config key of the list.")
    map: dict[str | int | bool, str] | None = Field(
        None, min_length=1, description="Config values to the types used here; without it values are types."
    )
    empty_is_absent: bool = Field(False, description="A list without entries does not count as present.")
    last: str | None = Field(None, description="Type of the last layer, whatever else the rule says of it.")


class TypeLetters(Spec):
    """A letter for each layer."""

    kind: Literal["letters"] = Field(description="A string, or a list, with one letter for each layer.")
    key: str = Field(description="Config key of the string.")
    map: dict[str, str] = Field(min_length=1, description="Letters to layer types.")
    repeats: bool = Field(False, description="The string is a pattern that repeats from the first layer on.")


class TypePeriodic(Spec):
    """Every n-th layer is of one type, the rest of another."""

    kind: Literal["periodic"] = Field(description="i % period == offset picks the type `is`.")
    period: Ref | StrictInt = Field(description="The period.")
    offset: Ref | StrictInt | Literal["last"] = Field(description="The offset; `last` for period - 1.")
    is_: str = Field(alias="is", description="Type of the picked layers.")
    otherwise: str = Field(description="Type of the other layers.")
    tail: str | None = Field(None, description="Type of the layers of an incomplete last period.")
    first: str | None = Field(None, description="Type of the first layer, whatever else the rule says of it.")
    last: str | None = Field(None, description="Type of the last layer, whatever else the rule says of it.")


class TypeIndices(Spec):
    """Explicit layer indices of one type."""

    kind: Literal["indices"] = Field(description="The layers that a config key lists are of the type `is`.")
    key: str = Field(description="Config key of the list.")
    base: int = Field(0, description="Index of the first layer in that list.")
    is_: str = Field(alias="is", description="Type of the listed layers.")
    otherwise: str = Field(description="Type of the other layers.")


class TypeRange(Spec):
    """A range of layers, every n-th of it, is of one type, the rest of another."""

    kind: Literal["range"] = Field(description="Layers start <= i < stop, every n-th, are of the type `is`.")
    start: Ref | StrictInt = Field(0, description="First layer of the range.")
    stop: Ref | StrictInt | None = Field(None, description="The layer past the range; null for no end.")
    every: Ref | StrictInt = Field(1, description="And i - start is a multiple of this.")
    enabled: Ref | StrictBool = Field(True, description="Whether any layer is of the type `is`.")
    is_: str = Field(alias="is", description="Type of the layers in the range.")
    otherwise: str = Field(description="Type of the other layers.")


class TypePattern(Spec):
    """A repeating list of types."""

    kind: Literal["pattern"] = Field(description="The types repeat from the first layer on.")
    types: tuple[str, ...] = Field(min_length=1, description="The types.")


TypeRule = Annotated[
    TypeList | TypeLetters | TypePeriodic | TypeIndices | TypeRange | TypePattern,
    Field(discriminator="kind"),
    BeforeValidator(_a_key_alone_is_a_list),
]
