"""A conversion of a checkpoint's tensors: a module that is stored with the contrary sign, under another name.

The hook returns factories. A factory is called with the path and the options of the family file, and makes
the operation. `forward` says whether it found anything to do: a checkpoint in the tree's own form loads too.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mlx_experts.engine.weights.tensor_tree import StaysInPlace, Tensors, Tree
from mlx_experts.plugins.hookspecs import hookimpl
from mlx_experts.registry.spec.path_pattern import PathPattern

FAMILY = """
family: example_conversion
architectures: [ExampleConversionForCausalLM]
reference: examples/plugins/register_conversions.py
attention: {rope: half}
moe:
  router: {score: softmax, renormalize: true}
head: {tied: false}
checkpoint:
  conversions: [{plugin: negated, from: .self_attn.o_proj}]
"""


@dataclass(frozen=True)
class Negated(StaysInPlace):
    source: PathPattern

    def forward(self, tensors: Tensors, tree: Tree) -> bool:
        done = False
        for layer in range(tree.num_layers):
            module = self.source.fill({"layer": layer})
            if (stored := tensors.pop(f"{module}.negated", None)) is not None:
                tensors[f"{module}.weight"] = -stored
                done = True
        return done

    def backward(self, tensors: Tensors, tree: Tree) -> None:
        """Checkpoints of either form load, so the tree's own is written."""


def make_negated(source: str, options: Mapping[str, Any]) -> Negated:
    return Negated(PathPattern(source))


@hookimpl
def register_conversions() -> dict[str, Any]:
    return {"negated": make_negated}
