"""What a model's routers pick on a text: how often, with what weight and effect, and together with whom."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlx_experts.engine.layers.moe import MoE
from mlx_experts.engine.models.base import LanguageModel
from mlx_experts.registry.errors import SettingError

FORMAT = "mlx-experts routing 1"
Counts = npt.NDArray[np.int64]
Sums = npt.NDArray[np.float64]


@dataclass
class LayerRouting:
    """One layer's statistics over the tokens that were seen.

    Args:
        layer: index of the decoder layer, and ``path``, the module path of its block.
        experts: E, and ``top_k``, experts a token.
        tokens: tokens that passed.
        picks: how often each expert was picked ``[E]``; identity columns are not counted.
        weights: the sum of each expert's weights ``[E]``.
        effects: the sum of weight times the L2 norm of the expert's output ``[E]`` (Cerebras' REAP).
        pairs: how often two experts were picked by one token ``[E, E]``; the diagonal is ``picks``.
    """

    layer: int
    path: str
    experts: int
    top_k: int
    tokens: int = 0
    picks: Counts = field(default_factory=lambda: np.zeros(0, np.int64))
    weights: Sums = field(default_factory=lambda: np.zeros(0))
    effects: Sums = field(default_factory=lambda: np.zeros(0))
    pairs: Counts = field(default_factory=lambda: np.zeros((0, 0), np.int64))

    def __post_init__(self) -> None:
        if not self.picks.size:
            columns = self.experts
            self.picks, self.weights = np.zeros(columns, np.int64), np.zeros(columns)
            self.effects, self.pairs = np.zeros(columns), np.zeros((columns, columns), np.int64)

    def routed(self, indices: mx.array, weights: mx.array) -> None:
        """Count what a call's router has picked: ``[..., K]`` each."""
        rows = np.array(indices).reshape(-1, indices.shape[-1])
        shares = np.array(weights.astype(mx.float32)).reshape(rows.shape).astype(np.float64)
        real = rows < self.experts
        self.tokens += len(rows)
        np.add.at(self.picks, rows[real], 1)
        np.add.at(self.weights, rows[real], shares[real])
        chosen = np.zeros((len(rows), self.experts), np.int64)
        token = np.broadcast_to(np.arange(len(rows))[:, None], rows.shape)
        chosen[token[real], rows[real]] = 1
        self.pairs += chosen.T @ chosen

    def applied(self, outputs: mx.array, indices: mx.array, weights: mx.array) -> None:
        """Add up what each picked expert has done: outputs ``[..., K, H]``, the others ``[..., K]``."""
        norms = mx.linalg.norm(outputs.astype(mx.float32), axis=-1) * mx.abs(weights.astype(mx.float32))
        np.add.at(self.effects, np.array(indices).reshape(-1), np.array(norms).reshape(-1).astype(np.float64))

    @property
    def saliency(self) -> Sums:
        """REAP's measure ``[E]``: weight times output norm, averaged over the tokens that pick the expert.

        The source is "REAP the Experts: Why Pruning Prevails for One-Shot MoE compression" (Cerebras, 2025,
        arXiv 2510.13999), equation 9. An expert that no token picks has 0.
        """
        return np.divide(self.effects, self.picks, out=np.zeros(self.experts), where=self.picks > 0)

    @property
    def entropy(self) -> float:
        """Entropy of the picks as a share of that of an even router: 1 where all are picked alike."""
        total = self.picks.sum()
        shares = self.picks[self.picks > 0] / total if total else np.ones(1)
        return float(-(shares * np.log(shares)).sum() / math.log(self.experts)) if self.experts > 1 else 1.0

    @property
    def dead(self) -> list[int]:
        """Experts that no token picked."""
        return [int(i) for i in np.flatnonzero(self.picks == 0)]

    def together(self, most: int = 5) -> list[tuple[int, int, int]]:
        """The pairs that tokens pick together most often, with how often."""
        upper = np.triu(self.pairs, 1)
        best = np.argsort(upper, axis=None, kind="stable")[::-1][:most]
        rows = zip(*np.unravel_index(best, upper.shape), strict=True)
        return [(int(a), int(b), int(upper[a, b])) for a, b in rows if upper[a, b]]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "layer": self.layer,
            "path": self.path,
            "experts": self.experts,
            "top_k": self.top_k,
            "tokens": self.tokens,
            "picks": self.picks.tolist(),
            "weights": self.weights.tolist(),
            "effects": self.effects.tolist(),
            "saliency": self.saliency.tolist(),
            "entropy": self.entropy,
            "dead": self.dead,
            "pairs": self.pairs.tolist(),
        }


@dataclass
class Routing:
    """The statistics of every MoE layer, and which model they are of.

    Args:
        family: name of the family.
        model: digest of the family, the layers and their experts; statistics fit models of the same digest.
        layers: in the order of the model.
    """

    family: str
    model: str
    layers: list[LayerRouting]

    @property
    def tokens(self) -> int:
        """Tokens that passed."""
        return max((layer.tokens for layer in self.layers), default=0)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "format": FORMAT,
            "family": self.family,
            "model": self.model,
            "tokens": self.tokens,
            "layers": [layer.to_dict() for layer in self.layers],
        }

    def difference(self, other: Routing) -> list[float]:
        """Total variation between the two shares of picks, a layer: 0 for equal, 1 for nothing in common.

        Raises:
            SettingError: the two are of different models.
        """
        if self.model != other.model:
            raise SettingError(
                "the statistics are of different models", expected=self.model, found=other.model
            )
        return [
            float(np.abs(a.picks / max(a.picks.sum(), 1) - b.picks / max(b.picks.sum(), 1)).sum() / 2)
            for a, b in zip(self.layers, other.layers, strict=True)
        ]


def blocks_of(model: LanguageModel) -> list[tuple[int, MoE]]:
    """Every MoE block with the index of its decoder layer, in order."""
    prefix = f"{model.converter.layers}."
    found: list[tuple[int, MoE]] = []
    for path, module in model.named_modules():
        if isinstance(module, MoE):
            index = path.removeprefix(prefix).partition(".")[0] if path.startswith(prefix) else ""
            found.append((int(index) if index.isdigit() else len(found), module))
    return sorted(found, key=lambda pair: pair[0])


def digest_of(model: LanguageModel) -> str:
    """What statistics of a model are filed under."""
    facts = [model.plan.family.family, len(model.plan.layers)]
    facts += [[index, block.name, block.experts, block.top_k] for index, block in blocks_of(model)]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


@contextmanager
def record_routing(model: LanguageModel) -> Iterator[Routing]:
    """Record what the routers of a model pick for as long as the block lasts.

    Each call of an expert block costs a second pass through the picked experts, for their outputs' norms.

    Raises:
        SettingError: the model has no MoE block.
    """
    blocks = blocks_of(model)
    if not blocks:
        raise SettingError("the model has no expert block of this package", found=model.plan.family.family)
    routing = Routing(
        model.plan.family.family,
        digest_of(model),
        [LayerRouting(index, block.name, block.experts, block.top_k) for index, block in blocks],
    )
    try:
        for (_, block), layer in zip(blocks, routing.layers, strict=True):
            block.observe(layer)
        yield routing
    finally:
        for _, block in blocks:
            block.observe(None)


def read_routing(path: Path) -> Routing:
    """Statistics as ``registry routing --json`` writes them.

    Raises:
        SettingError: the file cannot be read, or is no such file.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["format"] != FORMAT:
            raise ValueError(f"format {content['format']!r}")
        layers = [_layer_of(entry) for entry in content["layers"]]
        return Routing(str(content["family"]), str(content["model"]), layers)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SettingError(
            "the routing statistics cannot be read",
            where=str(path),
            expected="what `registry routing MODEL --text FILE --json` writes",
            found=f"{type(error).__name__}: {error}"[:200],
        ) from error


def _layer_of(entry: dict[str, Any]) -> LayerRouting:
    experts = int(entry["experts"])
    layer = LayerRouting(
        int(entry["layer"]),
        str(entry["path"]),
        experts,
        int(entry["top_k"]),
        int(entry["tokens"]),
        np.array(entry["picks"], np.int64),
        np.array(entry["weights"], np.float64),
        np.array(entry["effects"], np.float64),
        np.array(entry["pairs"], np.int64),
    )
    shapes = [layer.picks.shape, layer.weights.shape, layer.effects.shape, layer.pairs.shape]
    if shapes != [(experts,)] * 3 + [(experts, experts)]:
        raise ValueError(f"layer {layer.layer} has arrays of shapes {shapes}")
    return layer
