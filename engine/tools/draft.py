"""A first family file for a checkpoint: nearest family as base, sizes and layouts from what is there.

Every known family is tried on the checkpoint's headers, with the sizes read from whichever config keys
the checkpoint uses; the one that leaves the fewest tensors unexplained becomes the base.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from mlx_experts.engine.tools.inspect import Inspection, inspect_checkpoint
from mlx_experts.registry.catalog.catalog import Catalog, bundled_folder, merge
from mlx_experts.registry.catalog.config_view import ConfigView
from mlx_experts.registry.catalog.family_format import EDITOR_WORDS, SCHEMA_FILE, formatted
from mlx_experts.registry.checkpoint.checkpoint import Checkpoint
from mlx_experts.registry.errors import ConfigError, RegistryError, UnknownFamilyError
from mlx_experts.registry.resolve.tiny_config import config_keys
from mlx_experts.registry.spec.family import Family

# Config keys under which families state a size, most telling first.
ALIASES: dict[str, tuple[str, ...]] = {
    "num_experts": (
        "n_routed_experts",
        "num_experts",
        "num_local_experts",
        "moe_num_experts",
        "ffn_config.moe_num_experts",
    ),
    "top_k": (
        "num_experts_per_tok",
        "num_experts_per_token",
        "moe_topk",
        "moe_top_k",
        "moe_k",
        "top_k_experts",
        "ffn_config.moe_top_k",
    ),
    "expert_width": (
        "moe_intermediate_size",
        "expert_ffn_hidden_size",
        "intermediate_size",
        "ffn_hidden_size",
        "ffn_config.ffn_hidden_size",
    ),
    "hidden_size": ("hidden_size", "d_model", "n_embd", "model_dim"),
    "num_layers": ("num_hidden_layers", "n_layers", "num_layers", "n_layer"),
    "num_heads": ("num_attention_heads", "n_heads", "n_head"),
    "norm_eps": ("rms_norm_eps", "norm_eps", "layer_norm_epsilon", "layernorm_epsilon", "layer_norm_eps"),
}
# Keys that describe training or housekeeping and no mathematics.
_SILENT = re.compile(
    r"^(_.*|.*token_id|.*dropout.*|torch_dtype|dtype|use_cache|initializer_.*|transformers_version|.*aux_loss.*|"
    r"output_.*|architectures|model_type|.*_jitter.*|pretraining_tp|auto_map|quantization.*|vision_.*|audio_.*)$"
)
_IDENTITY = ("family", "extends", "reference", "model_types", "architectures", "when", "notes")
_PER_EXPERT = re.compile(r"layers\.\d+\.(?P<path>.+)\.(?P<expert>\d+)\.(?P<leaf>\w+)\.weight$")
_ROLES = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"), ("w1", "v1", "w2"))


@dataclass
class Draft:
    """A drafted family.

    Args:
        family: its name; ``base`` is what it extends.
        data: the YAML mapping.
        questions: what a person has to answer, one line each.
    """

    family: str
    base: str
    data: dict[str, Any]
    questions: list[str] = field(default_factory=list)

    def to_yaml(self) -> str:
        """The file's text, questions as comments."""
        text = f"{EDITOR_WORDS}{bundled_folder() / SCHEMA_FILE}\n"
        text += yaml.safe_dump(self.data, sort_keys=False, width=10000)
        text += "".join(f"# question: {q}\n" for q in self.questions)
        return formatted(text, Path(f"{self.family}.yaml"))


def draft_family(checkpoint: Checkpoint, catalog: Catalog, exclude: Iterable[str] = ()) -> Draft:
    """Draft a family for a checkpoint.

    Args:
        exclude: families that may not become the base.

    Raises:
        UnknownFamilyError: no known family comes near.
    """
    config = checkpoint.config
    name, claimed = _name(config, catalog)
    changes = _changes(checkpoint)
    best: tuple[float, str, dict[str, Any], Inspection | None, str] | None = None
    for base in catalog.names():
        if base in set(exclude):
            continue
        for change in ({}, changes):
            score, seen, why = _try(base, change, checkpoint, catalog)
            if base == claimed:
                # Neighbours may explain the same tensors; the family that the config names comes first.
                score -= 0.01
            if catalog.load(base).extends is not None:
                # All that such a base changes would have to be repeated in the draft.
                score += 0.005
            if best is None or score < best[0]:
                best = (score, base, change, seen, why)
    if best is None or best[0] == float("inf"):
        raise UnknownFamilyError(
            "no known family comes near this checkpoint",
            where=checkpoint.where,
            found=best[4] if best else "no families",
            hint="write a family file from the start: docs/add-a-family.md",
        )
    _, nearest, change, seen, why = best
    base, change = _one_level(nearest, change, catalog)
    architectures = config.get("architectures") or []
    data = {
        "family": name,
        "extends": base,
        "reference": "question: name the original implementation that this was checked against",
        "model_types": [name if claimed else str(config.get("model_type", name))],
        "architectures": [] if claimed else list(architectures)[:1],
        **change,
    }
    draft = Draft(name, base, data)
    if claimed:
        draft.questions.append(
            f"'{claimed}' already describes this checkpoint; this draft answers to '{name}' only"
        )
    if why:
        draft.questions.append(why)
    draft.questions += _questions(_candidate(nearest, change, catalog), config, seen)
    return draft


def _one_level(nearest: str, change: dict[str, Any], catalog: Catalog) -> tuple[str, dict[str, Any]]:
    """A base that extends nothing, and what the draft states on top of it."""
    own = catalog.stated(nearest)
    root = own.get("extends")
    if root is None:
        return nearest, change
    kept = {k: v for k, v in own.items() if k not in _IDENTITY}
    return str(root), merge(kept, change)


def _name(config: dict[str, Any], catalog: Catalog) -> tuple[str, str]:
    """The draft's name, and the family that describes the checkpoint already, if any."""
    wanted = re.sub(r"\W", "_", str(config.get("model_type") or "new_family"))
    try:
        claimed = catalog.resolve(config).name
    except UnknownFamilyError:
        claimed = ""
    taken = {n for e in catalog.entries.values() for n in (e.name, *e.model_types)}
    return (f"{wanted}_draft" if claimed or wanted in taken else wanted), claimed


def _changes(checkpoint: Checkpoint) -> dict[str, Any]:
    """What the config's keys and the tensors' names say against any base."""
    view = ConfigView(checkpoint.config)
    sizes = {}
    for size, keys in ALIASES.items():
        found = next((key for key in keys if view.get(key) is not None), None)
        if found is not None:
            sizes[size] = found
    change: dict[str, Any] = {"config": sizes}
    layout = _per_expert_layout(checkpoint)
    if layout is not None:
        block = layout["path"].removesuffix(".experts")
        change["moe"] = {"path": block}
        change["checkpoint"] = {"experts": [layout, {"kind": "stacked", "path": layout["path"]}]}
    return change


def _per_expert_layout(checkpoint: Checkpoint) -> dict[str, Any] | None:
    leaves: dict[str, set[str]] = {}
    for name in checkpoint.tensors:
        if (match := _PER_EXPERT.search(name)) and ".mtp" not in name:
            leaves.setdefault(match["path"], set()).add(match["leaf"])
    for roles in _ROLES:
        for path, found in leaves.items():
            if found == set(roles):
                return {"kind": "per_expert", "path": path, "projections": list(roles)}
    return None


def _try(
    base: str, change: dict[str, Any], checkpoint: Checkpoint, catalog: Catalog
) -> tuple[float, Inspection | None, str]:
    """How badly a base with a change explains a checkpoint; lower is better."""
    try:
        seen = inspect_checkpoint(checkpoint, family=_candidate(base, change, catalog), tensors_only=True)
    except ConfigError as error:
        return 1e6, None, str(error).splitlines()[0]
    except (RegistryError, ValidationError):
        return float("inf"), None, ""
    wrong = sum(_tensors_in(rows) for rows in (seen.missing, seen.unclaimed)) + len(seen.misshapen)
    # Ties go to the base that needs no change, then to the one that drops least by rule.
    score = wrong + 1e4 * len(seen.problems) + 0.1 * len(change) + 1e-3 * sum(seen.ignored.values())
    return score, seen, ""


def _candidate(base: str, change: dict[str, Any], catalog: Catalog) -> Family:
    raw = catalog.load(base).model_dump(by_alias=True, exclude_unset=True)
    return Family.model_validate(merge(raw, change))


def _tensors_in(patterns: list[str]) -> int:
    total = 0
    for pattern in patterns:
        match = re.search(r"\((\d+) tensors\)$", pattern)
        total += int(match[1]) if match else 1
    return total


def _questions(base: Family, config: dict[str, Any], seen: Inspection | None) -> list[str]:
    """Config keys that the base does not read, and tensors that stay unexplained."""
    known = config_keys(base)
    nested = config.get("text_config")
    flat = {**config, **nested} if isinstance(nested, dict) else config
    found = [
        f"what does '{key}: {value}' change? the base does not read it"
        for key, value in flat.items()
        if key not in known and not _SILENT.match(key) and value is not None and not isinstance(value, dict)
    ]
    if seen is not None:
        found += [f"which module owns {pattern}?" for pattern in seen.unclaimed]
        found += [f"where does the checkpoint keep {pattern}?" for pattern in seen.missing]
        found += [f"why is {text}?" for text in seen.misshapen[:6]]
        found += [problem.splitlines()[0] for problem in seen.problems]
    return found
