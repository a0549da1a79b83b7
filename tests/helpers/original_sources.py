"""What the text of transformers' modeling files says of a router, where no random checkpoint could show it.

Epsilons of 1e-20, the type of the router's product and the score of a group that holds every expert change
nothing that a tiny float32 model computes. They stand in the source in a few forms, which are read here.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path

import class_plans
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from mlx_experts.registry.spec.family import Family

_WIDE = r"\.(?:float\(\)|type\(torch\.float32\)|to\(torch\.float32\))"
_PRODUCT = re.compile(rf"F\.linear\(\s*hidden_states(?P<wide>{_WIDE})?, self\.(?:\w+\.)?weight(?:{_WIDE})?\)")
_EPSILON = re.compile(r"\.sum\(\s*(?:dim=)?-1, keepdim=True\)\s*\+\s*([0-9.]+(?:e-?[0-9]+)?)")
_BEST_TWO = re.compile(
    r"\.topk\(2, dim=-1\)\[0\]\s*\.sum\(|\.topk\(2, dim=-1\)\[0\]\.sum|\.topk\(2, dim=-1\)\[0\]"
)
_BEST = re.compile(r"\.max\(dim=-1\)\.values|\.amax\(")
_EXCLUDED = re.compile(r"masked_fill\(\s*~score_mask\.bool\(\), (0\.0|float\(\"-inf\"\)|float\('-inf'\))\)")


@functools.cache
def source(model_type: str) -> str:
    """The modeling file of a model type."""
    import importlib

    module = importlib.import_module(CONFIG_MAPPING[model_type].__module__)
    assert module.__file__ is not None
    path = Path(module.__file__)
    file = path.with_name(path.name.replace("configuration_", "modeling_"))
    return file.read_text(encoding="utf-8") if file.exists() else ""


def contradictions(family: Family, model_type: str) -> list[str]:
    """What a family's router says otherwise than the source of a model type, as far as it can be read."""
    text, router, found = source(model_type), family.moe.router, []
    products = {match["wide"] is not None for match in _PRODUCT.finditer(text)}
    if len(products) == 1 and router.kind == "standard":
        want = "float32" if products.pop() else "model"
        if router.dtype != want:
            found.append(f"the router's product is in {want}, not {router.dtype}")
    epsilons = {float(each) for each in _EPSILON.findall(text)}
    scaled = router.renormalize
    if epsilons and scaled is not None and isinstance(scaled.eps, float) and scaled.eps not in epsilons:
        found.append(f"the epsilon is one of {sorted(epsilons)}, not {scaled.eps}")
    groups = router.groups
    if groups is not None:
        words = {"top2": bool(_BEST_TWO.search(text)), "max": bool(_BEST.search(text))}
        if any(words.values()) and not words[groups.score]:
            found.append(f"a group's score is not '{groups.score}'")
        masks = {match[1] == "0.0" for match in _EXCLUDED.finditer(text)}
        # A softmax is above zero everywhere, so that a score of zero is never picked there either.
        if len(masks) == 1 and router.score == "sigmoid" and (groups.excluded == "zero") != masks.pop():
            found.append(f"experts of other groups are not '{groups.excluded}'")
    return found


def check(family: Family) -> None:
    """Raises AssertionError where a source contradicts the family."""
    for model_type in class_plans.source_types(family):
        odd = contradictions(family, model_type)
        assert not odd, f"{model_type}: {odd}"
