"""What a family file says of names: leaves of attention, the module above the head, places of norms."""

from __future__ import annotations

import re
from typing import Any

from mlx_experts.engine.tools.drafts.facts import Attention

PLACES = ("pre_mixer", "post_mixer", "pre_mlp", "post_mlp")
"""Where a decoder layer may have a norm."""


def gqa(kind: Attention) -> dict[str, Any]:
    made: dict[str, Any] = {"path": kind.path, "qkv_bias": kind.qkv_bias, "out_bias": kind.out_bias}
    names = {role: name for role, name in kind.names.items() if role in ("o", "qkv") and name != "o_proj"}
    if names:
        made["names"] = names
    if kind.norms is not None:
        made["qk_norm"] = kind.norms
    if kind.sinks is not None:
        made["sinks"] = kind.sinks
    return made


def holder(root: str, head: str) -> str:
    """The module that holds both the decoder and its head."""
    parts = []
    for a, b in zip(root.split(".")[:-1], head.split(".")[:-1], strict=False):
        if a != b:
            break
        parts.append(a)
    return ".".join(parts)


def by_words(names: list[str]) -> dict[str, str | None]:
    """Places of norms by what their names say."""
    places: dict[str, str | None] = dict.fromkeys(PLACES)
    if len(names) == 1:
        return {**places, "pre_mixer": names[0]}
    for name in names:
        mlp = bool(re.search(r"ffn|mlp|feedforward|feed_forward|_2$", name))
        post = bool(re.search(r"post|output|after", name))
        others = [n for n in names if n != name]
        before = any(re.search(r"pre\w*(mlp|ffn|feed)", n) for n in others)
        if (
            name == "post_attention_layernorm"
            and any(re.search("input|pre", n) for n in others)
            and not before
        ):
            mlp, post = True, False
        places[f"{'post' if post else 'pre'}_{'mlp' if mlp else 'mixer'}"] = name
    return places
