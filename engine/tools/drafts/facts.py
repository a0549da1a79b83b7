"""What the names and shapes of a checkpoint's tensors state of its family, whatever they are called.

Experts are told by their number, or by a first axis as long as the router's rows; the router by its shape;
MLPs by two matrices that widen and one that narrows. Only what cannot be told by shape is told by name.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from mlx_experts.engine.tools.drafts.original import Original
from mlx_experts.registry.catalog.config_view import ConfigView

Shape = tuple[int, ...]

EXPERT_KEYS = (
    "n_routed_experts",
    "num_experts",
    "num_local_experts",
    "moe_num_experts",
    "ffn_config.moe_num_experts",
)
WIDTH_KEYS = ("hidden_size", "d_model", "n_embd", "model_dim")
LAYER_KEYS = ("num_hidden_layers", "n_layers", "num_layers", "n_layer")
HEAD_KEYS = ("num_attention_heads", "n_heads", "n_head")

_IN_LIST = re.compile(r"(?P<list>[\w.]*?)\.(?P<layer>\d+)\.(?P<rest>.+)")
_NUMBERED = re.compile(r"(?P<path>[\w.]+?)\.(?P<expert>\d+)\.(?P<leaf>[\w.]+)")
_ATTENTION = re.compile(r"attn|attention|mixer|indexer|conv")
# Parts of a multimodal checkpoint that a text model does without.
_FOREIGN = re.compile(
    r"vis(ion|ual)|audio|projector|sep(e|a)rator|image|video|speech|talker|code2wav|adapt|sam_"
)
_GATE = re.compile(r"gate|^g_proj$|^wg$")
_CORRECTION = re.compile(r"correction|expert_bias|router_bias|score|balanc")
# Gate, up and down, as public checkpoints call them; without a gate the first is absent.
ROLES = (
    ("gate_proj", "up_proj", "down_proj"),
    ("w1", "w3", "w2"),
    ("w1", "v1", "w2"),
    ("gate", "up", "down"),
    ("linear", "linear_v", "linear_1"),
    ("wi_0", "wi_1", "wo"),
    ("fc1_gate", "fc1", "fc2"),
)
_Q = ("q_proj", "wq", "q", "query", "query_proj", "linear_q")
_K = ("k_proj", "wk", "k", "key", "key_proj", "linear_k")
_V = ("v_proj", "wv", "v", "value", "value_proj", "linear_v")
_O = ("o_proj", "out_proj", "dense", "wo", "o", "out", "proj", "output", "linear_out")
_QKV = ("qkv_proj", "Wqkv", "query_key_value", "qkv", "wqkv", "c_attn")
_QNORM = ("q_norm", "q_layernorm", "query_layernorm", "query_norm", "q_ln", "norm_q", "qnorm")
_KNORM = ("k_norm", "k_layernorm", "key_layernorm", "key_norm", "k_ln", "norm_k", "knorm")


@dataclass(frozen=True)
class Mlp:
    """Matrices that widen and narrow: gate, up and down, or up and down, or gate and up in one.

    Args:
        path: module that holds them, in its layer.
        names: leaves, gate first where there is one; the fused leaf and down where ``fused``.
        certain: whether the names say which of two equal shapes is the gate.
    """

    path: str
    names: tuple[str, ...]
    width: int
    fused: bool = False
    bias: bool = False
    certain: bool = True


@dataclass(frozen=True)
class Experts:
    """How the routed experts are stored.

    Args:
        layout: an entry of ``checkpoint.experts``.
        container: module path in the layer.
        width: their inner width.
        gated: whether there are gate and up.
        certain: whether names say which of gate and up is which.
    """

    layout: dict[str, Any]
    container: str
    width: int
    gated: bool
    bias: bool
    certain: bool


@dataclass(frozen=True)
class Attention:
    """Grouped-query attention, as one layer's tensors show it.

    Args:
        gate: the projection of a gate on the output, and whether it has a value for each `element` or `head`.
        rest: leaves that are none of the others.
    """

    path: str
    names: dict[str, str]
    qkv_bias: bool
    out_bias: bool
    norms: dict[str, Any] | None
    sinks: str | None
    rest: tuple[str, ...]
    q_rows: int
    gate: tuple[str, str] | None = None


@dataclass(frozen=True)
class Facts:
    """What is certain of a checkpoint.

    Args:
        prefix: module of the list of layers, such as `model.layers`.
        outside: tensors beside the layers: embedding, final norm and head, by role; absent roles are absent.
        layers: by index, the tensors of a decoder layer with their shapes.
        sparse: the layers that hold experts.
    """

    hidden: int
    prefix: str
    outside: dict[str, str]
    layers: dict[int, dict[str, Shape]]
    sparse: tuple[int, ...]
    num_experts: int = 0
    experts: Experts | None = None
    moe_path: str = ""
    router: str | None = None
    router_bias: bool = False
    selection_bias: str | None = None
    shared: Mlp | None = None
    shared_gate: str | None = None
    dense: Mlp | None = None
    norms: tuple[str, ...] = ()
    norm_bias: bool = False
    attention: tuple[Attention, ...] = ()
    latent: bool = False
    groups: tuple[str, ...] = ()
    heads: int = 0
    extra_layers: bool = False
    """Layers past the last one, which predict."""
    output_norm: str | None = None
    """A norm that only the layers with experts have."""
    norm_mean: float | None = None
    """The mean of a norm's weights, where values could be read."""
    flat_bias: bool = False
    """The selection bias is stored as one row of a matrix."""


def first_of(view: ConfigView, keys: Iterable[str]) -> Any:
    """The first value that is there."""
    return next((value for key in keys if (value := view.get(key)) is not None), None)


def read_facts(
    config: Mapping[str, Any], tensors: Mapping[str, Any], source: Original | None = None
) -> Facts:
    """Facts of a checkpoint; without tensors, only what its config says of sizes.

    Args:
        config: its config.json.
        tensors: its tensors, each with a shape.
        source: what transformers says, which may tell a gate from an up.
    """
    view = ConfigView(config, ("text_config", "llm_config", "language_config", "thinker_config.text_config"))
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    hidden = first_of(view, WIDTH_KEYS) or 0
    prefix = _layer_list(shapes)
    count = first_of(view, LAYER_KEYS)
    layers: dict[int, dict[str, Shape]] = defaultdict(dict)
    extra = False
    for name, shape in shapes.items():
        found = _IN_LIST.fullmatch(name)
        if not found or found["list"] != prefix:
            continue
        if isinstance(count, int) and int(found["layer"]) >= count:
            extra = True
        else:
            layers[int(found["layer"])][found["rest"]] = shape
    experts = first_of(view, EXPERT_KEYS)
    most = experts if isinstance(experts, int) else _counted(layers)
    outside = _outside(shapes, prefix, hidden)
    groups = tuple(sorted({_group(name, prefix) for name in shapes if _is_foreign(name, prefix, outside)}))
    heads = first_of(view, HEAD_KEYS)
    made = Facts(
        hidden,
        prefix,
        outside,
        dict(sorted(layers.items())),
        (),
        most,
        groups=groups,
        heads=heads if isinstance(heads, int) else 0,
        extra_layers=extra,
    )
    made = _with_layers(made)
    return made if source is None or source.gate_up is None else _told(made, source.gate_up)


def _told(facts: Facts, gate_up: tuple[str, str]) -> Facts:
    """Facts in which transformers' conversion table says which of two leaves is the gate."""
    experts = facts.experts
    leaves = () if experts is None else tuple(experts.layout.get("projections", ()))
    if experts is None or not set(gate_up) <= set(leaves) or len(leaves) != 3:
        return facts
    down = next(leaf for leaf in leaves if leaf not in gate_up)
    layout = {**experts.layout, "projections": [*gate_up, down]}
    return replace(facts, experts=replace(experts, layout=layout, certain=True))


def _with_layers(facts: Facts) -> Facts:
    sparse = tuple(i for i, tensors in facts.layers.items() if _experts(tensors, facts) is not None)
    dense_layers = [i for i in facts.layers if i not in sparse]
    dense = next((mlp for i in dense_layers for mlp in _mlps(facts.layers[i], facts.hidden)), None)
    mixers = {(kind := _attention(t, facts)) and kind.path: kind for t in facts.layers.values()}
    attention = tuple(each for each in mixers.values() if each is not None)
    latent = any("kv_a_proj_with_mqa" in name for t in facts.layers.values() for name in t)
    first = next(iter(facts.layers.values()), {})
    norms = tuple(
        name.removesuffix(".weight")
        for name, shape in first.items()
        if shape == (facts.hidden,) and name.endswith(".weight") and "." not in name.removesuffix(".weight")
    )
    facts = replace(
        facts,
        sparse=sparse,
        dense=dense,
        attention=attention,
        latent=latent,
        norms=norms,
        norm_bias=any(f"{name}.bias" in first for name in norms),
    )
    return facts if not sparse else _with_moe(facts, facts.layers[sparse[0]])


def _with_moe(facts: Facts, tensors: Mapping[str, Shape]) -> Facts:
    experts = _experts(tensors, facts)
    assert experts is not None
    count = facts.num_experts
    numbered = experts.layout["kind"] == "per_expert"
    flat = experts.layout["kind"] == "flat"
    inside = f"{experts.container}."
    own = {
        n: s
        for n, s in tensors.items()
        if not (numbered and _NUMBERED.fullmatch(n) and n.startswith(inside))
        and not (flat and n.startswith(inside))
    }
    matrices = [n for n, s in own.items() if s == (count, facts.hidden) and not _ATTENTION.search(n)]
    named = [n for n in matrices if re.search(r"gate|router|wg", n)] or matrices
    router = named[0].removesuffix(".weight") if named else None
    path = _common(experts.container, router)
    if numbered and path == experts.container:
        path = path.rpartition(".")[0]
    vectors = [n for n, s in own.items() if s in ((count,), (1, count)) and not _ATTENTION.search(n)]
    bias = f"{router}.bias"
    plain = bias in vectors and len(vectors) >= 1 and not _CORRECTION.search(bias.rpartition(".")[0])
    chosen = [n for n in vectors if n != bias and (_CORRECTION.search(n) or not plain)]
    stacked = {n for n in own if len(own[n]) == 3}
    rest = {n: s for n, s in own.items() if n not in stacked and not (router and n.startswith(f"{router}."))}
    shared = next(
        (m for m in _mlps(rest, facts.hidden) if facts.dense is None or m.path != facts.dense.path or path),
        None,
    )
    gates = [n for n, s in rest.items() if s == (1, facts.hidden)]
    dense = [layer for i, layer in facts.layers.items() if i not in facts.sparse]
    only = [
        n.removesuffix(".weight")
        for n, s in own.items()
        if s == (facts.hidden,)
        and n.count(".") == 1
        and "norm" in n
        and dense
        and all(n not in d for d in dense)
    ]
    return replace(
        facts,
        output_norm=only[0] if len(only) == 1 else None,
        experts=experts,
        moe_path=path,
        router=None if router is None else _below(router, path),
        router_bias=plain,
        selection_bias=_below(chosen[0], path) if chosen else None,
        flat_bias=bool(chosen) and own[chosen[0]] == (1, count),
        shared=None if shared is None else replace(shared, path=_beside(shared.path, path)),
        shared_gate=_below(gates[0].removesuffix(".weight"), path) if gates and shared else None,
    )


def _layer_list(shapes: Mapping[str, Shape]) -> str:
    """The list of modules that holds the experts, or the most tensors where nothing looks like one."""
    counts: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for name in shapes:
        found = _IN_LIST.fullmatch(name)
        if found and found["list"]:
            counts[found["list"]][0] += "expert" in found["rest"] or "router" in found["rest"]
            counts[found["list"]][1] += 1
    return max(counts, key=lambda each: tuple(counts[each]), default="")


def _counted(layers: Mapping[int, Mapping[str, Shape]]) -> int:
    """The number of experts that tensors are numbered for."""
    numbers = [
        int(found["expert"]) + 1
        for tensors in layers.values()
        for name in tensors
        if (found := _NUMBERED.fullmatch(name)) and "expert" in found["path"]
    ]
    return max(numbers, default=0)


def _outside(shapes: Mapping[str, Shape], prefix: str, hidden: int) -> dict[str, str]:
    """Embedding, final norm and head, by their shapes and where they stand."""
    root = prefix.rpartition(".")[0]
    single = {n.removesuffix(".weight"): s for n, s in shapes.items() if not _IN_LIST.fullmatch(n)}
    found: dict[str, str] = {}
    for name, shape in single.items():
        inside = not root or name.startswith(f"{root}.")
        if len(shape) == 2 and shape[1] == hidden and shape[0] > 2:
            role = "head" if re.search(r"head|^output$|unembed", name) else "embed" if inside else ""
            if role:
                found.setdefault(role, name)
        elif shape == (hidden,) and inside and not name.endswith(".bias"):
            found.setdefault("norm", name)
    return found


def _group(name: str, prefix: str) -> str:
    """The module beside the decoder that a tensor lies in."""
    root = prefix.rpartition(".")[0]
    outer = root.rpartition(".")[0]
    start = next((f"{each}." for each in (root, outer) if each and name.startswith(f"{each}.")), "")
    return start + name.removeprefix(start).split(".")[0]


def _is_foreign(name: str, prefix: str, outside: Mapping[str, str]) -> bool:
    bare = name.removesuffix(".weight").removesuffix(".bias")
    return bool(_FOREIGN.search(name)) and not name.startswith(f"{prefix}.") and bare not in outside.values()


def _common(container: str, router: str | None) -> str:
    """The module that holds both the experts and the router."""
    if router is None:
        return container.rpartition(".")[0]
    shared = []
    for a, b in zip(container.split("."), router.split("."), strict=False):
        if a != b:
            break
        shared.append(a)
    return ".".join(shared)


def _below(name: str, path: str) -> str:
    return name.removeprefix(f"{path}.") if path else name


def _beside(name: str, path: str) -> str:
    """A path from the MoE block, `../name` for one in the layer."""
    if not path or name == path:
        return name
    return name.removeprefix(f"{path}.") if name.startswith(f"{path}.") else f"../{name}"


def roles(leaves: Mapping[str, Shape]) -> tuple[tuple[str, ...], bool]:
    """Leaves as gate, up and down, and whether their names say so; shapes tell the one that narrows."""
    given = set(leaves)
    for known in ROLES:
        if given == set(known):
            return known, True
        if given == set(known[1:]):
            return known[1:], True
    shapes = list(leaves.values())
    down = [leaf for leaf, shape in leaves.items() if shapes.count(shape) == 1]
    last = down[0] if len(given) == 3 and len(down) == 1 else ""
    return (*sorted(given - {last}), *([last] if last else [])), False


def _mlps(tensors: Mapping[str, Shape], hidden: int) -> list[Mlp]:
    """Every MLP of a layer that has two or three matrices and is no attention."""
    held: dict[str, dict[str, Shape]] = defaultdict(dict)
    for name, shape in tensors.items():
        bare = name.removesuffix(".weight")
        path, _, leaf = bare.rpartition(".")
        if len(shape) == 2 and hidden in shape and 1 not in shape and not _ATTENTION.search(path.lower()):
            held[path][leaf] = shape
    found = []
    for path, leaves in held.items():
        by_name, certain = roles(leaves)
        widths = {leaf: s[0] for leaf, s in leaves.items() if s[1] == hidden}
        narrow = {leaf: s[1] for leaf, s in leaves.items() if s[0] == hidden}
        bias = any(f"{path}.{leaf}.bias" in tensors for leaf in leaves)
        if certain and len(leaves) == 3:
            width = leaves[by_name[2]][1]
            found.append(Mlp(path, by_name, width, bias=bias))
        elif len(leaves) == 2:
            for down, width in narrow.items():
                for up, rows in widths.items():
                    if up != down and rows in (width, 2 * width):
                        found.append(Mlp(path, (up, down), width, rows == 2 * width, bias))
                        break
                else:
                    continue
                break
        elif len(leaves) == 3 and len(narrow) >= 1:
            down = next((leaf for leaf in narrow if leaf not in widths), sorted(narrow)[0])
            ups = sorted(set(leaves) - {down})
            if all(leaves[u] == (leaves[down][1], hidden) for u in ups):
                found.append(Mlp(path, (*ups, down), leaves[down][1], bias=bias, certain=False))
    return found


def _experts(tensors: Mapping[str, Shape], facts: Facts) -> Experts | None:
    """The routed experts of a layer, in whichever spelling."""
    return _numbered(tensors) or _stacked(tensors, facts) or _flat(tensors, facts)


def _numbered(tensors: Mapping[str, Shape]) -> Experts | None:
    held: dict[str, dict[str, Shape]] = defaultdict(dict)
    bias: set[str] = set()
    for name, shape in tensors.items():
        found = _NUMBERED.fullmatch(name)
        if found is None:
            continue
        if found["leaf"].endswith("bias"):
            bias.add(found["path"])
        elif len(shape) == 2:
            held[found["path"]][found["leaf"].removesuffix(".weight")] = shape
    for path, leaves in held.items():
        names, certain = roles(leaves)
        if len(leaves) == 2 and not certain:
            # The one that narrows has the shape of the other, turned, or of its half.
            (a, sa), (b, sb) = leaves.items()
            up, down = (a, b) if sa[1] == sb[0] and sa[0] in (sb[1], 2 * sb[1]) else (b, a)
            fused = leaves[up][0] == 2 * leaves[down][1]
            layout: dict[str, Any] = {"kind": "per_expert", "path": path, "projections": [up, down]}
            if fused:
                layout["fused"] = "gate_up"
            return Experts(layout, path, leaves[down][1], fused, path in bias, not fused)
        if len(leaves) in (2, 3):
            layout = {"kind": "per_expert", "path": path, "projections": list(names)}
            width = leaves[names[-1]][1]
            return Experts(layout, path, width, len(leaves) == 3, path in bias, certain)
    return None


def _stacked(tensors: Mapping[str, Shape], facts: Facts) -> Experts | None:
    held: dict[str, dict[str, Shape]] = defaultdict(dict)
    for name, shape in tensors.items():
        if len(shape) == 3 and shape[0] == facts.num_experts and 1 not in shape:
            bare = name.removesuffix(".weight")
            path, _, leaf = bare.rpartition(".")
            held[path][leaf] = shape[1:]
    for path, leaves in held.items():
        suffix = "" if f"{path}.{next(iter(leaves))}" in tensors else ".weight"
        bias = any(
            n.startswith(f"{path}.") and "bias" in n and s[:1] == (facts.num_experts,) and len(s) == 2
            for n, s in tensors.items()
        )
        if len(leaves) == 2:
            (a, sa), (b, sb) = leaves.items()
            big, down = (a, b) if sa[0] * sa[1] > sb[0] * sb[1] or _narrows(b) else (b, a)
            (x, y), (c, d) = leaves[big], leaves[down]
            gated = x * y == 2 * c * d
            transposed = not (y == c and x in (d, 2 * d)) and x == d
            layout: dict[str, Any] = {"kind": "stacked", "path": path, "fused": big, "down": down}
            if transposed:
                layout["transposed"] = True
            if suffix:
                layout["suffix"] = suffix
            return Experts(layout, path, c if transposed else d, gated, bias, not gated)
        if len(leaves) == 3:
            names, certain = roles(leaves)
            down = names[2]
            layout = {"kind": "split", "path": path, "projections": list(names)}
            return Experts(layout, path, leaves[down][1], True, bias, certain)
    return None


def _narrows(leaf: str) -> bool:
    return bool(re.search(r"down|output|fc2|w2|out", leaf))


def _flat(tensors: Mapping[str, Shape], facts: Facts) -> Experts | None:
    held: dict[str, dict[str, Shape]] = defaultdict(dict)
    for name, shape in tensors.items():
        bare = name.removesuffix(".weight")
        path, _, leaf = bare.rpartition(".")
        rows = len(shape) == 2 and facts.num_experts and shape[0] > facts.num_experts
        if rows and shape[0] % facts.num_experts == 0 and shape[1] == facts.hidden and "expert" in path:
            held[path][leaf] = shape
    for path, leaves in held.items():
        names, certain = roles(leaves)
        if len(leaves) == 3 and len(set(leaves.values())) == 1:
            layout = {"kind": "flat", "path": path, "projections": list(names), "down_transposed": True}
            return Experts(layout, path, leaves[names[0]][0] // facts.num_experts, True, False, certain)
    return None


def _attention(tensors: Mapping[str, Shape], facts: Facts) -> Attention | None:
    """Grouped-query attention where a module holds q, k, v and o, or qkv and o."""
    held: dict[str, dict[str, Shape]] = defaultdict(dict)
    for name, shape in tensors.items():
        path, _, leaf = name.rpartition(".")
        module, _, last = path.rpartition(".")
        if leaf in ("weight", "bias") and module:
            held[module][f"{last}.{leaf}"] = shape
        elif path:
            held[path][leaf] = shape
    for path, leaves in held.items():
        names = {
            role: next((n for n in known if f"{n}.weight" in leaves), None)
            for role, known in (("q", _Q), ("k", _K), ("v", _V), ("o", _O), ("qkv", _QKV))
        }
        whole = all(names[r] for r in "qk") or names["qkv"]
        if not whole or not names["o"] or any("conv1d" in leaf or "A_log" in leaf for leaf in leaves):
            continue
        q = names["qkv"] or names["q"]
        used = {n for n in names.values() if n}
        qn, kn = (next((n for n in known if f"{n}.weight" in leaves), None) for known in (_QNORM, _KNORM))
        norms = None
        if qn and kn:
            over = "full" if leaves[f"{qn}.weight"] == (leaves[f"{q}.weight"][0],) else "head"
            norms = {"over": over, "q": qn, "k": kn}
        odd = (f"{qn}.weight", f"{kn}.weight")
        heads = facts.heads
        sinks = next(
            (
                n
                for n, s in leaves.items()
                if n not in odd
                and (("sink" in n and len(s) == 1) or (s == (heads,) and "." not in n and "bias" not in n))
            ),
            None,
        )
        rest = sorted({n.split(".")[0] for n in leaves} - used - {qn or "", kn or "", sinks or ""})
        inner = leaves[f"{names['o']}.weight"][1]
        widths: dict[Shape, str] = {(inner, facts.hidden): "element", (heads, facts.hidden): "head"}
        gates = ((n, widths.get(leaves.get(f"{n}.weight", ()))) for n in rest if _GATE.search(n))
        return Attention(
            path,
            {role: n for role, n in names.items() if n},
            f"{q}.bias" in leaves,
            f"{names['o']}.bias" in leaves,
            norms,
            sinks,
            tuple(rest),
            leaves[f"{q}.weight"][0],
            next(((n, over) for n, over in gates if over is not None), None),
        )
    return None
