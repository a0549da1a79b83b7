"""A first family file for a checkpoint: the family that needs the fewest changes, the changes, and questions.

Every known family is fitted to the facts of the checkpoint's tensors and config. Those that need the least
are tried on the tensors' headers; the one that leaves the fewest tensors and keys unexplained is the base.
"""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import yaml
from pydantic import ValidationError

from mlx_experts.engine.tools.drafts.changes import Fitting
from mlx_experts.engine.tools.drafts.constants import set_aside
from mlx_experts.engine.tools.drafts.evidence import Evidence, alike, get, is_gqa, keys_read, plain
from mlx_experts.engine.tools.drafts.facts import Facts, read_facts
from mlx_experts.engine.tools.drafts.keys import read_more
from mlx_experts.engine.tools.drafts.original import Original
from mlx_experts.engine.tools.drafts.questions import Answered, Question, neutral, questions, unread_keys
from mlx_experts.engine.tools.inspect import Inspection, inspect_checkpoint
from mlx_experts.engine.weights.reader import load_arrays
from mlx_experts.registry.catalog.catalog import Catalog, bundled_folder, merge
from mlx_experts.registry.catalog.config_view import ConfigView
from mlx_experts.registry.catalog.dense import signs_of_experts
from mlx_experts.registry.catalog.family_format import EDITOR_WORDS, formatted
from mlx_experts.registry.catalog.yaml_reader import SCHEMA_FILE
from mlx_experts.registry.checkpoint.checkpoint import Checkpoint
from mlx_experts.registry.errors import CheckpointError, RegistryError, SpecError, UnknownFamilyError
from mlx_experts.registry.resolve.planner import resolve
from mlx_experts.registry.spec.family import Family
from mlx_experts.registry.spec.values import Spec

_LOG = logging.getLogger("mlx_experts")
IDENTITY = ("family", "extends", "reference", "model_types", "architectures", "when", "notes", "example")
_ROPE_KEYS = {"rope_parameters", "rope_scaling", "text_config", "original_max_position_embeddings"}
TRIED, AT_MOST = 8, 20
"""How many of the nearest bases are tried on the tensors' headers, and how many where none of them loads."""

OTHER_ATTENTION = 10.0
"""What it costs a base to have latent attention where the tensors show grouped queries, or the other way."""


@dataclass
class Draft:
    """A drafted family.

    Args:
        family: its name; ``base`` is what it extends, if anything.
        data: the YAML mapping.
        asked: what a person has to answer.
        source: the family that it is nearest to, which extends the base, is it, or is not extended.
        whole: the family that the draft stands for.
    """

    family: str
    base: str
    data: dict[str, Any]
    asked: list[Question] = field(default_factory=list)
    source: str = ""
    whole: Family | None = None

    def next_command(self, folder: Path) -> str:
        """What checks this family alone, once its file lies in ``folder``."""
        return f"registry check {self.family} --families {folder}"

    @property
    def questions(self) -> list[str]:
        """The questions in words, one line each."""
        return [question.text for question in self.asked]

    def to_yaml(self) -> str:
        """The file's text, questions as comments."""
        text = f"{EDITOR_WORDS}{bundled_folder() / SCHEMA_FILE}\n"
        text += yaml.safe_dump(self.data, sort_keys=False, width=10000)
        text += "".join(f"# question: {q}\n" for q in self.questions)
        return formatted(text, Path(f"{self.family}.yaml"))


def _is_usable(name: str, catalog: Catalog) -> bool:
    """Whether a family may be a base; one whose file is wrong may not, and is told by a warning."""
    try:
        return catalog.load(name).backbone is None
    except SpecError as error:
        _LOG.warning("%s is left out: %s", catalog.path(name), error.what)
        return False


@dataclass
class _Candidate:
    """A base made to fit, and what it costs to explain the checkpoint with it; lower is better."""

    base: str
    family: Family
    taken: dict[str, str]
    read: dict[str, tuple[str, str]]
    cost: float
    seen: Inspection | None = None


@dataclass(frozen=True)
class _NoTensors:
    """What a draft is made of where there is no checkpoint."""

    config: dict[str, Any]
    where: str
    tensors: dict[str, Any] = field(default_factory=dict)


def draft_of_original(source: Original, catalog: Catalog, exclude: Iterable[str] = ()) -> Draft:
    """Draft a family of what transformers says alone; what tensors would show is asked.

    Raises:
        UnknownFamilyError: no known family comes near.
    """
    where = f"transformers {source.version}, {source.model_type}"
    return draft_family(_NoTensors(dict(source.defaults), where), catalog, exclude, source)


def draft_family(
    checkpoint: Checkpoint | _NoTensors,
    catalog: Catalog,
    exclude: Iterable[str] = (),
    source: Original | None = None,
) -> Draft:
    """Draft a family for a checkpoint.

    Args:
        exclude: families that may not become the base, nor be asked.
        source: what transformers says of the model type; its defaults stand for keys that the config
            leaves out, and are stated in the file.

    Raises:
        UnknownFamilyError: no known family comes near.
    """
    given = checkpoint.config
    config = given if source is None else source.completed(given)
    name, claimed = _name(config, catalog)
    excluded = set(exclude)
    usable = [n for n in catalog.names() if n not in excluded and _is_usable(n, catalog)]
    evidence = Evidence(catalog, usable)
    facts = read_facts(config, checkpoint.tensors, source)
    if facts.experts is None and not signs_of_experts(config, checkpoint.tensors):
        raise UnknownFamilyError(
            "no experts: a dense model",
            where=checkpoint.where,
            expected="tensors of experts, or a config key that counts them",
            found=f"{len(checkpoint.tensors)} tensors without",
            hint="mlx_lm.generate runs it",
        )
    if isinstance(checkpoint, Checkpoint):
        facts = replace(facts, norm_mean=_norm_mean(checkpoint, facts))
    view = _view(config)
    label = str(config.get("model_type", ""))
    best = _nearest(usable, claimed, facts, view, evidence, label, checkpoint)
    family = best.family if source is None else with_defaults(best.family, given, source)
    data, base = smallest(best.base, family, catalog)
    architectures = list(config.get("architectures") or [])
    data = {
        "family": name,
        **({"extends": base} if base else {}),
        "reference": "question: name the original implementation that this was checked against",
        "model_types": [name if claimed else str(config.get("model_type", name))],
        "architectures": [] if claimed else architectures[:1],
        **data,
    }
    if "{layer}" in str(data):
        # What stands for each layer in a list of its own is stated by an example, or not at all.
        data["example"] = plain(catalog.load(best.base).example)
    draft = Draft(name, base, data, source=best.base, whole=family)
    if claimed:
        draft.asked.append(
            Question(f"'{claimed}' already describes this checkpoint; this draft answers to '{name}' only")
        )
    answered = Answered(family, best.base, facts, view, evidence, best.taken, best.read)
    draft.asked += questions(answered, best.seen)
    return draft


def _norm_mean(checkpoint: Checkpoint, facts: Facts) -> float | None:
    """The mean of a norm's weights; None for a checkpoint that is not on this machine."""
    names = [f"{facts.prefix}.{i}.{name}.weight" for i in facts.layers for name in facts.norms][:1]
    if checkpoint.folder is None or not names:
        return None
    try:
        return float(load_arrays(checkpoint, names=names)[names[0]].astype(mx.float32).mean())
    except CheckpointError:
        # Files without their tensors' bytes, of which only the headers are asked for.
        return None


def _nearest(
    usable: list[str],
    claimed: str,
    facts: Facts,
    view: ConfigView,
    evidence: Evidence,
    label: str,
    checkpoint: Checkpoint | _NoTensors,
) -> _Candidate:
    """The base that explains a checkpoint with the least; the family that the config names, if that does.

    Raises:
        UnknownFamilyError: no family can be made to fit.
    """

    def tried(bases: Iterable[str]) -> list[_Candidate]:
        found = []
        for base, on_disk in itertools.product(bases, (False, True)):
            each = _fitted(base, facts, view, evidence, on_disk, label, base == claimed)
            if each is not None and isinstance(checkpoint, Checkpoint):
                _try(each, checkpoint)
            if each is not None and each.cost < float("inf"):
                found.append(each)
        return found

    if claimed in evidence.families and isinstance(checkpoint, Checkpoint):
        whole = _Candidate(claimed, evidence.families[claimed], {}, {}, 0.0)
        _try(whole, checkpoint)
        if whole.seen is not None and whole.seen.loadable:
            return whole
    own = tried([claimed] if claimed in evidence.families else [])
    if not any(_loads(each) for each in own):
        ranked = sorted(usable, key=lambda base: _distance(base, facts, view, evidence, label))
        ranked = [base for base in ranked if base != claimed]
        own += tried(ranked[:TRIED])
        for base in ranked[TRIED:AT_MOST]:
            if any(_loads(each) for each in own):
                break
            own += tried([base])
    if not own:
        raise UnknownFamilyError(
            "no known family comes near this checkpoint",
            where=checkpoint.where,
            found=f"{len(usable)} families tried",
            hint="write a family file from the start: docs/add-a-family.md",
        )
    return min(own, key=lambda each: each.cost)


def with_defaults(family: Family, given: dict[str, Any], source: Original) -> Family:
    """A family whose references state the original's defaults for keys that a config leaves out."""
    here, whole = _view(given), _view(source.completed(given))

    def filled(value: Any) -> Any:
        if isinstance(value, dict) and "from" in value:
            keys = [value["from"]] if isinstance(value["from"], str) else value["from"]
            key = next((k for k in keys if whole.get(k) is not None), None)
            known = None if key is None else whole.get(key)
            scalar = isinstance(known, bool | int | float | str)
            if key is not None and scalar and here.get(key) is None and "map" not in value:
                return {**value, "default": known}
            return value
        if isinstance(value, dict):
            return {k: filled(v) for k, v in value.items()}
        return [filled(each) for each in value] if isinstance(value, list) else value

    raw = plain(family)
    made = {k: v if k in IDENTITY or k == "config" else filled(v) for k, v in raw.items()}
    return Family.model_validate(made)


def _view(config: dict[str, Any]) -> ConfigView:
    """The config through whichever nested text settings it has."""
    for keys in (("text_config",), ("llm_config",), ("language_config",), ("thinker_config.text_config",)):
        view = ConfigView(config, keys)
        if view.nested:
            return view
    return ConfigView(config, ())


def _name(config: dict[str, Any], catalog: Catalog) -> tuple[str, str]:
    """The draft's name, and the family that describes the checkpoint already, if any."""
    wanted = re.sub(r"\W", "_", str(config.get("model_type") or "new_family"))
    try:
        claimed = catalog.resolve(config).name
    except UnknownFamilyError:
        claimed = ""
    taken = {n for e in catalog.entries.values() for n in (e.name, *e.model_types)}
    return (f"{wanted}_draft" if claimed or wanted in taken else wanted), claimed


def _distance(base: str, facts: Facts, view: ConfigView, evidence: Evidence, label: str) -> float:
    """How far a base is from a checkpoint, before its tensors are tried; infinite where it cannot fit."""
    fitting = Fitting(base, facts, view, evidence)
    try:
        fitting.fit(names_on_disk=True)
    except (RegistryError, ValidationError):
        return float("inf")
    mixer = evidence.families[base].attention
    shown = mixer is not None and (facts.latent or bool(facts.attention))
    strange = OTHER_ATTENTION if shown and facts.latent == is_gqa(mixer) else 0.0
    return strange + _cost(base, fitting.change, evidence.keys_read(base), view, evidence, label)


def _fitted(
    base: str, facts: Facts, view: ConfigView, evidence: Evidence, on_disk: bool, label: str, own: bool
) -> _Candidate | None:
    """A base with its change; None where it cannot be made to fit.

    Args:
        own: the base describes the checkpoint already, so that its constants are the checkpoint's.
    """
    fitting = Fitting(base, facts, view, evidence)
    try:
        fitting.fit(names_on_disk=on_disk)
        read_more(fitting, [key for key, _ in unread_keys(keys_read(fitting.family()), view)])
        family = fitting.family()
    except (RegistryError, ValidationError):
        return None
    raw = plain(family)
    if on_disk and facts.groups:
        known = tuple(family.checkpoint.ignore)
        raw.setdefault("checkpoint", {})["ignore"] = [
            *(k for k in known if any(k.startswith(g) for g in facts.groups)),
            *(f"{g}*" for g in facts.groups if not any(k.startswith(g) for k in known)),
        ]
    kin = max(alike(label, n) for n in (base, *family.model_types)) > 0.6
    strange = 0.0
    if not own:
        set_aside(raw, family, facts, view, evidence, kin)
    try:
        family = Family.model_validate(raw)
        resolve(family, view.levels[-1])
    except (RegistryError, ValidationError):
        # A base that does not stand without its constants comes after all that do.
        family, strange = fitting.family(), 50.0
    cost = strange + _cost(base, fitting.change, keys_read(family), view, evidence, label)
    # Of two that say the same, the one that calls modules what the checkpoint calls them.
    cost += 0.0 if on_disk else 0.4
    return _Candidate(base, family, fitting.taken, fitting.read, cost)


def _cost(
    base: str, change: dict[str, Any], known: set[str], view: ConfigView, evidence: Evidence, label: str
) -> float:
    """What a base costs: each change, twice more in the router, each key unread, and a foreign name."""
    family = evidence.families[base]
    cost = 1.0 * len(_leaves_of(change)) + 2.0 * len(_leaves_of(get(change, "moe.router")))
    cost += sum(0.2 if neutral(value) else 1.5 for _, value in unread_keys(known, view))
    # What a base reads and this config lacks is as telling as what it does not read.
    cost += 0.25 * sum(view.get(key) is None for key in evidence.keys_read(base) - _ROPE_KEYS)
    cost += 3.0 * sum(kind != "standard" for kind in (family.block.kind, family.embedding.kind))
    cost += 4.0 * (1 - max(alike(label, name) for name in (base, *family.model_types)))
    # All that a derived base changes has to be repeated in the draft.
    return cost + (0.3 if family.extends is not None else 0.0)


def _leaves_of(value: Any) -> list[Any]:
    if isinstance(value, dict) and "from" not in value:
        return [leaf for each in value.values() for leaf in _leaves_of(each)]
    return [value]


def _loads(candidate: _Candidate) -> bool:
    return candidate.seen is not None and candidate.seen.loadable


def _try(candidate: _Candidate, checkpoint: Checkpoint) -> None:
    """Add to a candidate's cost what the tensors say."""
    try:
        seen = inspect_checkpoint(checkpoint, family=candidate.family, tensors_only=True)
    except (RegistryError, ValidationError):
        candidate.cost = float("inf")
        return
    wrong = sum(_tensors_in(rows) for rows in (seen.missing, seen.unclaimed)) + len(seen.misshapen)
    candidate.cost += 100.0 * wrong + 1e4 * len(seen.problems) + 1e-3 * sum(seen.ignored.values())
    candidate.seen = seen


def smallest(base: str, family: Family, catalog: Catalog) -> tuple[dict[str, Any], str]:
    """What a file has to state so that it means a family, and what it extends; nothing where that is shorter.

    Rules of the base that the family does not have are in neither.
    """
    alone = {k: v for k, v in plain(family).items() if k not in IDENTITY and v not in (None, {}, [])}
    alone = {k: v for k, v in alone.items() if v != plain(_DEFAULTS.get(k))}
    if family.dense is not None:
        alone.setdefault("dense", {})
    root = str(catalog.stated(base).get("extends") or base)
    whole = {k: v for k, v in plain(catalog.load(root)).items() if k not in IDENTITY}
    if "text_config" not in catalog.stated(root):
        # It followed from the names of the base's classes, which the draft's are not.
        whole.pop("text_config", None)
    change = _difference(whole, {k: v for k, v in plain(family).items() if k not in IDENTITY}, Family)
    # A section that says nothing is there without being named.
    change = change and {k: v for k, v in change.items() if v != {} or plain(_DEFAULTS.get(k)) != {}}
    if change is None or _length(alone) < _length(change) or not _means(merge(whole, change), family):
        return alone, ""
    return change, root


def _means(raw: dict[str, Any], family: Family) -> bool:
    """Whether a mapping says what a family says, names aside."""
    said = Family.model_validate({k: v for k, v in plain(family).items() if k in IDENTITY} | raw)
    return all(
        plain(getattr(said, name), whole=True) == plain(getattr(family, name), whole=True)
        for name in Family.model_fields
        if name not in IDENTITY
    )


_DEFAULTS = {name: info.default for name, info in Family.model_fields.items()}


def _difference(old: dict[str, Any], new: dict[str, Any], kind: Any) -> dict[str, Any] | None:
    """What to state over ``old`` to get ``new``; None where nothing can be stated that does."""
    change: dict[str, Any] = {}
    fields = {(info.alias or name): info for name, info in getattr(kind, "model_fields", {}).items()}
    for key, value in new.items():
        before = old.get(key)
        if value == before:
            continue
        change[key] = value
        if not isinstance(value, dict) or not isinstance(before, dict) or "from" in value or "from" in before:
            continue
        if value.get("kind") == before.get("kind"):
            inner = _difference(before, value, _section(fields.get(key)))
            if inner is None:
                return None
            change[key] = inner
        elif "kind" not in value:
            return None
    for key in old.keys() - new.keys():
        default = plain(fields[key].default) if key in fields and not fields[key].is_required() else ...
        if default is ... or (isinstance(default, dict) and "from" not in default):
            if default in ({}, ...) and old[key] not in ({}, []):
                return None
            default = plain(fields[key].default, whole=True) if default is not ... else None
        change[key] = default
    return change


def _section(info: Any) -> Any:
    """The section that a field holds, for its fields' defaults."""
    if info is None:
        return None
    options = [info.annotation, *getattr(info.annotation, "__args__", ())]
    return next((o for o in options if is_section(o)), None)


def is_section(kind: Any) -> bool:
    """Whether a type is a section of a family file."""
    return isinstance(kind, type) and issubclass(kind, Spec)


def _length(data: dict[str, Any]) -> int:
    return len(yaml.safe_dump(data, default_flow_style=True))


def _tensors_in(patterns: list[str]) -> int:
    total = 0
    for pattern in patterns:
        match = re.search(r"\((\d+) tensors\)$", pattern)
        total += int(match[1]) if match else 1
    return total
