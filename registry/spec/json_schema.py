"""The JSON Schema of a family file."""

from __future__ import annotations

from typing import Any

from mlx_experts.registry.spec.family import Family

SCHEMA_FILE = "family.schema.json"


def family_schema() -> dict[str, Any]:
    """JSON Schema (draft 2020-12) with a description for every key."""
    schema = Family.model_json_schema(by_alias=True)
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "A Mixture-of-Experts family"
    _let_names_stand_alone(schema)
    return schema


def _let_names_stand_alone(schema: dict[str, Any]) -> None:
    """Say what the before-validators accept: bare names for references and activations."""
    definitions = schema["$defs"]
    name = {"type": "string"}
    names = {"type": "array", "items": name, "minItems": 1}
    definitions["Ref"]["properties"]["from"] = {
        **definitions["Ref"]["properties"]["from"],
        "anyOf": [name, names],
    }
    for key in ("type", "items", "minItems"):
        definitions["Ref"]["properties"]["from"].pop(key, None)
    for size in definitions["SizesSpec"]["properties"].values():
        size.setdefault("anyOf", []).extend([name, names])
    definitions["ActivationSpec"] = {"anyOf": [name, definitions["ActivationSpec"]]}
