"""What the installed transformers says of a model type: its config class's defaults and its conversion table.

Config classes import without torch. The table does not, so that its source is read and not run.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_experts.registry.errors import SettingError

TABLE = "transformers.conversion_mapping"


@dataclass(frozen=True)
class Original:
    """A model type of the installed transformers.

    Args:
        model_type: its name.
        defaults: a config.json with nothing but the class's defaults.
        gate_up: leaves on disk of the experts' gate and up, in this order, where the table fuses two.
        renames: what the table renames, as patterns on disk and in memory.
        version: of transformers.
    """

    model_type: str
    defaults: dict[str, Any]
    gate_up: tuple[str, str] | None
    renames: tuple[tuple[str, str], ...]
    version: str

    def completed(self, config: dict[str, Any]) -> dict[str, Any]:
        """A config.json in which the class's defaults stand for keys that it leaves out."""
        return _under(config, self.defaults)


def original(model_type: str) -> Original:
    """What the installed transformers says of a model type.

    Raises:
        SettingError: transformers has no such type.
    """
    import transformers
    from transformers import CONFIG_MAPPING

    if model_type not in CONFIG_MAPPING:
        import difflib

        near = difflib.get_close_matches(model_type, list(CONFIG_MAPPING), n=3)
        raise SettingError(
            f"transformers {transformers.__version__} has no model type '{model_type}'",
            where="--from-transformers",
            hint=f"did you mean {' or '.join(near)}?"
            if near
            else "give the value of `model_type` in config.json",
        )
    # As config.json would hold them: keys are text.
    defaults = json.loads(json.dumps(CONFIG_MAPPING[model_type]().to_dict(), default=str))
    defaults["model_type"] = model_type
    entries = list(_entries(model_type))
    return Original(
        model_type,
        {k: v for k, v in defaults.items() if v is not None},
        _gate_up(entries),
        tuple(_renames(entries)),
        transformers.__version__,
    )


def _under(config: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    made = dict(defaults)
    for key, value in config.items():
        inner = defaults.get(key)
        # Rotary parameters are one value: a class's own say nothing beside a checkpoint's.
        nested = isinstance(value, dict) and isinstance(inner, dict) and key.endswith("config")
        made[key] = _under(value, inner) if nested and isinstance(inner, dict) else value
    if "rope_theta" in config or "rope_scaling" in config:
        made.pop("rope_parameters", None) if "rope_parameters" not in config else None
    return made


@functools.cache
def _table() -> ast.Module:
    """The parsed conversion table; an empty module where this transformers has none."""
    found = importlib.util.find_spec("transformers")
    path = Path(found.origin).parent / "conversion_mapping.py" if found and found.origin else None
    text = path.read_text(encoding="utf-8") if path is not None and path.is_file() else ""
    return ast.parse(text)


def _entries(model_type: str) -> Iterator[ast.Call]:
    """The table's entries for a model type, or for the type whose conversions it shares."""
    shared, listed = _mappings()
    for name in dict.fromkeys((model_type, shared.get(model_type, model_type))):
        if name in listed:
            yield from (each for each in listed[name].elts if isinstance(each, ast.Call))
            return


@functools.cache
def _mappings() -> tuple[dict[str, str], dict[str, ast.List]]:
    """Which type shares whose conversions, and each type's list of them."""
    shared: dict[str, str] = {}
    listed: dict[str, ast.List] = {}
    for node in ast.walk(_table()):
        if not isinstance(node, ast.Dict):
            continue
        for key, value in zip(node.keys, node.values, strict=True):
            if not isinstance(key, ast.Constant) or not isinstance(key.value, str):
                continue
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                shared.setdefault(key.value, value.value)
            elif isinstance(value, ast.List):
                listed.setdefault(key.value, value)
    return shared, listed


def _argument(call: ast.Call, name: str, place: int) -> list[str]:
    """Texts of an argument that is a text or a list of them."""
    node = next((k.value for k in call.keywords if k.arg == name), None)
    if node is None and len(call.args) > place:
        node = call.args[place]
    parts = node.elts if isinstance(node, ast.List | ast.Tuple) else [node]
    return [part.value for part in parts if isinstance(part, ast.Constant) and isinstance(part.value, str)]


def _gate_up(entries: list[ast.Call]) -> tuple[str, str] | None:
    for call in entries:
        sources, targets = _argument(call, "source_patterns", 0), _argument(call, "target_patterns", 1)
        if len(sources) == 2 and len(targets) == 1 and "expert" in sources[0] and "gate_up" in targets[0]:
            gate, up = (re.sub(r"\.weight\$?$", "", each).rpartition(".")[2] for each in sources)
            return gate, up
    return None


def _renames(entries: list[ast.Call]) -> Iterator[tuple[str, str]]:
    for call in entries:
        if isinstance(call.func, ast.Name) and call.func.id == "WeightRenaming":
            sources, targets = _argument(call, "source_patterns", 0), _argument(call, "target_patterns", 1)
            if sources and targets:
                yield sources[0], targets[0]
