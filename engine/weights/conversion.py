"""The whole way of a checkpoint's tensors into the module tree, as one family declares it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from mlx_experts.engine.weights import heads, spellings
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
from mlx_experts.engine.weights.ignoring import Ignored, unwrapped
from mlx_experts.engine.weights.tensor_tree import Operation, Tensors, Tree, put
from mlx_experts.plugins.manager import components
from mlx_experts.registry.errors import TensorError
from mlx_experts.registry.resolve.planner import Plan, Resolver
from mlx_experts.registry.spec.checkpoint import ExpertLayout, PerExpert, Stacked
from mlx_experts.registry.spec.path_pattern import PathPattern

# A prediction layer's tensors where checkpoints keep it apart.
_NUMBERED = PathPattern("layers.{layer}.*")


@dataclass
class Converted:
    """Tensors under module-tree names, and what happened on the way.

    Args:
        tensors: by parameter path.
        ignored: how many tensors each rule ignored, by rule.
        missing: how many optional parameters each rule filled with zeros, by rule.
        original: whether anything stood in an original layout (then stored offsets are undone).
        own_head: whether a tied model's checkpoint has a head that differs from the embedding.
    """

    tensors: Tensors
    ignored: Counter[str] = field(default_factory=Counter)
    missing: Counter[str] = field(default_factory=Counter)
    original: bool = False
    own_head: bool = False


class WeightConverter:
    """Converts checkpoints of one plan, and exports them again.

    Its rules are read from the plan. The shapes say how large a part is and that a name needs no change.

    Args:
        plan: the resolved family.
        shapes: shape of every parameter of the built model, before quantisation.
    """

    def __init__(self, plan: Plan, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.plan, self.spec = plan, plan.checkpoint
        self.layouts = plan.family.expert_layouts
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
            for op in self.spec.conversions
        ]
        if plan.prediction is not None:
            at = f"{self.layers}.{plan.decoder_layers}"
            self.ops += [
                RenameOperation(PathPattern(f"{at}.{old}.*"), PathPattern(f"{at}.{new}.*"))
                for old, new in plan.prediction.rename.items()
            ]
        self.ignored = Ignored(plan, self.layers, self._strip, self._renamed)
        self._in_layer = PathPattern(f"{self.layers}.{{layer}}.*")

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
        parameters: Mapping[str, mx.Dtype] | None = None,
    ) -> Decoded:
        """Undo the encodings that MLX has no module for; the arguments are those of ``decode_encodings``."""
        return decode_encodings(arrays, config, dtypes, dense, values, parameters)

    def ignore(self, tensors: Mapping[str, mx.array]) -> tuple[Tensors, Counter[str]]:
        """The tensors that no rule ignores, and how many each rule ignored, by rule."""
        kept, ignored = self.ignored.sift({name: value.shape for name, value in tensors.items()})
        return {name: tensors[name] for name in kept}, ignored

    def convert(self, tensors: Mapping[str, mx.array], *, values: bool = True) -> Converted:
        """From names on disk to the module tree, of tensors that no rule ignores.

        Args:
            values: whether the tensors hold values; without, only their shapes and dtypes are looked at.

        Raises:
            TensorError: a layout is incomplete or of the wrong shape, or two sources give one parameter.
        """
        result = Converted({})
        for name, value in tensors.items():
            put(result.tensors, self._strip(name), {"": value})
        done = [op.forward(result.tensors, self.tree) for op in self.ops]
        moved_experts = self._convert_all_experts(result)
        # Where there are kernels they alone tell: names and experts are also rearranged after a conversion.
        kernels = [
            moved
            for op, moved in zip(self.ops, done, strict=True)
            if isinstance(op, ConvOperation) and op.has_kernel(self.tree)
        ]
        result.original = any(kernels or [moved_experts, *done])
        self._ignore_unused(result)
        names = heads.HeadNames.of(self.plan)
        copies = heads.settle_tied(self.plan, names, self.tree, result.tensors, values)
        result.own_head = copies is None
        if copies:
            result.ignored[heads.COPY] += copies
        heads.borrow(self.plan, names, result.tensors)
        self._fill_optional(result)
        if values:
            heads.unit_columns(self.plan, names, result.tensors)
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

    def ignores(self, module: str) -> bool:
        """Whether a rule ignores the tensors of a module, as the checkpoint spells it."""
        return self.ignored.rule(f"{module}.weight") is not None

    def _spellings(self, path: str) -> list[str]:
        """The path itself, in the tree's wrapper, and without the wrappers that other tools put around it."""
        root, tail = self.plan.family.names.root, unwrapped(path)
        return [path, f"{self.wrapper}{path}", f"{self.wrapper}{root}.{tail}", f"{self.wrapper}{tail}"]

    def _of_experts(self, path: str) -> list[str]:
        """The stacked modules that hold what a declared layout keeps at ``path``, or the path itself."""
        match = self._in_layer.match(path)
        layer = match.numbers["layer"] if match else self.tree.num_layers
        stack = self.stack(layer) if layer < self.tree.num_layers else None
        if stack is not None and f"{path}.weight" not in self.tree.shapes:
            for layout in self._expert_layouts(stack):
                if modules := stacked_modules(layout, stack, path):
                    return modules
            if container := spellings.container_of(stack, f"{path}.weight"):
                return [f"{stack.container}{path.removeprefix(container)}"]
        return [path]

    def _expert_layouts(self, stack: ExpertStack) -> tuple[ExpertLayout, ...]:
        """The declared layouts and, where none of them is there already, the tree's own container, fused."""
        container = stack.container.removeprefix(f"{stack.layer}.")
        taken = any(isinstance(each, Stacked) and each.path == container for each in self.layouts)
        if taken or len(stack.leaves) == 2:
            return self.layouts
        return (*self.layouts, own_fused_layout(container))

    def _convert_all_experts(self, result: Converted) -> bool:
        """Bring every layer's experts into the tree; whether any stood elsewhere."""
        by_layer: dict[int, Tensors] = {}
        moved = False
        for name in list(result.tensors):
            if match := self._in_layer.match(name):
                by_layer.setdefault(match.numbers["layer"], {})[name] = result.tensors.pop(name)
        for i in range(self.tree.num_layers):
            stack = self.stack(i)
            if stack is not None:
                layer = by_layer.setdefault(i, {})
                moved |= convert_experts(self._expert_layouts(stack), stack, layer, self.tree)
                spellings.find_experts(stack, layer)
                spellings.find_selection_bias(self.plan.layers[i], stack.layer, layer)
        for layer in by_layer.values():
            result.tensors.update(layer)
        return moved

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
        if predicting := self._predicting(name):
            return predicting
        for prefix in self.spec.prefixes:
            if name.startswith(prefix):
                return self.wrapper + name[len(prefix) :]
        return name

    def _predicting(self, name: str) -> str | None:
        """The name of a prediction layer's tensor among the layers, where checkpoints keep it apart."""
        prediction = self.plan.prediction
        head, _, rest = unwrapped(name).partition(".")
        if prediction is None or head != prediction.path or not rest:
            return None
        # Further ones stand behind the first, where they are ignored.
        match = _NUMBERED.match(rest)
        behind, rest = (match.numbers["layer"], match.rest) if match else (0, rest)
        return f"{self.layers}.{self.plan.decoder_layers + behind}.{rest}"

    def _renamed(self, name: str) -> str:
        for op in self.ops:
            name = op.rename(name, self.tree) if isinstance(op, RenameOperation) else name
        return name

    def _ignore_unused(self, result: Converted) -> None:
        """Ignore declared modules in layers that the plan built without them."""
        for rule in map(PathPattern, self.spec.ignore_unused):
            for name in list(result.tensors):
                module = name.rpartition(".")[0]
                if rule.matches(module) and f"{module}.weight" not in self.tree.shapes:
                    del result.tensors[name]
                    result.ignored[f"{rule.text} where a layer has none"] += 1

    def _fill_optional(self, result: Converted) -> None:
        """Zeros for optional parameters, where all of one rule are missing."""
        for rule in map(PathPattern, self.spec.optional):
            names = [name for name in self.tree.shapes if rule.matches(name)]
            if not names or any(name in result.tensors for name in names):
                continue
            result.missing[rule.text] += len(names)
            for name in names:
                result.tensors[name] = mx.zeros(self.tree.shapes[name])

    def _original_values(self, tensors: Tensors) -> None:
        """Undo what original files store differently: zero-centred norms."""
        if self.plan.norm.offset == "load":
            for name in tensors:
                value = tensors[name]
                # The audit refuses anything but floats, which an addition would hide.
                floats = mx.issubdtype(value.dtype, mx.floating)
                if floats and name in self.tree.shapes and self._is_centred_norm(name):
                    tensors[name] = value + 1.0

    def _is_centred_norm(self, name: str) -> bool:
        parent, _, leaf = name.rpartition(".")
        module = parent.rsplit(".", 1)[-1]
        return leaf == "weight" and "norm" in module and not self._uncentred(parent)

    def _uncentred(self, module: str) -> bool:
        return any(PathPattern(rule).matches(module) for rule in self.plan.norm.uncentred)

    def export(self, tensors: Mapping[str, mx.array], expert_layout: int | None) -> Tensors:
        """From the module tree to names on disk: one declared expert layout, all conversions undone.

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
                    export_experts(self.layouts[expert_layout], stack, result, self.tree)
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
        heads.leave_out_copy(self.plan, heads.HeadNames.of(self.plan), result)
        if self.spec.save_as == "per_expert":
            layout = next(each for each in self.layouts if isinstance(each, PerExpert))
            for i in range(self.tree.num_layers):
                if (stack := self.stack(i)) is not None:
                    export_experts(layout, stack, result, self.tree)
        return result

    def _prefixed(self, name: str) -> str:
        return self.spec.prefixes[0] + name.removeprefix(self.wrapper)
