"""The whole way of a checkpoint's tensors into the module tree, as one family declares it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from mlx_experts.engine.weights.audit import collapse
from mlx_experts.engine.weights.conversion_ops import ConvOperation, RenameOperation, make_operation
from mlx_experts.engine.weights.dequantize import Decoded, decode_encodings
from mlx_experts.engine.weights.expert_layouts import (
    ExpertStack,
    convert_experts,
    export_experts,
    own_fused_layout,
    stacked_modules,
)
from mlx_experts.engine.weights.tensor_tree import Operation, Tensors, Tree, planes, put, take
from mlx_experts.plugins.manager import components
from mlx_experts.registry.errors import TensorError
from mlx_experts.registry.resolve.planner import Plan, Resolver
from mlx_experts.registry.spec.checkpoint import ExpertLayout, PerExpert, Stacked

# Rounding to bfloat16 moves the length of a column of length one by less than this.
_UNIT_TOLERANCE = 0.01
# What tools put in front of a text model's module paths.
_WRAPPERS = frozenset({"language_model", "model", "text_model", "thinker"})


@dataclass
class Converted:
    """Tensors under module-tree names, and what happened on the way.

    Args:
        tensors: by parameter path.
        dropped: how many tensors each drop rule took, by rule.
        lacking: how many parameters each rule of what may lack filled with zeros, by rule.
        original: whether anything stood in an original layout (then stored offsets are undone).
    """

    tensors: Tensors
    dropped: Counter[str] = field(default_factory=Counter)
    lacking: Counter[str] = field(default_factory=Counter)
    original: bool = False


class WeightConverter:
    """Carries checkpoints of one plan.

    Args:
        plan: the resolved family.
        shapes: shape of every parameter of the built model, before quantisation.
    """

    def __init__(self, plan: Plan, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.plan, self.spec = plan, plan.family.layouts
        names = plan.family.names
        self.wrapper = names.wrapper + "." if names.wrapper else ""
        self.layers = f"{self.wrapper}{names.root}.{names.layers}"
        self.tree = Tree(
            shapes,
            plan.sizes.num_layers,
            {i: plan.layers[i].sizes.num_experts for i in plan.moe_layers},
        )
        resolver = Resolver(plan.family.family, plan.config)
        self.ops: list[Operation] = [
            make_operation(
                op,
                lambda value: resolver.value(value, 0),
                lambda name: components().get("layout operation", name),
            )
            for op in self.spec.ops
        ]
        self._drops = [(rule, _pattern(rule)) for rule in self.spec.drop]
        self._layer = re.compile(re.escape(self.layers) + r"\.(\d+)\.")

    def stack(self, i: int) -> ExpertStack | None:
        """Where layer ``i`` keeps its experts, or None where it has none."""
        layer = self.plan.layers[i]
        if layer.moe is None:
            return None
        at = f"{self.layers}.{i}"
        path = f"{layer.moe.path}." if layer.moe.path else ""
        leaves = ("gate_proj", "up_proj", "down_proj") if layer.moe.experts.kind == "glu" else ("fc1", "fc2")
        return ExpertStack(at, f"{at}.{path}{layer.moe.experts.path}", leaves, layer.sizes.num_experts)

    def decode(
        self,
        arrays: Mapping[str, mx.array],
        config: Mapping[str, Any],
        dtypes: Mapping[str, str] | None = None,
        dense: mx.Dtype = mx.bfloat16,
        *,
        values: bool = True,
    ) -> Decoded:
        """Undo the encodings that MLX has no module for; the arguments are those of ``decode_encodings``."""
        return decode_encodings(arrays, config, dtypes, dense, values)

    def sift(self, tensors: Mapping[str, mx.array]) -> tuple[Tensors, Counter[str]]:
        """The tensors that no rule drops, and how many each rule dropped, by rule."""
        kept: Tensors = {}
        dropped: Counter[str] = Counter()
        for name, value in tensors.items():
            rule = self._dropped_by(name, self._strip(name))
            if rule is not None:
                dropped[rule] += 1
            elif value.size == 0:
                # transformers writes the projections of a module of width 0, which is not built here.
                dropped["tensors without values"] += 1
            else:
                kept[name] = value
        return kept, dropped

    def load(self, tensors: Mapping[str, mx.array], *, compare_values: bool = True) -> Converted:
        """From names on disk to the module tree.

        Args:
            compare_values: compare a redundant head with the embedding; False where only shapes are known.

        Raises:
            TensorError: a layout is incomplete or of the wrong shape, or two sources give one parameter.
        """
        kept, dropped = self.sift(tensors)
        result = Converted({}, dropped)
        for name, value in kept.items():
            put(result.tensors, self._strip(name), {"": value})
        done = [op.forward(result.tensors, self.tree) for op in self.ops]
        carried = self._convert_all_experts(result)
        # Where there are kernels they alone tell: names and experts are also rearranged after a conversion.
        kernels = [
            moved
            for op, moved in zip(self.ops, done, strict=True)
            if isinstance(op, ConvOperation) and op.has_kernel(self.tree)
        ]
        result.original = any(kernels or [carried, *done])
        self._drop_unused(result)
        self._tied_head(result, compare_values)
        self._borrowed_head(result.tensors)
        self._fill_lacking(result)
        self._normalise_head(result.tensors)
        if result.original:
            self._original_values(result.tensors)
        return result

    def modules(self, path: str) -> list[str]:
        """Module paths in the tree that a declared one stands for; empty where there is none.

        Args:
            path: spelled as on disk or as in the tree, with or without the wrapper's prefix.
        """
        for spelled in self._spellings(path):
            found = [self._strip(spelled)]
            for op in self.ops:
                found = [new for old in found for new in op.modules(old, self.tree)]
            found = [new for old in found for new in self._of_experts(old)]
            if all(f"{module}.weight" in self.tree.shapes for module in found):
                return found
        return []

    def drops(self, module: str) -> bool:
        """Whether a declared rule drops the tensors of a module, as the checkpoint spells it."""
        name = f"{module}.weight"
        return self._dropped_by(name, self._strip(name)) is not None

    def _spellings(self, path: str) -> list[str]:
        """The path itself, in the tree's wrapper, and without the wrappers that other tools put around it."""
        names, tail = self.plan.family.names, path
        while (head := tail.partition("."))[0] in _WRAPPERS and head[2]:
            tail = head[2]
        return [path, f"{self.wrapper}{path}", f"{self.wrapper}{names.root}.{tail}", f"{self.wrapper}{tail}"]

    def _of_experts(self, path: str) -> list[str]:
        """The stacked modules that hold what a declared layout keeps at ``path``, or the path itself."""
        match = self._layer.match(path)
        stack = self.stack(int(match[1])) if match and int(match[1]) < self.tree.num_layers else None
        if stack is not None and f"{path}.weight" not in self.tree.shapes:
            for layout in self._expert_layouts(stack):
                if modules := stacked_modules(layout, stack, path):
                    return modules
        return [path]

    def _expert_layouts(self, stack: ExpertStack) -> tuple[ExpertLayout, ...]:
        """The declared layouts and, where none of them is there already, the tree's own container, fused."""
        container = stack.container.removeprefix(f"{stack.layer}.")
        taken = any(isinstance(each, Stacked) and each.path == container for each in self.spec.experts)
        if taken or len(stack.leaves) == 2:
            return self.spec.experts
        return (*self.spec.experts, own_fused_layout(container))

    def _convert_all_experts(self, result: Converted) -> bool:
        """Bring every layer's experts into the tree; whether any stood elsewhere."""
        by_layer: dict[int, Tensors] = {}
        carried = False
        for name in list(result.tensors):
            if match := self._layer.match(name):
                by_layer.setdefault(int(match[1]), {})[name] = result.tensors.pop(name)
        for i in range(self.tree.num_layers):
            stack = self.stack(i)
            if stack is not None:
                layer = by_layer.setdefault(i, {})
                carried |= convert_experts(self._expert_layouts(stack), stack, layer, self.tree)
        for layer in by_layer.values():
            result.tensors.update(layer)
        return carried

    def check_experts(self, tensors: Mapping[str, mx.array]) -> None:
        """Every projection of every layer's experts must have a tensor.

        Raises:
            TensorError: naming those that have none.
        """
        stacks = (self.stack(i) for i in range(self.tree.num_layers))
        modules = [s.module(leaf) for s in stacks if s is not None for leaf in range(len(s.leaves))]
        wanted = [f"{module}.weight" for module in modules if f"{module}.weight" in self.tree.shapes]
        absent = [name for name in wanted if name not in tensors]
        if absent:
            raise TensorError(
                "experts are missing",
                where=", ".join(collapse(absent)),
                hint="get the missing files, or check that config.json belongs to these weights",
            )

    def _strip(self, name: str) -> str:
        for prefix in self.spec.prefixes:
            if name.startswith(prefix):
                return self.wrapper + name[len(prefix) :]
        return name

    def _dropped_by(self, name: str, renamed: str) -> str | None:
        for rule, pattern in self._drops:
            if pattern.fullmatch(name) or pattern.fullmatch(renamed):
                return rule
        if self.spec.drop_extra_layers:
            if not (match := self._layer.match(renamed)):
                for op in self.ops:
                    renamed = op.rename(renamed, self.tree) if isinstance(op, RenameOperation) else renamed
                match = self._layer.match(renamed)
            if match and int(match[1]) >= self.tree.num_layers:
                return f"{self.layers}.{{layer}} past the last layer"
        return None

    def _drop_unused(self, result: Converted) -> None:
        """Drop declared modules from layers that the plan built without them."""
        for rule in self.spec.drop_unused:
            pattern = _pattern(rule)
            for name in list(result.tensors):
                module = name.rpartition(".")[0]
                if pattern.fullmatch(module) and f"{module}.weight" not in self.tree.shapes:
                    del result.tensors[name]
                    result.dropped[f"{rule} where a layer has none"] += 1

    def _tied_head(self, result: Converted, compare: bool) -> None:
        """Drop a redundant copy of a tied head, and refuse one that differs."""
        sizes = self.plan.sizes
        if not self.plan.head.tied:
            return
        base, embed = (f"{module}." for module in self._head_and_embedding())
        # A plugin's embedding holds the tokens' matrix somewhere inside.
        whole = (sizes.vocab_size, sizes.hidden_size)
        found = [n for n, shape in self.tree.shapes.items() if n.startswith(embed) and shape == whole]
        embed = found[0].removesuffix("weight") if found else embed
        for name in [n for n in result.tensors if n.startswith(base) and n not in self.tree.shapes]:
            twin = embed + name[len(base) :]
            other = result.tensors.get(twin)
            value = result.tensors[name]
            if other is None or not _same(other, value, compare):
                raise TensorError(
                    "the config ties the head to the embedding, and the checkpoint holds another head",
                    where=name,
                    expected=f"the same values as {twin}, or no head",
                    hint="set `tie_word_embeddings` to false in config.json if the head is its own",
                )
            del result.tensors[name]
            result.dropped["head equal to the tied embedding"] += 1

    def _borrowed_head(self, tensors: Tensors) -> None:
        """Give a head of its own, where the checkpoint has none, what the embedding has."""
        head, embedding = self._head_and_embedding()
        if self.plan.head.embedding_if_absent and not planes(tensors, head):
            put(tensors, head, planes(tensors, embedding))

    def _head_and_embedding(self) -> tuple[str, str]:
        names = self.plan.family.names
        return f"{self.wrapper}{self.plan.head.path}", f"{self.wrapper}{names.root}.{names.embed}"

    def _fill_lacking(self, result: Converted) -> None:
        """Zeros for parameters that a family declares some checkpoints lack, where all of them are absent."""
        for rule in self.spec.may_lack:
            pattern = _pattern(rule)
            names = [name for name in self.tree.shapes if pattern.fullmatch(name)]
            if not names or any(name in result.tensors for name in names):
                continue
            result.lacking[rule] += len(names)
            for name in names:
                result.tensors[name] = mx.zeros(self.tree.shapes[name])

    def _original_values(self, tensors: Tensors) -> None:
        """Undo what original files store differently: zero-centred norms."""
        if self.plan.norm.offset == "load":
            for name in tensors:
                if name in self.tree.shapes and self._is_centred_norm(name):
                    tensors[name] = tensors[name] + 1.0

    def _normalise_head(self, tensors: Tensors) -> None:
        """Columns of length one for a head that is declared so; one that has them already stays as it is."""
        name = f"{self.wrapper}{self.plan.head.path}.weight"
        head = tensors.get(name)
        if not self.plan.head.normalise_columns or head is None or not mx.issubdtype(head.dtype, mx.floating):
            return
        value = head.astype(mx.float32)
        lengths = mx.linalg.norm(value, axis=0, keepdims=True)
        if mx.any(mx.abs(lengths - 1) > _UNIT_TOLERANCE).item():
            tensors[name] = (value / (lengths + 1e-7)).astype(head.dtype)

    def _is_centred_norm(self, name: str) -> bool:
        parent, _, leaf = name.rpartition(".")
        module = parent.rsplit(".", 1)[-1]
        return leaf == "weight" and "norm" in module and not self._uncentred(parent)

    def _uncentred(self, module: str) -> bool:
        return any(_pattern(p).fullmatch(module) for p in self.plan.family.norm.uncentred)

    def save(self, tensors: Mapping[str, mx.array], expert_layout: int | None) -> Tensors:
        """From the module tree to names on disk: one declared expert layout, all operations undone.

        Args:
            expert_layout: index into the family's expert layouts; None keeps the tree's.
        """
        result = dict(tensors)
        if self.plan.norm.offset == "load":
            for name in result:
                if self._is_centred_norm(name):
                    result[name] = result[name] - 1.0
        if expert_layout is not None:
            for i in range(self.tree.num_layers):
                stack = self.stack(i)
                if stack is not None:
                    export_experts(self.spec.experts[expert_layout], stack, result, self.tree)
        for op in reversed(self.ops):
            op.backward(result, self.tree)
        if self.spec.prefixes:
            result = {self._prefixed(name): value for name, value in result.items()}
        return result

    def written(self, tensors: Mapping[str, mx.array]) -> Tensors:
        """The module tree's tensors as this package writes them.

        Experts stand one by one where that is declared; a head that is the embedding does not stand there.
        """
        result = dict(tensors)
        if self.plan.head.embedding_if_absent:
            head, embedding = (planes(result, module) for module in self._head_and_embedding())
            if head.keys() == embedding.keys() and all(_same(head[p], embedding[p], True) for p in head):
                take(result, self._head_and_embedding()[0])
        if self.spec.save_as == "per_expert":
            layout = next(each for each in self.spec.experts if isinstance(each, PerExpert))
            for i in range(self.tree.num_layers):
                if (stack := self.stack(i)) is not None:
                    export_experts(layout, stack, result, self.tree)
        return result

    def _prefixed(self, name: str) -> str:
        return self.spec.prefixes[0] + name.removeprefix(self.wrapper)


def _same(a: mx.array, b: mx.array, compare: bool) -> bool:
    return a.shape == b.shape and (not compare or bool(mx.array_equal(a, b).item()))


def _pattern(rule: str) -> re.Pattern[str]:
    text = re.escape(rule).replace(re.escape("{layer}"), r"\d+").replace(re.escape("{expert}"), r"\d+")
    return re.compile(text.replace(re.escape("*"), ".*"))
