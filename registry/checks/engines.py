"""Which Mixture-of-Experts architectures vLLM and SGLang have, read from their installed sources.

Nothing is imported: vLLM's table of architectures and SGLang's ``EntryClass`` lines are parsed, and a module
counts as one with experts where it names the engine's own expert layer.
"""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mlx_experts.registry.catalog.catalog import Catalog

_EXPERT_LAYER = re.compile(r"\b(FusedMoE|get_moe_impl_class|layers\.fused_moe)\b")
# Heads, towers and drafts are parts of a model.
_PART = re.compile(r"(MTP|NextN|Eagle|Eagle3|RewardModel|SequenceClassification|Embedding)")


@dataclass(frozen=True)
class Architecture:
    """An architecture that an engine has.

    Args:
        source: the engine.
        name: the class that `architectures` of a config.json names.
        file: the module, below the engine's package.
    """

    source: str
    name: str
    file: str


def _package(name: str) -> Path | None:
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations)))


def vllm_architectures(package: Path | None = None) -> list[Architecture]:
    """Architectures with experts of an installed vLLM; none where it is not installed.

    Args:
        package: the folder of the package; None finds the installed one.
    """
    package = package or _package("vllm")
    models = None if package is None else package / "model_executor" / "models"
    if package is None or models is None or not (models / "registry.py").is_file():
        return []
    found = []
    for name, module in _vllm_table((models / "registry.py").read_text(encoding="utf-8")):
        path = package / Path(*module.split(".")[1:]) if "." in module else models / module
        files = [path.with_suffix(".py")] if path.with_suffix(".py").is_file() else sorted(path.glob("*.py"))
        if any(_EXPERT_LAYER.search(file.read_text(encoding="utf-8")) for file in files):
            found.append(Architecture("vllm", name, files[0].relative_to(package).as_posix()))
    return [each for each in found if not _PART.search(each.name)]


def _vllm_table(source: str) -> Iterator[tuple[str, str]]:
    """Architecture and module of each line of the tables of generating models."""
    for node in ast.parse(source).body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        name = target.id if isinstance(target, ast.Name) else ""
        if name not in ("_TEXT_GENERATION_MODELS", "_MULTIMODAL_MODELS"):
            continue
        table = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
        if not isinstance(table, ast.Dict):
            continue
        for key, value in zip(table.keys, table.values, strict=True):
            if isinstance(key, ast.Constant) and isinstance(value, ast.Tuple) and value.elts:
                module = value.elts[0]
                if isinstance(module, ast.Constant):
                    yield str(key.value), str(module.value)


def sglang_architectures(package: Path | None = None) -> list[Architecture]:
    """Architectures with experts of an installed SGLang; none where it is not installed.

    Args:
        package: the folder of the package; None finds the installed one.
    """
    package = package or _package("sglang")
    models = None if package is None else package / "srt" / "models"
    if package is None or models is None or not models.is_dir():
        return []
    found = []
    for path in sorted(models.glob("*.py")):
        text = path.read_text(encoding="utf-8")
        if not _EXPERT_LAYER.search(text):
            continue
        for node in ast.parse(text).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "EntryClass":
                names = re.findall(r"\w+", ast.unparse(node.value))
                where = path.relative_to(package).as_posix()
                found += [Architecture("sglang", name, where) for name in names]
    return [each for each in found if not _PART.search(each.name)]


def not_described(catalog: Catalog, known: list[Architecture]) -> list[Architecture]:
    """The architectures that no family of the catalogue answers to."""
    described = {name for entry in catalog.entries.values() for name in entry.architectures}
    return [each for each in known if each.name not in described]
