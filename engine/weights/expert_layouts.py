"""The layouts of routed experts: one by one, stacked and fused, stacked apart, or flat.

Legend: E experts, F expert width, D model width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlx_experts.engine.weights.conversion_ops import SplitOperation
from mlx_experts.engine.weights.tensor_tree import Tensors, Tree, gapless, module_tensors, name_of, put, take
from mlx_experts.registry.errors import TensorError
from mlx_experts.registry.spec import checkpoint as spec
from mlx_experts.registry.spec.path_pattern import PathPattern


@dataclass(frozen=True)
class ExpertStack:
    """Where one layer's experts live in the module tree.

    Args:
        layer: module path of the decoder layer.
        container: module path of the container.
        leaves: its projections: gate, up, down, or up, down when not gated.
        experts: E.
    """

    layer: str
    container: str
    leaves: tuple[str, ...]
    experts: int

    def module(self, i: int) -> str:
        """Module path of a projection, counted from the end: -1 down, -2 up, -3 gate."""
        return f"{self.container}.{self.leaves[i]}"


def convert_experts(
    layouts: tuple[spec.ExpertLayout, ...], stack: ExpertStack, tensors: Tensors, tree: Tree
) -> bool:
    """Bring one layer's experts into the module tree by the layout that fits; whether it was an original's.

    Raises:
        TensorError: a layout's tensors are there but incomplete, of the wrong shape, or two
            layouts of one name fit and only a declaration could tell them apart.
    """
    there = [layout for layout in layouts if _present(layout, stack, tensors)]
    fitting = [layout for layout in there if _fits(layout, stack, tensors, tree)]
    if there and not fitting:
        nearest = min(there, key=lambda layout: len(_faults(layout, stack, tensors, tree)))
        _explain(nearest, stack, tensors, tree)
    if len(fitting) > 1:
        raise TensorError(
            "two layouts fit these expert tensors, and their shapes cannot tell which it is",
            where=f"{stack.layer}.{fitting[0].path}",
            found=" and ".join(_words(layout) for layout in fitting),
            hint="convert the checkpoint with the tool that wrote it, or declare one layout only",
        )
    for layout in fitting:
        _FORWARD[type(layout)](layout, stack, tensors, tree)
    # Gate and up joined in the tree's own container is how MLX tools write; originals call it otherwise.
    return any(_base(layout, stack) != stack.container for layout in fitting)


def export_experts(layout: spec.ExpertLayout, stack: ExpertStack, tensors: Tensors, tree: Tree) -> None:
    """Write one layer's experts as a checkpoint of ``layout`` has them.

    Raises:
        TensorError: a projection is not there, so it would be missing from what is written.
    """
    absent = [
        name for name in map(stack.module, range(len(stack.leaves))) if not module_tensors(tensors, name)
    ]
    if absent:
        raise TensorError("the experts of a layer are not complete", where=", ".join(absent))
    _BACKWARD[type(layout)](layout, stack, tensors, tree)


def stacked_modules(layout: spec.ExpertLayout, stack: ExpertStack, path: str) -> list[str]:
    """The stacked modules that hold what ``layout`` keeps at ``path``; empty where none do."""
    leaves = [stack.module(i) for i in range(len(stack.leaves))]
    if isinstance(layout, spec.PerExpert):
        match = _one_by_one(layout, stack).match(path)
        if match is None or match.rest not in layout.projections:
            return []
        at, fused = layout.projections.index(match.rest), layout.fused is not None
    else:
        sources = _sources(layout, stack)
        if path not in sources:
            return []
        at, fused = sources.index(path), isinstance(layout, spec.Stacked)
    if not fused:
        return [leaves[at]]
    return leaves[:-1] if at == 0 else leaves[-1:]


def own_fused_layout(container: str) -> spec.Stacked:
    """The module tree's own container with gate and up joined, gate first, as some MLX tools write it."""
    return spec.Stacked(kind="stacked", path=container, suffix=".weight")


def _words(layout: spec.ExpertLayout) -> str:
    turned = " [in, out]" if isinstance(layout, spec.Stacked) and layout.transposed else ""
    return f"{layout.kind}{turned} at {layout.path}"


def _base(layout: spec.ExpertLayout, stack: ExpertStack) -> str:
    return f"{stack.layer}.{layout.path}" if layout.path else stack.layer


def _one_by_one(layout: spec.PerExpert, stack: ExpertStack) -> PathPattern:
    """The tensors of single experts; `*` is what follows an expert's number."""
    return PathPattern(f"{_base(layout, stack)}.{{expert}}.*")


def _sources(layout: spec.ExpertLayout, stack: ExpertStack) -> list[str]:
    base = _base(layout, stack)
    if isinstance(layout, spec.Stacked):
        return [f"{base}.{layout.fused}", f"{base}.{layout.down}"]
    return [f"{base}.{leaf}" for leaf in layout.projections]


def _stacked_tensors(tensors: Tensors, module: str) -> dict[str, str]:
    """Names of a stacked module's tensors; a raw tensor is its weight, `<name>_bias` its bias."""
    names = {s or "weight": name_of(module, s) for s in module_tensors(tensors, module)}
    if f"{module}_bias" in tensors:
        names["bias"] = f"{module}_bias"
    return names


def _present(layout: spec.ExpertLayout, stack: ExpertStack, tensors: Tensors) -> bool:
    if isinstance(layout, spec.PerExpert):
        return any(map(_one_by_one(layout, stack).matches, tensors))
    sources = _sources(layout, stack)
    if isinstance(layout, spec.Split) and sources == [stack.module(i) for i in range(len(stack.leaves))]:
        return False
    # A down projection may have the same name in the tree; what is fused or renamed decides.
    return bool(_stacked_tensors(tensors, sources[0]))


def _under(tensors: Tensors, base: str) -> list[str]:
    return [name for name in tensors if name.startswith(base + ".")]


def _expected(layout: spec.ExpertLayout, stack: ExpertStack, tree: Tree) -> Sequence[tuple[int, ...]]:
    """Unquantised weight shapes of the sources."""
    E, D, F = tree.shapes[stack.module(-1) + ".weight"]
    gated = len(stack.leaves) == 3
    if isinstance(layout, spec.Stacked):
        fused = 2 * F if gated else F
        return [(E, D, fused), (E, F, D)] if layout.transposed else [(E, fused, D), (E, D, F)]
    if isinstance(layout, spec.Flat):
        down = (E * F, D) if layout.down_transposed else (E * D, F)
        return [(E * F, D)] * (len(stack.leaves) - 1) + [down]
    return [(E, F, D)] * (len(stack.leaves) - 1) + [(E, D, F)]


def _fits(layout: spec.ExpertLayout, stack: ExpertStack, tensors: Tensors, tree: Tree) -> bool:
    return not _faults(layout, stack, tensors, tree)


def _faults(layout: spec.ExpertLayout, stack: ExpertStack, tensors: Tensors, tree: Tree) -> list[str]:
    """What keeps a layout from being used, in words; empty when it can be."""
    if isinstance(layout, spec.PerExpert):
        return _per_expert_faults(layout, stack, tensors)
    faults = []
    extra = isinstance(layout, spec.Stacked) and layout.extra_rows
    for i, (source, shape) in enumerate(
        zip(_sources(layout, stack), _expected(layout, stack, tree), strict=True)
    ):
        names = _stacked_tensors(tensors, source)
        if "weight" not in names:
            faults.append(f"{source} is missing")
            continue
        got, packed = tensors[names["weight"]].shape, "scales" in names
        if packed and isinstance(layout, spec.Stacked) and layout.transposed:
            faults.append(f"{source} is quantised along its output axis")
        if isinstance(layout, spec.Stacked) and layout.packed not in (None, packed):
            faults.append(f"{source} is {'' if packed else 'not '}quantised")
        want = shape[:-1] if packed else shape
        got = got[:-1] if packed else got
        if i == 0 and extra and got[:1] > want[:1]:
            got = (want[0], *got[1:])
        if got != want:
            faults.append(f"{names['weight']} has shape {list(got)}, expected {list(want)}")
        axes = 1 if isinstance(layout, spec.Flat) else 2
        for name in (names[suffix] for suffix in names if suffix not in ("weight", "global_scale")):
            its = tensors[name].shape
            enough = its[:1] == shape[:1] or (i == 0 and extra and its[:1] > shape[:1])
            if len(its) < axes or not enough:
                expected = f"[{shape[0]}, ...] in {axes} axes or more"
                faults.append(f"{name} has shape {list(its)}, expected {expected}")
    return faults


def _per_expert_faults(layout: spec.PerExpert, stack: ExpertStack, tensors: Tensors) -> list[str]:
    base = _base(layout, stack)
    if (count := len(_under(tensors, base))) < stack.experts:
        return [f"{base} has {count} tensors, fewer than the {stack.experts} experts of the config"]
    kinds: dict[str, set[str]] = {leaf: set() for leaf in layout.projections}
    for leaf in layout.projections:
        for e in range(stack.experts):
            kinds[leaf] |= set(module_tensors(tensors, f"{base}.{e}.{leaf}"))
    faults = []
    for leaf in layout.projections:
        for suffix in kinds[leaf] or {"weight"}:
            holes = [e for e in range(stack.experts) if f"{base}.{e}.{leaf}.{suffix}" not in tensors]
            if holes:
                shown = ", ".join(map(str, holes[:4])) + (" ..." if len(holes) > 4 else "")
                faults.append(
                    f"{base}.{{expert}}.{leaf}.{suffix} is missing for {len(holes)} of {stack.experts} "
                    f"experts: {shown}"
                )
                continue
            names = [f"{base}.{e}.{leaf}.{suffix}" for e in range(stack.experts)]
            dtypes = {tensors[name].dtype for name in names}
            if len(dtypes) > 1 and not all(mx.issubdtype(dtype, mx.floating) for dtype in dtypes):
                shown = ", ".join(sorted(str(dtype).removeprefix("mlx.core.") for dtype in dtypes))
                faults.append(f"{base}.{{expert}}.{leaf}.{suffix} is not of one dtype: {shown}")
            if len({tuple(tensors[name].shape) for name in names}) > 1:
                faults.append(f"{base}.{{expert}}.{leaf}.{suffix} is not of one shape in all experts")
    beyond = _beyond(layout, stack, tensors)
    if beyond and not layout.extra_experts:
        faults.append(f"{base} numbers experts up to {max(beyond)}, the config says {stack.experts}")
    return faults


def _beyond(layout: spec.PerExpert, stack: ExpertStack, tensors: Tensors) -> dict[int, list[str]]:
    """Tensors of experts past the last one, by the expert's number."""
    numbered = _one_by_one(layout, stack)
    found: dict[int, list[str]] = {}
    for name in tensors:
        if (match := numbered.match(name)) and match.numbers["expert"] >= stack.experts:
            found.setdefault(match.numbers["expert"], []).append(name)
    return found


def _explain(layout: spec.ExpertLayout, stack: ExpertStack, tensors: Tensors, tree: Tree) -> None:
    faults = _faults(layout, stack, tensors, tree)
    raise TensorError(
        f"the experts of a layer are not complete or not of the declared shape ({_words(layout)})",
        where=_base(layout, stack),
        found="\n".join(faults[:6]) + (f"\nand {len(faults) - 6} more" if len(faults) > 6 else ""),
        hint="get the missing files, or check that config.json belongs to these weights",
    )


def _from_per_expert(layout: spec.PerExpert, stack: ExpertStack, tensors: Tensors, tree: Tree) -> None:
    base = _base(layout, stack)
    for module, leaf in _per_expert_targets(layout, stack):
        each = [take(tensors, f"{base}.{e}.{leaf}") for e in range(stack.experts)]
        for suffix in each[0]:
            put(tensors, module, {suffix: mx.stack([values[suffix] for values in each])})
    for names in _beyond(layout, stack, tensors).values():
        for name in names:
            del tensors[name]
    if layout.fused:
        _halves(layout.fused, stack).forward(tensors, tree)


def _per_expert_targets(layout: spec.PerExpert, stack: ExpertStack) -> list[tuple[str, str]]:
    """Stacked module and disk leaf of each projection."""
    modules = [stack.module(i) for i in range(len(stack.leaves))]
    if layout.fused:
        modules = [_whole(stack), modules[-1]]
    return list(zip(modules, layout.projections, strict=True))


def _to_per_expert(layout: spec.PerExpert, stack: ExpertStack, tensors: Tensors, tree: Tree) -> None:
    base = _base(layout, stack)
    if layout.fused:
        _halves(layout.fused, stack).backward(tensors, tree)
    for module, leaf in _per_expert_targets(layout, stack):
        for suffix, value in take(tensors, module).items():
            for e in range(stack.experts):
                put(tensors, f"{base}.{e}.{leaf}", {suffix: value[e]})


def _take_stacked(tensors: Tensors, module: str) -> dict[str, mx.array]:
    return {suffix: tensors.pop(name) for suffix, name in _stacked_tensors(tensors, module).items()}


def _turn(values: dict[str, mx.array], turn: bool) -> dict[str, mx.array]:
    """Matrices as [out, in]; views, so that a half is copied and never the whole as well."""
    return {p: v.swapaxes(-1, -2) if turn and p == "weight" else v for p, v in values.items()}


def _copied(values: dict[str, mx.array]) -> dict[str, mx.array]:
    return {suffix: gapless(value) for suffix, value in values.items()}


def _from_stacked(layout: spec.Stacked, stack: ExpertStack, tensors: Tensors, tree: Tree) -> None:
    fused, down = (_take_stacked(tensors, source) for source in _sources(layout, stack))
    fused, down = (_turn(values, layout.transposed) for values in (fused, down))
    fused = {p: v[: stack.experts] for p, v in fused.items()}
    put(tensors, stack.module(-1), _copied(down))
    if len(stack.leaves) == 2:
        put(tensors, stack.module(0), _copied(fused))
        return
    scale = fused.get("global_scale")
    if scale is not None and scale.ndim == 2:
        # One scale for each half: gate's and up's tensors were quantised apart.
        del fused["global_scale"]
        put(tensors, stack.module(0), {"global_scale": scale[:, 0]})
        put(tensors, stack.module(1), {"global_scale": scale[:, 1]})
    put(tensors, _whole(stack), fused)
    _halves(layout.order, stack).forward(tensors, tree)


def _whole(stack: ExpertStack) -> str:
    return f"{stack.container}.__fused__"


def _halves(order: str, stack: ExpertStack) -> SplitOperation:
    first = (0, 1) if order != "up_gate" else (1, 0)
    targets = tuple(PathPattern(stack.module(i)) for i in first)
    return SplitOperation(PathPattern(_whole(stack)), targets, order == "interleaved")


def _to_stacked(layout: spec.Stacked, stack: ExpertStack, tensors: Tensors, tree: Tree) -> None:
    fused_name, down_name = _sources(layout, stack)
    down = take(tensors, stack.module(-1))
    if len(stack.leaves) == 2:
        fused = take(tensors, stack.module(0))
    else:
        _halves(layout.order, stack).backward(tensors, tree)
        fused = take(tensors, _whole(stack))
    for name, values in ((fused_name, fused), (down_name, down)):
        for suffix, value in _turn(values, layout.transposed).items():
            if suffix == "bias":
                tensors[f"{name}_bias"] = value
            elif set(values) <= {"weight", "bias"} and not layout.suffix:
                tensors[name] = value
            else:
                tensors[f"{name}.{suffix}"] = value


def _from_split(layout: spec.Split, stack: ExpertStack, tensors: Tensors, tree: Tree) -> None:
    for i, source in enumerate(_sources(layout, stack)):
        put(tensors, stack.module(i), _take_stacked(tensors, source))


def _to_split(layout: spec.Split, stack: ExpertStack, tensors: Tensors, tree: Tree) -> None:
    for i, source in enumerate(_sources(layout, stack)):
        put(tensors, source, take(tensors, stack.module(i)))


def _from_flat(layout: spec.Flat, stack: ExpertStack, tensors: Tensors, tree: Tree) -> None:
    for i, source in enumerate(_sources(layout, stack)):
        values = _take_stacked(tensors, source)
        down = i == len(layout.projections) - 1
        for suffix, value in values.items():
            cube = mx.unflatten(value, 0, (stack.experts, -1))
            put(
                tensors,
                stack.module(i),
                {suffix: gapless(cube.swapaxes(-1, -2)) if down and layout.down_transposed else cube},
            )


def _to_flat(layout: spec.Flat, stack: ExpertStack, tensors: Tensors, tree: Tree) -> None:
    for i, source in enumerate(_sources(layout, stack)):
        down = i == len(layout.projections) - 1
        for suffix, value in take(tensors, stack.module(i)).items():
            turned = value.swapaxes(-1, -2) if down and layout.down_transposed else value
            tensors[source if suffix == "weight" else f"{source}.{suffix}"] = turned.flatten(0, 1)


_Carry = Callable[[Any, ExpertStack, Tensors, Tree], None]
_FORWARD: dict[type, _Carry] = {
    spec.PerExpert: _from_per_expert,
    spec.Stacked: _from_stacked,
    spec.Split: _from_split,
    spec.Flat: _from_flat,
}
_BACKWARD: dict[type, _Carry] = {
    spec.PerExpert: _to_per_expert,
    spec.Stacked: _to_stacked,
    spec.Split: _to_split,
    spec.Flat: _to_flat,
}
