"""Config keys that a base does not read: read as other families read them, or as their names say."""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

from mlx_experts.engine.tools.drafts.changes import BY_NAME, Fitting
from mlx_experts.engine.tools.drafts.constants import node_at, stated
from mlx_experts.engine.tools.drafts.evidence import put
from mlx_experts.registry.errors import RegistryError
from mlx_experts.registry.resolve.planner import resolve

# What a key is for where its name says so; dense models use most of these words too.
WORDS = (
    (r"(moe_)?rout\w*_scal\w+|route_scale|scal\w+_rout\w+", "moe.router.scale"),
    (r"(moe_)?(norm|renorm)\w*_top_?k\w*|route_norm|renormalize\w*", "moe.router.renormalize.enabled"),
    (r"(moe_)?(router_)?(score|scoring|gating)_func\w*", "moe.router.score"),
    (r"embed\w*_(multiplier|scale)", "embedding.multiplier"),
    (r"residual_(multiplier|scale)", "block.residual_multiplier"),
    (r"attention_multiplier", "attention.scale"),
    (r"layer_rope_theta|rope_theta_per_layer", "attention.rope.layer_theta"),
    (r"logits_scaling", "head.divisor"),
    (r"logits?_scale", "head.multiplier"),
    (r"(final_)?logits?_soft_?cap\w*", "head.softcap"),
)
_TRIED = 6


def read_more(fitting: Fitting, unread: Iterable[str]) -> None:
    """Add to a fitting how keys are read that its base does not read.

    What several families do comes before what a key's name says, and that before what one does.
    """
    for key in unread:
        readings = fitting.evidence.reading(key)[:_TRIED]
        usual = Counter(each.path for each in fitting.evidence.by_key.get(key, ()))
        often = [each for each in readings if usual[each.path] > 1]
        ways = [(each.path, _of_key(each.path, each.value, key), each.family) for each in often]
        path = next((path for words, path in WORDS if re.fullmatch(words, key)), None)
        if path is not None and stated(node_at(fitting.family(), path), fitting.view) is None:
            ways.append((path, _by_name(path, fitting.view.get(key), key), BY_NAME))
        ways += [(e.path, _of_key(e.path, e.value, key), e.family) for e in readings if e not in often]
        for way, value, source in ways:
            if _holds(fitting, way, value):
                fitting.read[key] = (way, source)
                if source != BY_NAME:
                    fitting.taken[way] = source
                break


def _holds(fitting: Fitting, path: str, value: Any) -> bool:
    """Take a reading over, where the result can still be resolved."""
    parent, _, name = path.rpartition(".")
    node = node_at(fitting.family(), parent)
    if node is None or name not in type(node).model_fields:
        return False
    before = copy.deepcopy(fitting.change)
    put(fitting.change, path, value)
    try:
        resolve(fitting.family(), fitting.view.levels[-1])
    except (RegistryError, ValueError):
        fitting.change = before
        return False
    return True


def _by_name(path: str, value: Any, key: str) -> dict[str, Any]:
    return {"from": key, "per_layer": True} if isinstance(value, list) else {"from": key, **_fallback(path)}


def _of_key(path: str, value: dict[str, Any], key: str) -> dict[str, Any]:
    """Another family's reading of a key, without its further keys and its default."""
    kept = {k: v for k, v in value.items() if k not in ("from", "default", "if_null")}
    return {"from": key, **_fallback(path), **kept}


def _fallback(path: str) -> dict[str, Any]:
    """What a key that is left out means at a place."""
    if path.endswith(("multiplier", "scale", "rope.partial")):
        return {"default": 1.0}
    return {"default": 0.0} if path.endswith("softcap") else {}
