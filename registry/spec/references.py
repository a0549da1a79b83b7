"""The references below a value of a family file, for whoever asks which config keys it reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from mlx_experts.registry.spec.values import Ref, Spec


def references(value: Any) -> Iterator[Ref]:
    """Every reference in a family, a section or a value, also those inside others."""
    if isinstance(value, Ref):
        yield value
        for inner in (value.default, value.if_null, value.present, value.map):
            yield from references(inner)
    elif isinstance(value, Spec):
        for key in type(value).model_fields:
            yield from references(getattr(value, key))
    elif isinstance(value, Mapping):
        if "from" in value:
            yield from references(Ref.model_validate(value))
        else:
            for each in value.values():
                yield from references(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from references(each)
