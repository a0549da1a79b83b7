"""Which Mixture-of-Experts architectures the installed neighbours know, read from their sources.

Nothing is imported: the imports of mlx-lm's modules and transformers' configuration files are searched.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from mlx_experts.registry.catalog.catalog import Catalog
from mlx_experts.registry.catalog.unsupported import unsupported
from mlx_experts.registry.checks.transformers_configs import classes_with_experts

_EXPERT_CONTAINER = "switch_layers"
_RELATIVE_IMPORT = re.compile(r"^\s*from \.(?P<module>\w*) import (?P<names>\([^)]*\)|[^\n]*)", re.M)


@dataclass(frozen=True)
class Known:
    """An architecture that a neighbour knows.

    Args:
        source: the package.
        model_type: its name.
        file: where it was read.
    """

    source: str
    model_type: str
    file: str


def _folder(package: str) -> Path | None:
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations))) / "models"


def mlx_lm_families(folder: Path | None = None) -> list[Known]:
    """MoE modules of mlx-lm: those that use its expert containers, themselves or through another module.

    Args:
        folder: mlx-lm's models folder; None finds the installed one, empty when there is none.
    """
    folder = folder or _folder("mlx_lm")
    if folder is None:
        return []
    uses: dict[str, set[str]] = {}
    for path in sorted(folder.glob("*.py")):
        uses[path.stem] = set()
        for match in _RELATIVE_IMPORT.finditer(path.read_text(encoding="utf-8")):
            uses[path.stem].update(
                [match["module"]] if match["module"] else re.findall(r"\w+", match["names"])
            )
    found = {name for name, used in uses.items() if _EXPERT_CONTAINER in used}
    while more := {name for name, used in uses.items() if used & found} - found:
        found |= more
    return [Known("mlx-lm", name, f"mlx_lm/models/{name}.py") for name in sorted(found)]


def transformers_families(folder: Path | None = None) -> list[Known]:
    """MoE configurations of transformers: those that count experts, or hold a text model that does.

    Args:
        folder: its models folder; None finds the installed one, empty when there is none.
    """
    folder = folder or _folder("transformers")
    if folder is None:
        return []
    found = []
    for path, classes in classes_with_experts(folder).items():
        types = {each.model_type for each in classes if each.model_type and not _is_part(each.model_type)}
        file = f"{path.parent.name}/{path.name}"
        found += [Known("transformers", name, file) for name in sorted(types or {path.parent.name})]
    return found


def _is_part(model_type: str) -> bool:
    """Towers and inner configurations are not models of their own."""
    return bool(re.search(r"_(vision|audio|text|encoder|thinker|talker)", model_type))


@dataclass(frozen=True)
class Coverage:
    """The neighbours' architectures against the catalogue.

    Args:
        registered: covered by a family, by model type.
        declared: not covered, with the declared reason.
        unknown: neither; a check fails on these.
        stale: declared gaps that no neighbour has or that a family covers by now.
    """

    registered: dict[str, str]
    declared: dict[str, str]
    unknown: list[Known]
    stale: list[str]


def coverage(catalog: Catalog, known: Iterable[Known]) -> Coverage:
    """Compare what neighbours know with what the catalogue describes."""
    owners = {t: e.name for e in catalog.entries.values() for t in (*e.model_types, e.name)}
    reasons = unsupported()
    registered: dict[str, str] = {}
    declared: dict[str, str] = {}
    unknown = []
    names = set()
    for item in known:
        names.add(item.model_type)
        if item.model_type in owners:
            registered[item.model_type] = owners[item.model_type]
        elif item.model_type in reasons:
            declared[item.model_type] = reasons[item.model_type]
        else:
            unknown.append(item)
    stale = sorted(name for name in reasons if name in owners)
    return Coverage(registered, declared, unknown, stale)
