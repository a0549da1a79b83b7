"""Reads the references of a family file from one config.json, and says which of the two is wrong.

A value that cannot be is told at the key that gives it: in config.json, or in the family file itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

from pydantic import TypeAdapter, ValidationError

from mlx_experts.registry.catalog.config_view import ConfigView
from mlx_experts.registry.catalog.validation_errors import words_of
from mlx_experts.registry.errors import ConfigError, RegistryError, SpecError
from mlx_experts.registry.resolve.class_defaults import class_default
from mlx_experts.registry.resolve.plan import Sizes
from mlx_experts.registry.spec.family import SizesSpec
from mlx_experts.registry.spec.rope_plan import FLOAT32_LARGEST, FLOAT32_LEAST
from mlx_experts.registry.spec.values import Ref, Spec
from mlx_experts.registry.spec.written import Written, read_elsewhere, section_of

S = TypeVar("S", bound=Spec)
T = TypeVar("T")
# Layers and heads are gone through one by one before a tensor is looked at; real models have a few hundred.
MAX_LAYERS, MAX_HEADS = 1024, 2**16
_NOTHING = object()


class Resolver:
    """Replaces references by the values of one config.

    Args:
        family: the family's name, for messages.
        view: the config.
    """

    def __init__(self, family: str, view: ConfigView) -> None:
        self.family, self.view = family, view
        self._shared_sizes: dict[tuple[Any, ...], Sizes] = {}
        # What is alike in all layers, with what it was read from, which keeps its identity.
        self._alike: dict[tuple[Any, ...], tuple[Any, Any]] = {}
        # How often something was read that may be another in another layer.
        self._by_layer = 0

    def alike(self, stated: Any, key: tuple[Any, ...], read: Callable[[], T]) -> T:
        """What ``read`` makes of a part of the family file: read once for all layers, where they are alike.

        Args:
            stated: the part, which has no equal with the same ``key``.
            key: what else ``read`` depends on, beside the config and the layer.
        """
        at = (id(stated), *key)
        if at in self._alike:
            return cast(T, self._alike[at][1])
        before = self._by_layer
        made = read()
        if self._by_layer == before:
            self._alike[at] = stated, made
        return made

    def at_layer(self, value: list[Any], layer: int) -> Any:
        """A layer's entry of a list with one for each layer, or None where it has none."""
        self._by_layer += 1
        return value[layer] if layer < len(value) else None

    def ref(self, ref: Ref, layer: int) -> Any:
        """The value a reference stands for at a layer."""
        key, value = self._find(ref, layer)
        if key is not None:
            return self._mapped(ref, key, value, layer)
        stands = self._absent(ref)
        if stands is None:
            given = class_default(ref, self.view)
            if given is not None:
                return self._mapped(ref, *given, layer)
        if ref.required and stands is None:
            raise ConfigError(
                f"config.json lacks '{ref}'",
                where="config.json",
                expected=f"a value that the family '{self.family}' needs",
                hint="use the checkpoint's original config.json, or give the family file a default",
            )
        return self.value(stands, layer)

    def _find(self, ref: Ref, layer: int) -> tuple[str | None, Any]:
        """The first present key of a reference and what it holds at a layer, or twice None."""
        for key in ref.keys:
            value = self._get(key, ref, layer)
            if value is None or (ref.zero_is_absent and _is_zero(value)):
                continue
            if ref.per_layer and isinstance(value, list):
                if layer >= len(value):
                    raise ConfigError(
                        f"'{key}' has too few entries",
                        where="config.json",
                        expected=f"one for each layer, layer {layer} included",
                        found=f"{len(value)} entries",
                    )
                value = self.at_layer(value, layer)
                if value is None:
                    break
            return key, len(value) if ref.length and isinstance(value, list | str) else value
        return None, None

    def _get(self, key: str, ref: Ref, layer: int) -> Any:
        """The value of a key; transformers pads the numbers of layers with zeros to one width."""
        if "{layer}" not in key:
            return self.view.get(key, ref.outer)
        self._by_layer += 1
        spelled = (key.replace("{layer}", f"{layer:0{width}}") for width in (1, 2, 3, 4))
        return next((v for v in (self.view.get(each, ref.outer) for each in spelled) if v is not None), None)

    def _absent(self, ref: Ref) -> Any:
        """What stands for a reference when no key of it is present."""
        null = ref.if_null is not None and any(self.view.is_null(key) for key in ref.keys)
        return ref.if_null if null else ref.default

    def _mapped(self, ref: Ref, key: str, value: Any, layer: int) -> Any:
        if ref.present is not None:
            return self.value(ref.present, layer)
        if ref.times is not None and isinstance(value, int | float) and not isinstance(value, bool):
            return _ordinary(key, value * ref.times)
        known = ref.map if ref.map is not None else ref.only
        if known is None:
            return _ordinary(key, value)
        if not isinstance(value, str | bool | int) or value not in known:
            raise ConfigError(
                f"'{key}' holds a value that the family '{self.family}' does not know",
                where="config.json",
                expected=", ".join(map(str, known)),
                found=repr(value)[:80],
            )
        return value if ref.map is None else self.value(ref.map[value], layer)

    def value(self, value: Any, layer: int, at: str = "") -> Any:
        """``value`` with every reference in it replaced; the same object where there is none.

        Args:
            at: key of the family file under which it stands, for messages.
        """
        reference = _reference(value)
        if reference is not None:
            return self.ref(reference, layer)
        if isinstance(value, Written):
            return self.spec(value, layer, at)
        if isinstance(value, tuple | list):
            return [self.value(v, layer, f"{at}.{i}") for i, v in enumerate(value)]
        if isinstance(value, dict):
            return {k: self.value(v, layer, f"{at}.{k}") for k, v in value.items()}
        return value

    def source(self, value: Any, layer: int) -> str | None:
        """The config key that a value is read from; None where the family file itself states it."""
        while (ref := _reference(value)) is not None:
            key, found = self._find(ref, layer)
            if key is None:
                value = self._absent(ref)
            elif ref.present is not None:
                value = ref.present
            elif ref.map is not None:
                value = ref.map[found]
            else:
                return key
        return None

    def fault(
        self, value: Any, layer: int, at: str, what: str, *, expected: str, found: str
    ) -> RegistryError:
        """The error about a value that cannot be, at the key of the file that gives it.

        Args:
            value: the literal or the reference of the family file.
            at: key of the family file under which it stands.
            what: what is wrong, without the key.
        """
        key = self.source(value, layer)
        if key is not None:
            return ConfigError(f"'{key}' {what}", where="config.json", expected=expected, found=found)
        return SpecError(f"'{at}' {what}", where=f"{self.family}.yaml", expected=expected, found=found)

    def spec(self, spec: Written[S], layer: int, at: str, **read: Any) -> S:
        """A section with literals only.

        Args:
            at: key of the family file under which it stands.
            read: fields that are no plain reading of what is written, and are known already.

        Raises:
            ConfigError: a config value is of the wrong type.
            SpecError: a value of the family file is.
        """
        made = self.alike(spec, (at,), lambda: self._read(spec, layer, at))
        return made.model_copy(update=read) if read else made

    def _read(self, spec: Written[S], layer: int, at: str) -> S:
        section = section_of(spec)
        data = {
            key: self.value(getattr(spec, name), layer, f"{at}.{key}")
            for name, key in ((name, info.alias or name) for name, info in section.model_fields.items())
            if not read_elsewhere(section, name)
        }
        try:
            return section.model_validate(data)
        except ValidationError as error:
            raise self._refused(spec, error, layer, at) from error

    def field(self, spec: Written[S], name: str, layer: int, at: str) -> Any:
        """One field of a section as a literal, where the rest of the section may not be read.

        Raises:
            ConfigError: a config value is of the wrong type.
            SpecError: a value of the family file is.
        """
        stated, at = getattr(spec, name), f"{at}.{name}"
        value = self.value(stated, layer, at)
        try:
            return _checker(section_of(spec), name).validate_python(value)
        except ValidationError as error:
            raise self._refused(stated, error, layer, at) from error

    def _refused(self, stated: Any, error: ValidationError, layer: int, at: str) -> RegistryError:
        found = error.errors()
        first = found[0]
        for part in first["loc"]:
            inner = _inner(stated, part)
            if inner is not _NOTHING:
                stated, at = inner, f"{at}.{part}"
        same = [each for each in found if each["loc"][:1] == first["loc"][:1]]
        expected, value = " or ".join(words_of(same)), repr(first["input"])[:80]
        return self.fault(stated, layer, at, "holds a value that cannot be", expected=expected, found=value)

    def sizes(self, spec: Written[SizesSpec], layer: int) -> Sizes:
        """The sizes at a layer, with what follows from them.

        Raises:
            ConfigError: a size is not positive.
        """
        layered = self.alike(spec, ("layered",), lambda: _layered(spec))
        return self.alike(spec, ("sizes",), lambda: self._sizes(layered, layer))

    def _sizes(self, spec: Written[SizesSpec], layer: int) -> Sizes:
        read = self.spec(spec, layer, "config")
        values = {name: getattr(read, name) for name in SizesSpec.model_fields}
        for name, most in (("num_layers", MAX_LAYERS), ("num_heads", MAX_HEADS)):
            if values[name] > most:
                raise self.fault(
                    getattr(spec, name),
                    layer,
                    f"config.{name}",
                    "is more than any model has",
                    expected=f"at most {most}",
                    found=str(values[name]),
                )
        if values["num_kv_heads"] is None:
            values["num_kv_heads"] = values["num_heads"]
        if values["head_dim"] is None:
            if values["hidden_size"] % values["num_heads"]:
                raise ConfigError(
                    "the width cannot be divided by the heads, and no head width is given",
                    where="config.json",
                    expected=f"a multiple of {values['num_heads']}",
                    found=str(values["hidden_size"]),
                )
            values["head_dim"] = values["hidden_size"] // values["num_heads"]
        key = tuple(values.values())
        return self._shared_sizes.setdefault(key, Sizes(**values))


def _layered(spec: Written[SizesSpec]) -> Written[SizesSpec]:
    """The same section with the experts' sizes read from a list with one entry a layer, where it is one.

    Pruned checkpoints keep another number of experts in each layer, whatever the family.
    """
    refs = {name: getattr(spec, name) for name in ("num_experts", "top_k", "expert_width")}
    layered = {n: r.model_copy(update={"per_layer": True}) for n, r in refs.items() if isinstance(r, Ref)}
    return spec.model_copy(update=layered)


def _reference(value: Any) -> Ref | None:
    """The reference that a value of a family file is; None for any other value."""
    if isinstance(value, dict) and "from" in value:
        return Ref.model_validate(value)
    return value if isinstance(value, Ref) else None


def _inner(stated: Any, part: Any) -> Any:
    """What stands under a part of a location in a family file; pydantic's parts name union members too."""
    if _reference(stated) is not None:
        return _NOTHING
    if isinstance(stated, Spec):
        names = {info.alias or name: name for name, info in type(stated).model_fields.items()}
        return getattr(stated, names[part]) if part in names else _NOTHING
    if isinstance(stated, dict):
        return stated.get(part, _NOTHING)
    inside = isinstance(stated, tuple | list) and isinstance(part, int) and part < len(stated)
    return stated[part] if inside else _NOTHING


@functools.cache
def _checker(section: type[Spec], name: str) -> TypeAdapter[Any]:
    return TypeAdapter(section.model_fields[name].rebuild_annotation())


def _is_zero(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value == 0


def _ordinary(key: str, value: Any) -> Any:
    """The value, where it is no number that MLX cannot take.

    Raises:
        ConfigError: it is not finite, too large, or so small that float32 has it for zero.
    """
    number = isinstance(value, int | float) and not isinstance(value, bool)
    fits = not number or value == 0 or abs(value) <= 2**63 - 1
    if isinstance(value, float) and value != 0:
        fits = FLOAT32_LEAST <= abs(value) <= FLOAT32_LARGEST
    if not fits:
        raise ConfigError(
            f"'{key}' holds a number that cannot be",
            where="config.json",
            expected="a finite number within float32, or a whole one of 64 bits",
            found=repr(value)[:80],
        )
    return value
