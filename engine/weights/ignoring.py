"""Which of a checkpoint's tensors are ignored: what any checkpoint may carry, and what a family says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from math import prod

from mlx_experts.registry.resolve.planner import Plan
from mlx_experts.registry.spec.path_pattern import PathPattern

# What tools put in front of a text model's module paths.
WRAPPERS = frozenset({"language_model", "model", "text_model", "thinker", "transformer"})
# Buffers that are computed from the config; transformers never reads them from a file.
_BUFFERS = tuple(map(PathPattern, ("*rotary*inv_freq", "*rotary*.cos_cached", "*rotary*.sin_cached")))
# Heads that predict several tokens at once, which DeepSeek-V3 (arXiv:2412.19437, section 2.2) made common.
_PREDICTION_HEADS = PathPattern("mtp*")
EMPTY = "tensors without values"


class Ignored:
    """The rules by which tensors of one plan's checkpoints are ignored.

    Args:
        plan: the resolved family.
        layers: module path of the decoder layers.
        in_tree: gives a name on disk without its prefix.
        renamed: gives the name after the family's renaming conversions.
    """

    def __init__(
        self, plan: Plan, layers: str, in_tree: Callable[[str], str], renamed: Callable[[str], str]
    ) -> None:
        self._plan, self._in_tree, self._renamed = plan, in_tree, renamed
        self._rules = [PathPattern(rule) for rule in plan.checkpoint.ignore]
        numbered = plan.family.mtp is not None or plan.checkpoint.ignore_extra_layers
        self._beyond = f"{layers}.{{layer}} past the last layer" if numbered else ""
        # Of a prediction layer that is kept, the copies of the model's own tensors are not.
        copies = plan.prediction.ignore if plan.prediction is not None else ()
        self._copies = [PathPattern(f"{layers}.{plan.sizes.num_layers - 1}.{each}") for each in copies]
        self._layer = PathPattern(f"{layers}.{{layer}}.*")

    def rule(self, name: str) -> str | None:
        """The rule that ignores a tensor, in words, or None."""
        stripped = self._in_tree(name)
        for rule in self._rules:
            if rule.matches(name) or rule.matches(stripped):
                return rule.text
        for rule in _BUFFERS:
            if rule.matches(name):
                return rule.text
        for rule in self._copies:
            if rule.matches(stripped):
                return rule.text
        if self._plan.prediction is None and _PREDICTION_HEADS.matches(unwrapped(name)):
            return _PREDICTION_HEADS.text
        if self._beyond:
            match = self._layer.match(stripped) or self._layer.match(self._renamed(stripped))
            if match is not None and match.numbers["layer"] >= self._plan.sizes.num_layers:
                return self._beyond
        return None

    def sift(self, shapes: Mapping[str, tuple[int, ...]]) -> tuple[list[str], Counter[str]]:
        """Names of the tensors that no rule ignores, and how many each rule ignores.

        Args:
            shapes: shape of every tensor of a checkpoint, by name on disk.
        """
        kept: list[str] = []
        ignored: Counter[str] = Counter()
        for name, shape in shapes.items():
            rule = self.rule(name)
            if rule is not None:
                ignored[rule] += 1
            elif not prod(shape):
                # transformers writes the projections of a module of width 0, which is not built here.
                ignored[EMPTY] += 1
            else:
                kept.append(name)
        return kept, ignored


def unwrapped(path: str) -> str:
    """A path without the wrappers that tools put in front of a text model."""
    while (head := path.partition("."))[0] in WRAPPERS and head[2]:
        path = head[2]
    return path
