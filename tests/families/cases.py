"""The carried reference cases: tiny checkpoints with the original implementations' answers."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

CASES = Path(__file__).parent.parent / "cases"
TOLERANCE = 1e-4


@dataclass(frozen=True)
class View:
    """One way to meet a case: tensors in one layout, config in one spelling."""

    case: Path
    name: str

    @property
    def id(self) -> str:
        """family/variant-view"""
        return f"{self.case.parent.name}/{self.case.name}-{self.name}"

    def config_file(self) -> Path:
        """The config.json of the view."""
        return {
            "hub": self.case / "hub" / "config.json",
            "hub+v5": self.case / "hub" / "config.transformers.json",
            "fused": self.case / "fused" / "config.json",
        }[self.name]

    def folder(self, scratch: Path) -> Path:
        """A checkpoint folder of the view; hub+v5 is put together from links."""
        if self.name != "hub+v5":
            return self.case / self.name
        (scratch / "config.json").symlink_to(self.config_file())
        (scratch / "model.safetensors").symlink_to(self.case / "hub" / "model.safetensors")
        return scratch


def all_views() -> list[View]:
    """Every view of every carried case."""
    views = []
    for meta in sorted(CASES.glob("*/*/case.json")):
        for name in ("hub", "hub+v5", "fused"):
            view = View(meta.parent, name)
            if view.config_file().exists():
                views.append(view)
    return views


def read_config(view: View) -> dict[str, Any]:
    """The parsed config.json of a view."""
    config: dict[str, Any] = json.loads(view.config_file().read_text())
    return config


def relative_error(got: np.ndarray, want: np.ndarray) -> float:
    """Largest difference over the largest logit; infinite when anything is not finite."""
    assert got.shape == want.shape
    return float(np.abs(got - want).max() / np.abs(want).max()) if np.isfinite(got).all() else float("inf")


def logits(model: Any, ids: mx.array, cache: Any = None) -> np.ndarray:
    """Float32 logits as NumPy."""
    return np.array(model(ids, cache=cache).astype(mx.float32))


def measure(model: Any, case: Path) -> dict[str, Any]:
    """Errors of the uncached prompt, of prefill in two pieces and of cached greedy decoding."""
    oracle = dict(np.load(case / "oracle.npz"))
    ids, want, steps = mx.array(oracle["input_ids"]), oracle["greedy_ids"], oracle["greedy_logits"]
    cache = make_prompt_cache(model)
    got = [logits(model, ids, cache)[:, -1]]
    for k in range(want.shape[1] - 1):
        got.append(logits(model, mx.array(want[:, k : k + 1]), cache)[:, -1])
    decoded = np.stack(got, 1)
    cache, cut = make_prompt_cache(model), ids.shape[1] - 5
    pieces = [logits(model, part, cache) for part in (ids[:, :cut], ids[:, cut:])]
    return {
        "full": relative_error(logits(model, ids), oracle["logits"]),
        "decode": relative_error(decoded, steps),
        "split": relative_error(np.concatenate(pieces, 1), oracle["logits"]),
        "tokens": bool((decoded.argmax(-1) == want).all()),
    }
