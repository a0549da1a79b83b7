"""The JSON Schema of a family file as people write it: shorthand, named values and `extends` included."""

from __future__ import annotations

import json
import re
from typing import Any

from pydantic.json_schema import GenerateJsonSchema

from mlx_experts.registry.spec import attention, family
from mlx_experts.registry.spec.checkpoint import VERBS
from mlx_experts.registry.spec.family import Family
from mlx_experts.registry.spec.values import Ref, Spec, short_reference

_KEY = r"[A-Za-z_]\w*(\.\w+)*"
_KEYS = rf"{_KEY}( or {_KEY})*( else \S+)?"
_SHORT = {"type": "string", "pattern": rf"^(config|outer)\.{_KEYS}$", "description": "config.key else value"}
_NAMED = {
    "type": "string",
    "pattern": r"^\$[A-Za-z_]\w*$",
    "description": "A value that `define` names, or a standard one.",
}
_INSIDE = {"type": "string", "description": "What all paths of the step begin with."}
_EXTENDS = "The value of `define`, or a standard one, that this section is, with changes."
_SIZE = {
    "anyOf": [
        {"type": "string", "pattern": rf"^{_KEYS}$", "description": "A config key, and what stands for it."},
        {"type": "array", "items": {"type": "string"}, "minItems": 1, "description": "Config keys."},
    ]
}
_VERBATIM = frozenset(
    (
        "family",
        "extends",
        "model_types",
        "architectures",
        "when",
        "text_keys",
        "reference",
        "example",
        "notes",
    )
)
_ALONE: dict[str, str] = {
    model.__name__: model.alone
    for module in (attention, family)
    for model in vars(module).values()
    if isinstance(model, type) and issubclass(model, Spec) and model.alone is not None
}


class _Defaults(GenerateJsonSchema):
    """Shows a reference that is a default as a family file would write it."""

    def encode_default(self, dft: Any) -> Any:
        if isinstance(dft, Ref):
            return short_reference(dft)
        return None if isinstance(dft, Spec) else super().encode_default(dft)


def family_schema() -> dict[str, Any]:
    """JSON Schema (draft 2020-12) with a description for every key.

    A family that extends another may leave out what that one states; every other one may not.
    """
    made = Family.model_json_schema(by_alias=True, schema_generator=_Defaults)
    sections = {**made.pop("$defs"), "Family": made}
    reference = sections.pop("Ref")
    reference["properties"]["from"] = {
        "description": reference["properties"]["from"]["description"],
        "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}, "minItems": 1}],
    }
    for key in ("default", "if_null", "map", "only", "present"):
        value = reference["properties"][key]
        described = {"description": value.pop("description")}
        reference["properties"][key] = {**described, "anyOf": [value, {"$ref": "#/$defs/Named"}]}
    definitions: dict[str, Any] = {"Named": _NAMED, "Ref": {"anyOf": [_SHORT, reference]}}
    for name, section in sorted(sections.items()):
        for change in (False, True):
            definitions[name + ("Change" if change else "")] = _section(name, section, change, sections)
    for verb, model in VERBS.items():
        if verb != "plugin":
            _let_a_step_be_several(definitions, verb, model.__name__)
    for name in ("CheckpointSpec", "CheckpointSpecChange"):
        steps = definitions[name]["properties"]["conversions"]["anyOf"][0]["items"]
        steps["anyOf"].append({"$ref": "#/$defs/Named"})
    for section, key in (("MoeSpec", "layers"), ("Family", "layer_types")):
        for name in (section, f"{section}Change"):
            _let_a_key_stand_alone(definitions[name]["properties"][key])
    variant = {"anyOf": [{"$ref": f"#/$defs/{m}Change"} for m in ("GqaSpec", "PluginMixerSpec")]}
    for name in ("Family", "FamilyChange"):
        variants = definitions[name]["properties"]["variants"]
        variants["additionalProperties"] = {
            "anyOf": [variant, {"type": "null"}, {"$ref": "#/$defs/Named"}],
        }
    for name, section in sections.items():
        if name not in ("Family", *(model.__name__ for model in VERBS.values())):
            _let_a_section_extend(definitions, name, section)
    needed = {"Family", "FamilyChange"}
    found: set[str] = set()
    while needed - found:
        name = (needed - found).pop()
        found.add(name)
        needed |= set(re.findall(r"#/\$defs/(\w+)", json.dumps(definitions[name])))
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A Mixture-of-Experts family",
        "type": "object",
        "if": {"required": ["extends"]},
        "then": {"$ref": "#/$defs/FamilyChange"},
        "else": {"$ref": "#/$defs/Family"},
        "$defs": {name: each for name, each in definitions.items() if name in found},
    }


def _let_a_section_extend(definitions: dict[str, Any], name: str, section: dict[str, Any]) -> None:
    """A section that extends a named value states what it changes."""
    change = definitions[f"{name}Change"]
    change["properties"] = {"extends": {**_NAMED, "description": _EXTENDS}, **change["properties"]}
    definitions[name] = {
        "description": section["description"],
        "if": {"type": "object", "required": ["extends"]},
        "then": {"$ref": f"#/$defs/{name}Change"},
        "else": definitions[name],
    }


def _let_a_key_stand_alone(node: Any) -> None:
    """A rule that is a name is the config key of a list."""
    if node.get("type") == "array":
        node["items"] = {"anyOf": [{"type": "string", "description": "Config key of a list."}, node["items"]]}
    for each in node.get("anyOf", ()):
        _let_a_key_stand_alone(each)


def _let_a_step_be_several(definitions: dict[str, Any], verb: str, name: str) -> None:
    """A conversion may hold several paths, and state once what they begin with."""
    one = definitions[name]
    properties = one["properties"] | {"in": _INSIDE}
    path, to = properties[verb], properties.get("to")
    many: list[dict[str, Any]] = []
    if to is not None:
        many.append({"type": "object", "additionalProperties": to, "minProperties": 1})
    if "to" not in one["required"]:
        many.append({"type": "array", "items": path, "minItems": 1})
    several = {key: value for key, value in properties.items() if key != "to"}
    several[verb] = {"description": path["description"], "anyOf": many}
    definitions[name] = {
        "anyOf": [
            {**one, "properties": properties},
            {**one, "properties": several, "required": [verb]},
        ]
    }


def _section(name: str, section: dict[str, Any], change: bool, sections: dict[str, Any]) -> dict[str, Any]:
    """One section, or what a file may change of it: then nothing is needed."""
    properties = {}
    for key, value in section["properties"].items():
        inner = _loosened(value, change, sections)
        described = {k: inner.pop(k) for k in ("description", "default") if k in inner}
        if "$ref" in value:
            # Pydantic leaves out a description that is also the section's.
            described.setdefault("description", sections[value["$ref"].rpartition("/")[2]]["description"])
            described.pop("default", None)
        options = [inner]
        if name == "SizesSpec":
            options.append(_SIZE)
        if not (name == "Family" and (key in _VERBATIM or key == "variants")):
            options.append({"$ref": "#/$defs/Named"})
        properties[key] = {**described, **(inner if len(options) == 1 else {"anyOf": options})}
    made = {**section, "properties": properties}
    made.pop("title", None)
    if change:
        made.pop("required", None)
        if "extends" in properties:
            made["required"] = ["family", "extends", "architectures", "reference"]
    return made


def _loosened(node: Any, change: bool, sections: dict[str, Any]) -> Any:
    """A part of a schema in which sections may stand in short, and be changed in part where ``change``."""
    if isinstance(node, list):
        return [_loosened(each, change, sections) for each in node]
    if not isinstance(node, dict):
        return node
    made: dict[str, Any] = {}
    for key, value in node.items():
        if key in ("title", "discriminator"):
            continue
        if key == "$ref" and (name := value.rpartition("/")[2]) in sections:
            whole = {"$ref": value + ("Change" if change else "")}
            if name not in _ALONE:
                made |= whole
            else:
                alone = _loosened(sections[name]["properties"][_ALONE[name]], change, sections)
                made["anyOf"] = [
                    whole,
                    {k: v for k, v in alone.items() if k not in ("default", "description")},
                ]
        else:
            # A list is replaced whole, so that its items say all that they need.
            made["anyOf" if key == "oneOf" else key] = _loosened(value, change and key != "items", sections)
    return made
