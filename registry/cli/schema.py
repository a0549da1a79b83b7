"""`registry schema`: the JSON Schema of a family file."""

from __future__ import annotations

from mlx_experts.registry.cli.common import Json, print_json


def schema(json: Json = True) -> None:
    """Print the JSON Schema of a family file, for editors.

    Example: registry schema > family.schema.json
    """
    from mlx_experts.registry.spec.json_schema import family_schema

    print_json(family_schema())
