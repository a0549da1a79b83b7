"""Reference cases: tiny checkpoints with the original implementations' answers, in every view a user meets.

A case folder holds `hub/` (the Hub's tensor names and config), optionally `hub/config.transformers.json`
(the config that transformers 5 writes) and `fused/` (transformers' in-memory layout), and `oracle.npz`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from mlx_experts.engine.loading.api import load_model
from mlx_experts.registry.checkpoint.strict_json import parse_object

VIEWS = ("hub", "hub+v5", "fused")
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

    @property
    def config_file(self) -> Path:
        """The config.json of the view."""
        return {
            "hub": self.case / "hub" / "config.json",
            "hub+v5": self.case / "hub" / "config.transformers.json",
            "fused": self.case / "fused" / "config.json",
        }[self.name]

    def config(self) -> dict[str, Any]:
        """The parsed config.json of the view."""
        return parse_object(self.config_file.read_bytes(), "config.json", lenient=True)

    @contextmanager
    def folder(self) -> Iterator[Path]:
        """A checkpoint folder of the view; hub+v5 is put together from links."""
        if self.name != "hub+v5":
            yield self.case / self.name
            return
        with TemporaryDirectory() as scratch:
            (Path(scratch) / "config.json").symlink_to(self.config_file.resolve())
            tensors = (self.case / "hub" / "model.safetensors").resolve()
            (Path(scratch) / "model.safetensors").symlink_to(tensors)
            yield Path(scratch)


def all_views(cases: Path) -> list[View]:
    """Every view of every case below a folder."""
    views = [View(meta.parent, name) for meta in sorted(cases.glob("*/*/case.json")) for name in VIEWS]
    return [view for view in views if view.config_file.exists()]


@dataclass(frozen=True)
class Measured:
    """Distances to the original: largest difference over largest logit.

    Args:
        full: the uncached prompt.
        decode: prefill and cached greedy steps, of all rows together and of each row alone, whose experts
            and router run fused.
        split: a prefill in two pieces.
        tokens: whether the greedy tokens are equal, both ways.
    """

    full: float
    decode: float
    split: float
    tokens: bool

    @property
    def ok(self) -> bool:
        """Within tolerance, with equal tokens."""
        return max(self.full, self.decode, self.split) < TOLERANCE and self.tokens


def _distance(got: np.ndarray, want: np.ndarray) -> float:
    if got.shape != want.shape or not np.isfinite(got).all():
        return float("inf")
    return float(np.abs(got - want).max() / np.abs(want).max())


def _logits(model: Any, ids: mx.array, cache: Any = None) -> np.ndarray:
    return np.array(model(ids, cache=cache).astype(mx.float32))


def _decoded(model: Any, ids: mx.array, tokens: np.ndarray) -> np.ndarray:
    """Logits ``[B, T, V]`` at which cached decoding picks ``tokens`` [B, T] after the prompts ``[B, L]``."""
    cache = make_prompt_cache(model)
    logits = [_logits(model, ids, cache)[:, -1]]
    for k in range(tokens.shape[1] - 1):
        logits.append(_logits(model, mx.array(tokens[:, k : k + 1]), cache)[:, -1])
    return np.stack(logits, 1)


def measure(model: Any, oracle: Path) -> Measured:
    """Compare a model with the answers of an ``oracle.npz``."""
    with np.load(oracle) as file:
        ids, want = mx.array(file["input_ids"]), file["logits"]
        tokens, steps = file["greedy_ids"], file["greedy_logits"]
    together = _decoded(model, ids, tokens)
    alone = np.concatenate([_decoded(model, ids[i : i + 1], tokens[i : i + 1]) for i in range(len(tokens))])
    cache, cut = make_prompt_cache(model), ids.shape[1] - 5
    pieces = [_logits(model, part, cache) for part in (ids[:, :cut], ids[:, cut:])]
    return Measured(
        full=_distance(_logits(model, ids), want),
        decode=max(_distance(together, steps), _distance(alone, steps)),
        split=_distance(np.concatenate(pieces, 1), want),
        tokens=all(bool((each.argmax(-1) == tokens).all()) for each in (together, alone)),
    )


def measure_view(view: View) -> Measured:
    """Load a view and compare it with its case's answers.

    Raises:
        RegistryError: it does not load.
    """
    with view.folder() as folder:
        model, _ = load_model(folder, dtype="float32")
    return measure(model, view.case / "oracle.npz")
