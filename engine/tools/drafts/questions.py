"""What a draft cannot know: switches that nothing states, keys that nothing reads, tensors without owners."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from mlx_experts.engine.tools.drafts.changes import BY_NAME
from mlx_experts.engine.tools.drafts.constants import node_at, stated
from mlx_experts.engine.tools.drafts.evidence import Evidence, is_gqa, keys_read, plain
from mlx_experts.engine.tools.drafts.facts import Facts
from mlx_experts.engine.tools.inspect import Inspection
from mlx_experts.registry.catalog.config_view import ConfigView
from mlx_experts.registry.spec.family import Family
from mlx_experts.registry.spec.values import Ref, Spec, short_reference

# Keys that describe training or housekeeping and no mathematics.
_SILENT = re.compile(
    r"^(_.*|.*token_id|.*dropout.*|torch_dtype|dtype|use_cache|initializer_.*|transformers_version|.*aux_loss.*|"
    r"output_.*|architectures|model_type|.*_jitter.*|pretraining_tp|auto_map|quantization.*|vision_.*|audio_.*|"
    r"is_encoder_decoder|id2label|label2id|problem_type|return_dict|chunk_size_feed_forward|.*attentions?_output)$"
)
# Each with the key of it that a config may state; a switch that the tensors decide is not here.
_ROUTER = (
    ("moe.router.score", ""),
    ("moe.router.order", ""),
    ("moe.router.select", ""),
    ("moe.router.renormalize", "enabled"),
    ("moe.router.scale", ""),
    ("moe.router.groups", "count"),
)
_OTHERS = (
    ("attention.rope", "style"),
    ("norm.kind", ""),
    ("norm.offset", ""),
)
# What most families do without. One question asks for all of them.
_RARE = (
    "embedding.multiplier",
    "embedding.norm",
    "block.residual_multiplier",
    "attention.scale",
    "attention.scale_width",
    "attention.clip",
    "attention.value_scale",
    "attention.temperature",
    "attention.chunk",
    "attention.window",
    "attention.qk_norm",
    "attention.gate",
    "attention.value_norm",
    "attention.values_from_keys",
    "attention.window_extra",
    "dense.activation",
    "moe.experts.activation",
    "moe.router.softcap",
    "moe.router.multiplier",
    "moe.router.temperature",
    "moe.router.input_norm",
    "moe.router.expert_scale",
    "moe.router.score_dtype",
    "moe.experts.apply_router_weight_on_input",
    "moe.experts.output_scale",
    "moe.experts.latent",
    "moe.experts.zero_experts",
    "moe.shared.combine",
    "moe.shared.activation",
    "moe.output_norm",
    "head.multiplier",
    "head.divisor",
    "head.softcap",
    "head.norm",
    "norm.uncentred",
)


@dataclass(frozen=True)
class Question:
    """What a person has to answer.

    Args:
        paths: dotted keys of the family file that the answer goes to; none where it is not known yet.
        text: the question, with the guess that the draft makes and what it rests on.
        key: the config key that it is about, if it is about one.
    """

    text: str
    paths: tuple[str, ...] = ()
    key: str = ""


@dataclass
class Answered:
    """The draft that questions are asked about.

    Args:
        family: as it stands.
        taken: by dotted key, the family that a part was taken from.
        read: by config key, where the draft reads what its base does not, and as which family.
    """

    family: Family
    base: str
    facts: Facts
    view: ConfigView
    evidence: Evidence
    taken: dict[str, str] = field(default_factory=dict)
    read: dict[str, tuple[str, str]] = field(default_factory=dict)


def unread_keys(known: set[str], view: ConfigView) -> list[tuple[str, Any]]:
    """Config keys with values that may change mathematics and are not among those that a family reads."""
    flat = {**view.levels[-1], **view.levels[0]}
    return [
        (key, value)
        for key, value in flat.items()
        if key not in known
        and not _SILENT.match(key)
        and value is not None
        and not (isinstance(value, dict) and key == view.nested.split(".")[0])
    ]


def neutral(value: Any) -> bool:
    """Whether a value usually switches something off, so that not reading it is usually right."""
    return value is False or value in (0, 1, "", "default", "none") or value == [] or isinstance(value, dict)


def questions(draft: Answered, seen: Inspection | None) -> list[Question]:
    """Everything to ask about a draft, what decides most first."""
    found = [*_switches(draft, _ROUTER), *_sizes(draft), *_layers(draft), *_switches(draft, _OTHERS)]
    found += [*_mixer(draft), *_stored(draft), *_ignored(draft), *_rare(draft), *_keys(draft)]
    return found + (_tensors(draft, seen) if seen is not None else [])


def _switches(draft: Answered, switches: tuple[tuple[str, str], ...]) -> Iterator[Question]:
    for path, leaf in switches:
        node = node_at(draft.family, path)
        if path.startswith("attention.") and not is_gqa(draft.family.attention):
            node = node_at(draft.family, path) if path == "attention.rope" else None
            if node is None:
                continue
        value = node_at(draft.family, f"{path}.{leaf}") if leaf and node is not None else node
        if stated(value, draft.view) is not None or (
            path == "norm.offset" and draft.facts.norm_mean is not None
        ):
            continue
        more = ("moe.router.options",) if path == "moe.router.select" else ()
        yield Question(f"{path}: {_shown(node)}? {_because(draft, path)}", (path, *more))


def _because(draft: Answered, path: str) -> str:
    """Where a guess comes from, and how many families do the same."""
    source = draft.taken.get(path, draft.base)
    shown = {name: _shown(node_at(f, path)) for name, f in draft.evidence.families.items()}
    mine = _shown(node_at(draft.family, path))
    same = sum(value == mine for value in shown.values())
    alike = f", {source} among them" if shown.get(source) == mine else ""
    return f"no key of config.json states it; {same} of {len(shown)} families do so{alike}"


def _shown(value: Any) -> str:
    """A value in one line, as a family file writes it."""
    if isinstance(value, Ref):
        return short_reference(value)
    if isinstance(value, Spec):
        inner = ", ".join(
            f"{k}: {_shown(getattr(value, k))}"
            for k in type(value).model_fields
            if k in value.model_fields_set
        )
        return f"{{{inner}}}"
    words = {None: "null", True: "true", False: "false"}
    return words[value] if value is None or isinstance(value, bool) else str(value)


def _sizes(draft: Answered) -> Iterator[Question]:
    """Sizes that no key states and no tensor shows."""
    for name in ("norm_eps", "top_k"):
        value = getattr(draft.family.config, name)
        if stated(value, draft.view) is None:
            yield Question(
                f"config.{name}: {_shown(value)}? no key of config.json states it", (f"config.{name}",)
            )


def _layers(draft: Answered) -> Iterator[Question]:
    """What a layer's type means, and where norms stand, where families disagree."""
    family, view = draft.family, draft.view
    paths = ("layer_types", "variants", "dense_types", "mlp_variants", "attention")
    windows = [
        k for k in ("layer_types", "sliding_window", "attention_chunk_size") if view.get(k) is not None
    ]
    if family.layer_types is not None or windows:
        given = f"config.json has {', '.join(windows)}; " if windows else ""
        source = draft.taken.get("layer_types", draft.base)
        kinds = ", ".join(k for k in family.variants if k) or "one kind of layer"
        yield Question(f"layer_types: {kinds}? {given}read as {source} does", paths)
    norms = set(draft.facts.norms)
    places = {
        tuple(getattr(f.block, p) for p in ("pre_mixer", "post_mixer", "pre_mlp", "post_mlp"))
        for f in draft.evidence.families.values()
    }
    mine = tuple(getattr(family.block, p) for p in ("pre_mixer", "post_mixer", "pre_mlp", "post_mlp"))
    alike = {each for each in places if set(each) - {None} == norms} | {mine}
    if len(alike) > 1 or "block" in draft.taken or mine not in places or family.block.kind != "standard":
        yield Question(
            f"block: {_shown(family.block)}? the norms' names do not say where they stand", ("block",)
        )


def _mixer(draft: Answered) -> Iterator[Question]:
    """Options of mixers that no key states."""
    mixer = draft.family.attention
    if mixer is None or is_gqa(mixer):
        return
    loose = [k for k, v in mixer.options.items() if stated(v, draft.view) is None]
    said = f"{', '.join(loose)} as {draft.base} has them, and no others" if loose else "no others"
    yield Question(
        f"attention.options: {said}? config.json does not say which there are",
        ("attention.options", "checkpoint.conversions"),
    )


def _stored(draft: Answered) -> Iterator[Question]:
    """Orders that shapes do not show."""
    experts = draft.facts.experts
    if experts is not None and not experts.certain:
        order = (
            experts.layout.get("order") or experts.layout.get("fused") or experts.layout.get("projections")
        )
        yield Question(
            f"checkpoint.experts: gate before up in {experts.container}.{order}? both have one shape",
            ("checkpoint.experts", "checkpoint.projections"),
        )


def _ignored(draft: Answered) -> Iterator[Question]:
    """Parts that are taken for another model's."""
    if draft.facts.groups:
        named = ", ".join(f"{group}.*" for group in draft.facts.groups)
        yield Question(
            f"checkpoint.ignore: {named}? their names say that no text model has them", ("checkpoint.ignore",)
        )


def _rare(draft: Answered) -> Iterator[Question]:
    # One key of a section states that key only; the name of an activation does not state its bounds.
    loose = [
        p
        for p in _RARE
        if (isinstance(node := node_at(draft.family, p), Spec) and not isinstance(node, Ref))
        or stated(node, draft.view) is None
    ]
    loose = [p for p in loose if not p.startswith("attention.") or is_gqa(draft.family.attention)]
    all_sparse = bool(draft.facts.sparse) and len(draft.facts.sparse) == len(draft.facts.layers)
    loose = [p for p in loose if not (all_sparse and p.startswith("dense."))]
    for section in dict.fromkeys(path.rpartition(".")[0] for path in loose):
        own = [path for path in loose if path.rpartition(".")[0] == section]
        there = {p: v for p in own if _is_set(v := node_at(draft.family, p))}
        said = [f"{p.rpartition('.')[2]}: {_shown(v)}" for p, v in there.items()]
        absent = ", ".join(p.rpartition(".")[2] for p in own if p not in there)
        said += [f"none of {absent}"] if absent else []
        yield Question(f"{section}: {'; '.join(said)}? no key of config.json states them", tuple(own))


def _is_set(value: Any) -> bool:
    return value not in (None, 1.0, 1, 0.0, 0, False, ()) and plain(value) not in ({}, "sum", "float32")


def _keys(draft: Answered) -> Iterator[Question]:
    """Config keys that the draft does not read, or reads as another family than its base does."""
    for key, (path, source) in draft.read.items():
        how = "as its name says" if source == BY_NAME else f"as {source} does"
        yield Question(f"{path}: config.{key}? read {how}; {draft.base} does not know the key", (path,), key)
    for key, value in unread_keys(keys_read(draft.family), draft.view):
        shown = str(value)
        readers = sorted({each.path for each in draft.evidence.by_key.get(key, ())})
        hint = f"; others read it at {readers[0]}" if readers else ""
        yield Question(f"what does '{key}: {shown[:60]}' change? the draft does not read it{hint}", (), key)


def _tensors(draft: Answered, seen: Inspection) -> list[Question]:
    found = [
        Question(f"which module owns {pattern}?", _section_of(pattern, draft)) for pattern in seen.unclaimed
    ]
    found += [
        Question(f"where does the checkpoint keep {pattern}?", _section_of(pattern, draft))
        for pattern in seen.missing
    ]
    found += [Question(f"why is {text}?", _section_of(text, draft)) for text in seen.misshapen[:6]]
    return found + [Question(problem.splitlines()[0], ("checkpoint", "moe")) for problem in seen.problems]


def _section_of(pattern: str, draft: Answered) -> tuple[str, ...]:
    """The sections in which a tensor's owner is described."""
    layers = re.search(
        rf"{re.escape(draft.facts.prefix)}\.(\{{\w+\}}|\d+)\.(.*)|layers\.(\{{\w+\}}|\d+)\.(.*)", pattern
    )
    if layers is None:
        return ("names", "embedding", "head", "checkpoint")
    rest = layers[2] or layers[4] or ""
    path = draft.facts.moe_path
    if (path and rest.startswith(f"{path}.")) or re.search("expert|router|moe", rest):
        return ("moe", "dense", "checkpoint")
    if draft.facts.dense is not None and rest.startswith(f"{draft.facts.dense.path}."):
        return ("dense", "moe", "checkpoint")
    if "." in rest.replace(".weight", "").replace(".bias", ""):
        return ("attention", "layer_types", "variants", "dense_types", "mlp_variants", "checkpoint")
    return ("block", "attention", "variants")
