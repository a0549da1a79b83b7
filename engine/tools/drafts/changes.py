"""What has to change of a base so that it fits a checkpoint's facts: the smallest change that says them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from mlx_experts.engine.tools.drafts.constants import rule_keys
from mlx_experts.engine.tools.drafts.evidence import Evidence, get, is_gqa, plain, put
from mlx_experts.engine.tools.drafts.facts import (
    EXPERT_KEYS,
    HEAD_KEYS,
    LAYER_KEYS,
    WIDTH_KEYS,
    Attention,
    Facts,
    Mlp,
    first_of,
)
from mlx_experts.engine.tools.drafts.naming import PLACES, by_words, gqa, holder
from mlx_experts.registry.catalog.catalog import merge, mixers
from mlx_experts.registry.catalog.config_view import ConfigView
from mlx_experts.registry.errors import RegistryError
from mlx_experts.registry.resolve.features import features
from mlx_experts.registry.resolve.layer_types import expand_moe_layers, expand_types
from mlx_experts.registry.resolve.planner import Plan, Resolver, resolve
from mlx_experts.registry.spec.family import Family, GqaSpec
from mlx_experts.registry.spec.layer_rules import LayerRule
from mlx_experts.registry.spec.path_pattern import PathPattern
from mlx_experts.registry.spec.values import Ref

# Config keys under which families state a size, most telling first.
ALIASES: dict[str, tuple[str, ...]] = {
    "num_experts": EXPERT_KEYS,
    "top_k": (
        "num_experts_per_tok",
        "num_experts_per_token",
        "moe_topk",
        "moe_top_k",
        "moe_k",
        "top_k_experts",
        "experts_per_token",
        "ffn_config.moe_top_k",
    ),
    "expert_width": (
        "moe_intermediate_size",
        "expert_ffn_hidden_size",
        "moe_ffn_hidden_size",
        "intermediate_size",
        "ffn_hidden_size",
        "ffn_config.ffn_hidden_size",
    ),
    "dense_width": (
        "intermediate_size",
        "ffn_hidden_size",
        "intermediate_size_mlp",
        "dense_intermediate_size",
    ),
    "hidden_size": WIDTH_KEYS,
    "num_layers": LAYER_KEYS,
    "num_heads": HEAD_KEYS,
    "num_kv_heads": ("num_key_value_heads", "n_kv_heads", "num_kv_heads", "attn_config.kv_n_heads"),
    "norm_eps": ("rms_norm_eps", "norm_eps", "layer_norm_epsilon", "layernorm_epsilon", "layer_norm_eps"),
}
FEATURES = {
    "clip_qkv": "attention.clip",
    "final_logit_softcapping": "head.softcap",
    "moe_router_logit_softcapping": "moe.router.softcap",
    "swiglu_limit": "moe.experts.activation.limit",
}
"""Keys that switch on what a base may not have, and where a family file says it."""
BY_NAME = "its name"
"""What a key is read as where no family reads it."""
_BIAS_KEYS = ("attention_bias", "qkv_bias", "use_qkv_bias", "add_qkv_bias", "use_bias", "bias")


class Fitting:
    """The change of one base for one checkpoint.

    Args:
        base: a family.
        facts, view: the checkpoint.
        evidence: the families that may be asked.
    """

    def __init__(self, base: str, facts: Facts, view: ConfigView, evidence: Evidence) -> None:
        self.base, self.raw = evidence.families[base], evidence.raw(base)
        self.facts, self.view, self.evidence = facts, view, evidence
        self.change: dict[str, Any] = {}
        self.read: dict[str, tuple[str, str]] = {}
        """By config key that the base does not read: where it is read now, and as whom."""
        self.taken: dict[str, str] = {}
        """By dotted key of the change: the family that it was taken from."""

    def family(self) -> Family:
        """The base with the change so far.

        Raises:
            ValidationError: the two do not go together.
        """
        return Family.model_validate(merge(self.raw, self.change))

    def fit(self, *, names_on_disk: bool) -> dict[str, Any]:
        """The change that the facts need.

        Args:
            names_on_disk: modules are called what the checkpoint calls them, and the base's renames dropped;
                otherwise its names and renames stay.

        Raises:
            RegistryError, ValidationError: the base cannot be made to fit.
        """
        self._text_settings()
        self._sizes()
        self._sparse_layers()
        self._layer_types()
        if self.facts.dense is not None and self.base.dense is None:
            self.change["dense"] = {}
        self._features()
        plan = resolve(self.family(), self.view.levels[-1])
        if names_on_disk:
            self._frame()
            self._names(plan)
        self._switches(plan)
        return self.change

    # What stands in config.json.

    def _text_settings(self) -> None:
        nested = self.view.nested
        if nested and not (self.base.text_config and nested in self.base.text_keys):
            self.change["text_config"] = True
            if nested != "text_config":
                self.change["text_keys"] = [nested]

    def _features(self) -> None:
        """Read what a config switches on and the base does not have, where a key of the language says it."""
        known = self.evidence.keys_read(self.base.family)
        for key, path in FEATURES.items():
            attends = not path.startswith("attention.") or is_gqa(self.base.attention)
            if key not in known and attends and features()[key].is_on(self.view.get(key)):
                put(self.change, path, {"from": key, "default": None if path.endswith("clip") else 0.0})
                self.read[key] = (path, BY_NAME)

    def _sizes(self) -> None:
        facts, view = self.facts, self.view
        stated = {
            "hidden_size": facts.hidden or None,
            "num_experts": facts.num_experts or None,
            "expert_width": facts.experts.width if facts.experts else None,
            "dense_width": facts.dense.width if facts.dense else None,
        }
        sizes: dict[str, Any] = {}
        for name, keys in ALIASES.items():
            ref, fact = getattr(self.base.config, name), stated.get(name)
            given = first_of(view, ref.keys) if isinstance(ref, Ref) else ref
            fits = given is not None and (fact is None or given == fact or isinstance(given, list))
            if fits:
                continue
            there = [key for key in keys if view.get(key) is not None]
            key = next((k for k in there if fact is None or view.get(k) == fact), None)
            if key is None and fact is not None:
                key = self._key_of(fact, name)
            if key is not None:
                sizes[name] = key
        self._head_width(sizes)
        if sizes:
            self.change["config"] = sizes

    def _key_of(self, fact: int, size: str) -> str | None:
        """A config key of this value that is named like a size."""
        words = {
            "num_experts": "expert",
            "expert_width": "intermediate|ffn|width",
            "dense_width": "intermediate|ffn",
        }
        for key, value in self.view.levels[0].items():
            if value == fact and not isinstance(value, bool) and re.search(words.get(size, "$^"), key):
                return key
        return None

    def _head_width(self, sizes: dict[str, Any]) -> None:
        """The usual width of a head, where a query projection's rows show it and the base says another."""
        heads = self.facts.heads
        if not heads or self.facts.latent or not self.facts.attention:
            return
        usual = self.view.get("head_dim") or self.facts.hidden // heads
        ref = self.base.config.head_dim
        given = (first_of(self.view, ref.keys) or ref.default) if isinstance(ref, Ref) else ref
        rows = {heads * usual, 2 * heads * usual}
        shown = any(kind.q_rows in rows or "qkv" in kind.names for kind in self.facts.attention)
        if shown and given is not None and given != usual:
            sizes["head_dim"] = {"from": "head_dim", "default": None}

    # Which layers.

    def _sparse_layers(self) -> None:
        facts = self.facts
        if not facts.sparse:
            return
        if self._listed(self.base.moe.layers) == list(facts.sparse) and (
            self.base.dense is not None or not facts.dense
        ):
            return
        if len(facts.sparse) == len(facts.layers):
            # Whatever switches it for others: here every layer has experts.
            found = self._rule(only_read=True)
            self.change["moe"] = {"layers": [found or {"kind": "all"}]}
            return
        found = self._rule(only_read=True)
        if found is None:
            first = facts.sparse[0]
            whole = list(facts.sparse) == list(range(first, len(facts.layers)))
            key = self._first_key(first) if whole else None
            found = (
                {"kind": "from_layer", "first": {"from": key} if key else first} if whole else self._rule()
            )
        if found is not None:
            self.change["moe"] = {"layers": [found]}

    def _first_key(self, first: int) -> str | None:
        """A config key that gives the number of dense layers."""
        level = self.view.levels[0]
        return next(
            (k for k, v in level.items() if "dense" in k and v == first and not isinstance(v, bool)), None
        )

    def _rule(self, *, only_read: bool = False) -> dict[str, Any] | None:
        """Another family's rule that gives the layers which have experts; one whose keys are there, first."""
        best: tuple[int, str, dict[str, Any]] | None = None
        for name, family in self.evidence.families.items():
            for rule in family.moe.layers:
                if self._listed((rule,)) == list(self.facts.sparse):
                    raw = plain(rule)
                    keys = sorted(rule_keys(raw))
                    present = [key for key in keys if self.view.get(key) is not None]
                    if only_read and (not present or len(present) < len(keys)):
                        continue
                    rank = -10 * len(present) + len(keys)
                    if best is None or rank < best[0]:
                        best = (rank, name, raw)
        if best is None:
            return None
        self.taken["moe.layers"] = best[1]
        return best[2]

    def _listed(self, rules: tuple[LayerRule, ...]) -> list[int] | None:
        """The layers that rules give experts, or None where they cannot be read."""
        resolver = Resolver(self.base.family, self.view)
        try:
            flags = expand_moe_layers(rules, self.view, len(self.facts.layers), resolver)
        except RegistryError:
            return None
        return [i for i, flag in enumerate(flags) if flag]

    def _layer_types(self) -> None:
        listed = self.view.get("layer_types")
        wanted = (
            set(listed) if isinstance(listed, list) and all(isinstance(t, str) for t in listed) else set()
        )
        kinds = mixers(self.base)
        reads = self.base.layer_types is not None and any(
            getattr(rule, "key", None) == "layer_types" for rule in self.base.layer_types
        )
        if reads and wanted <= {*kinds}:
            return
        if len(wanted) > 1:
            self._take_types(wanted)
        elif self.base.layer_types is not None and not self._types_fit(kinds):
            self.change["layer_types"] = None

    def _types_fit(self, kinds: Mapping[str, Any]) -> bool:
        resolver = Resolver(self.base.family, self.view)
        try:
            types = expand_types(self.base.layer_types, self.view, len(self.facts.layers), resolver)
        except RegistryError:
            return False
        return set(types) <= set(kinds) or "" in kinds

    def _take_types(self, wanted: set[str]) -> None:
        """The simplest way in which another family reads these layer types."""
        usual = self.base.attention is not None
        best: tuple[int, str, Family] | None = None
        for name, family in self.evidence.families.items():
            reads = any(getattr(rule, "key", None) == "layer_types" for rule in family.layer_types or ())
            if reads and wanted <= set(family.variants) and (usual or family.attention is not None):
                size = len(str([plain(family.variants[t]) for t in sorted(wanted)]))
                if best is None or size < best[0]:
                    best = (size, name, family)
        if best is None:
            return
        _, name, family = best
        self.taken["layer_types"] = name
        self.change["layer_types"] = ["layer_types"]
        self.change["variants"] = {t: plain(family.variants[t]) for t in sorted(wanted)}

    # What tensors are called.

    def _frame(self) -> None:
        outside, prefix = self.facts.outside, self.facts.prefix
        root, _, layers = prefix.rpartition(".")
        if not root:
            return
        head = outside.get("head", "")
        wrapper = holder(root, head)
        inner = root.removeprefix(f"{wrapper}.") if wrapper else root
        names = self.base.names
        wanted: dict[str, Any] = {"wrapper": wrapper, "root": inner, "layers": layers}
        for role in ("embed", "norm"):
            if role in outside:
                wanted[role] = outside[role].removeprefix(f"{root}.")
        changed = {k: v for k, v in wanted.items() if getattr(names, k) != v}
        if changed:
            self.change["names"] = changed
        path = head.removeprefix(f"{wrapper}.") if wrapper else head
        if head and path != self.base.head.path:
            put(self.change, "head.path", path)

    def _names(self, plan: Plan) -> None:
        facts, base = self.facts, self.base
        self._block()
        checkpoint: dict[str, Any] = {}
        if base.checkpoint.conversions:
            checkpoint["conversions"] = [
                raw
                for raw in plain(base.checkpoint.conversions)
                if "rename" not in raw and self._matches(raw)
            ]
        if facts.experts is not None:
            layout = dict(facts.experts.layout)
            others = [{"kind": "per_expert"}] if layout["kind"] != "per_expert" else [{"kind": "stacked"}]
            usual = f"{facts.moe_path}.experts" if facts.moe_path else "experts"
            names = layout.get("projections")
            if names is not None and names != list(base.checkpoint.projections):
                checkpoint["projections"] = names
            layout.pop("projections", None)
            if layout["path"] == usual:
                del layout["path"]
            standard = layout in ({"kind": "per_expert"}, {"kind": "stacked"})
            if not standard or base.checkpoint.experts is not None:
                checkpoint["experts"] = [layout, *others]
            self._moe(plan)
        if facts.dense is not None:
            self._mlp("dense", facts.dense, base.dense)
        if checkpoint:
            self.change["checkpoint"] = checkpoint
        self._output_norm()

    def _matches(self, raw: Mapping[str, Any]) -> bool:
        """Whether an operation of the base finds a tensor."""
        source = next((str(raw[k]) for k in ("split", "conv", "reshape", "pick", "from") if k in raw), "")
        text = f"{self.facts.prefix}.{{layer}}{source}" if source.startswith(".") else source
        pattern = PathPattern(text if text.endswith("*") else f"{text}*")
        return any(
            pattern.matches(f"{self.facts.prefix}.{i}.{name}")
            for i, tensors in self.facts.layers.items()
            for name in tensors
        )

    def _output_norm(self) -> None:
        """A norm that only layers with experts have stands on what their block gives."""
        name = self.facts.output_norm
        if name is not None and self.base.moe.output_norm is None and self.facts.moe_path:
            put(self.change, "moe.output_norm", name)
            kept = get(self.change, "checkpoint.conversions")
            rest = plain(self.base.checkpoint.conversions) if kept is None else kept
            rename = {"rename": f".{name}", "to": f".{self.facts.moe_path}.{name}"}
            put(self.change, "checkpoint.conversions", [*rest, rename])

    def _block(self) -> None:
        base, norms = self.base.block, set(self.facts.norms)
        if base.kind != "standard" or not norms or {getattr(base, p) for p in PLACES} - {None} == norms:
            return
        for name, family in self.evidence.families.items():
            block = family.block
            if block.kind == "standard" and {getattr(block, p) for p in PLACES} - {None} == norms:
                self.taken["block"] = name
                places = {p: getattr(block, p) for p in PLACES}
                break
        else:
            places = by_words(sorted(norms))
        self.change["block"] = {p: v for p, v in places.items() if getattr(base, p) != v}
        if base.parallel != (len(norms) == 1):
            self.change["block"]["parallel"] = len(norms) == 1

    def _moe(self, plan: Plan) -> None:
        facts, moe = self.facts, self.base.moe
        change: dict[str, Any] = {}
        if facts.moe_path != moe.path:
            change["path"] = facts.moe_path
        if facts.router is not None and facts.router != moe.router.path:
            put(change, "router.path", facts.router)
        if facts.shared is not None:
            have = moe.shared
            shared: dict[str, Any] = {} if have is not None else self._new_shared(facts.shared)
            self._mlp_names(shared, facts.shared, have)
            if have is None or have.path != facts.shared.path:
                shared["path"] = facts.shared.path
            if facts.shared_gate is not None and (have is None or have.gate != facts.shared_gate):
                shared["gate"] = facts.shared_gate
            if shared or have is None:
                change["shared"] = shared
        self.change["moe"] = merge(self.change.get("moe", {}), change)

    def _mlp(self, section: str, mlp: Mlp, have: Any) -> None:
        change: dict[str, Any] = dict(self.change.get(section) or {})
        if (have is None and mlp.path != "mlp") or (have is not None and have.path != mlp.path):
            change["path"] = mlp.path
        self._mlp_names(change, mlp, have)
        if change or have is None:
            self.change[section] = change

    def _mlp_names(self, change: dict[str, Any], mlp: Mlp, have: Any) -> None:
        if len(mlp.names) == 3:
            usual = ("gate_proj", "up_proj", "down_proj") if have is None else have.names
            if tuple(mlp.names) != tuple(usual):
                change["names"] = list(mlp.names)
        elif mlp.fused and (have is None or not have.fused):
            change["fused"] = True
            change["names"] = [mlp.names[0], "up_proj", mlp.names[1]]

    def _new_shared(self, mlp: Mlp) -> dict[str, Any]:
        """A shared expert that the base does not have: its width from the config."""
        assert self.facts.experts is not None
        unit = self.facts.experts.width
        for key, value in self.view.levels[0].items():
            if isinstance(value, int) and not isinstance(value, bool) and "shared" in key:
                if value == mlp.width and value > 16:
                    return {"width": {"from": key}}
                if value * unit == mlp.width:
                    return {"count": {"from": key}}
                if value == mlp.width:
                    return {"width": {"from": key}}
        return {"width": mlp.width} if mlp.width != unit else {}

    # What exists.

    def _switches(self, plan: Plan) -> None:
        facts = self.facts
        moe = next((layer.moe for layer in plan.layers if layer.moe is not None), None)
        if moe is not None and facts.experts is not None:
            self._routing(moe)
        if facts.attention and not facts.latent:
            for kind in facts.attention:
                self._attention(kind, plan)
        dense = next((layer.dense for layer in plan.layers if layer.dense is not None), None)
        if facts.dense is not None and dense is not None and facts.dense.bias != dense.bias:
            put(self.change, "dense.bias", self._mlp_bias(facts.dense.bias))
        if facts.norm_bias != (plan.norm.kind == "layer"):
            put(self.change, "norm.kind", "layer" if facts.norm_bias else "rms")
        tied = "head" not in facts.outside
        if facts.outside and plan.head.tied != tied and tied:
            put(self.change, "head.tied", True)

    def _routing(self, moe: Any) -> None:
        facts, router = self.facts, moe.router
        experts = facts.experts
        assert experts is not None
        if facts.router_bias != router.bias:
            put(self.change, "moe.router.bias", facts.router_bias)
        have = router.selection_bias if router.selection_bias and router.selection_bias.enabled else None
        if facts.selection_bias is None and have is not None:
            put(self.change, "moe.router.selection_bias", None)
        elif facts.selection_bias is not None and (have is None or self._misplaced(have.path)):
            put(self.change, "moe.router.selection_bias", {"path": facts.selection_bias, "enabled": True})
            if facts.flat_bias:
                kept = get(self.change, "checkpoint.conversions")
                rest = plain(self.base.checkpoint.conversions) if kept is None else kept
                stored = "".join(f".{part}" for part in (facts.moe_path, facts.selection_bias) if part)
                put(self.change, "checkpoint.conversions", [*rest, {"reshape": stored}])
        bias = get(self.change, "moe.router.selection_bias.path")
        path = get(self.change, "moe.router.path") or router.path
        if isinstance(bias, str) and bias.startswith(f"{path}.") and router.quantizable:
            put(self.change, "moe.router.quantizable", False)
        if facts.shared is None and moe.shared is not None and moe.shared.exists:
            put(self.change, "moe.shared", None)
        shared = get(self.change, "moe.shared")
        gated = moe.shared is not None and moe.shared.gate is not None
        if facts.shared is not None:
            if facts.shared_gate is None and gated:
                put(self.change, "moe.shared", {**(shared or {}), "gate": None, "combine": "sum"})
            elif facts.shared_gate is not None and not gated:
                put(self.change, "moe.shared", {**(shared or {}), "combine": "sigmoid_gate"})
            width = (moe.shared.width or 0) * moe.shared.count if moe.shared is not None else None
            if width is not None and width != facts.shared.width:
                new = self._new_shared(facts.shared)
                missing = {"count": 1} if "count" not in new else {"width": None}
                put(self.change, "moe.shared", {**(get(self.change, "moe.shared") or {}), **missing, **new})
        shared = facts.shared
        if shared is not None and shared.bias != (moe.shared.bias if moe.shared is not None else False):
            put(self.change, "moe.shared.bias", self._mlp_bias(shared.bias))
        if experts.bias != moe.experts.bias:
            put(self.change, "moe.experts.bias", experts.bias)
        kind = "glu" if experts.gated else "mlp"
        if kind != moe.experts.kind:
            put(self.change, "moe.experts.kind", kind)

    def _misplaced(self, path: str) -> bool:
        """Whether the base's name for a leaf of the MoE block is not on disk and nothing renames to it."""
        if path == self.facts.selection_bias:
            return False
        renames = [raw for raw in plain(self.base.checkpoint.conversions) if "rename" in raw]
        kept = get(self.change, "checkpoint.conversions") is None
        return not (kept and any(str(raw["to"]).endswith(path) for raw in renames))

    def _attention(self, kind: Attention, plan: Plan) -> None:
        mixers_here = [layer.mixer for layer in plan.layers if isinstance(layer.mixer, GqaSpec)]
        if not mixers_here:
            if all(layer.mixer is not None for layer in plan.layers) and len(self.facts.attention) == 1:
                # Nothing of another mixer's holds for grouped queries.
                self.change["attention"] = {"kind": "gqa", "rope": {"style": "half"}, **gqa(kind)}
                self.change["layer_types"] = self.change.get("layer_types")
            return
        have, change = mixers_here[0], dict(self.change.get("attention") or {})
        for field, fact in (("qkv_bias", kind.qkv_bias), ("out_bias", kind.out_bias)):
            if getattr(have, field) != fact:
                change[field] = self._bias(fact)
        norm = have.qk_norm if have.qk_norm is not None and have.qk_norm.enabled else None
        if kind.norms is None and norm is not None and norm.weight:
            change["qk_norm"] = None
        elif kind.norms is not None and (
            norm is None or (norm.over, norm.q, norm.k) != tuple(kind.norms[k] for k in ("over", "q", "k"))
        ):
            change["qk_norm"] = {
                k: v for k, v in kind.norms.items() if k == "over" or v != f"{k}_norm" or norm is not None
            }
            if norm is not None:
                change["qk_norm"]["enabled"] = True
        if kind.path != have.path:
            change["path"] = kind.path
        usual = have.names
        names = {
            role: kind.names.get(role)
            for role in ("o", "qkv")
            if kind.names.get(role) != getattr(usual, role)
        }
        if names:
            change["names"] = names
        self._rename_projections(kind)
        if kind.sinks != have.sinks:
            change["sinks"] = kind.sinks
        for leaf in kind.rest:
            if leaf in _strings(plain(have)) or self._take_leaf(leaf, change, set(kind.rest)):
                continue
            if kind.gate is not None and kind.gate[0] == leaf:
                change["gate"] = {"function": "sigmoid", "over": kind.gate[1], "path": leaf}
        if have.gate is not None and have.gate.path is not None and have.gate.path not in kind.rest:
            change["gate"] = None
        if change:
            self.change["attention"] = change

    def _rename_projections(self, kind: Attention) -> None:
        """Projections have one name in the module tree; the checkpoint's are renamed to it."""
        kept = get(self.change, "checkpoint.conversions")
        rest = plain(self.base.checkpoint.conversions) if kept is None else kept
        more = [
            {"rename": f".{kind.path}.{name}", "to": f".{kind.path}.{role}_proj"}
            for role, name in kind.names.items()
            if role in "qkv" and len(role) == 1 and name != f"{role}_proj"
        ]
        if [each for each in more if each not in rest]:
            put(self.change, "checkpoint.conversions", [*rest, *more])

    def _bias(self, fact: bool) -> Any:
        key = next((key for key in _BIAS_KEYS if self.view.get(key) is fact), None)
        return {"from": key} if key else fact

    def _mlp_bias(self, fact: bool) -> Any:
        key = next((key for key in ("mlp_bias", "use_bias", "bias") if self.view.get(key) is fact), None)
        return {"from": key} if key else fact

    def _take_leaf(self, leaf: str, change: dict[str, Any], present: set[str]) -> bool:
        """Whether another family has a part with a module of this name, whose change is then taken over."""
        for reading in self.evidence.by_leaf.get(leaf, ()):
            section, _, field = reading.path.partition(".")
            of_kind = is_gqa(self.evidence.families[reading.family].attention)
            part = reading.value if isinstance(reading.value, dict) else {}
            names = {part[key] for key in ("path", "bias") if part.get(key) is not None}
            if section == "attention" and of_kind and names <= present:
                change[field] = reading.value
                self.taken[reading.path] = reading.family
                return True
        return False


def _strings(value: Any) -> set[str]:
    if isinstance(value, str):
        return {value}
    inner: Iterable[Any] = (
        value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    )
    return {text for each in inner for text in _strings(each)}
