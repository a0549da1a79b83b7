"""Leaves out the experts that a text needs least.

The measures are REAP's ("REAP the Experts", Cerebras, 2025, arXiv 2510.13999, equation 9) and
plain frequency.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from mlx_experts.engine.layers.moe import MoE
from mlx_experts.engine.models.base import LanguageModel
from mlx_experts.engine.tools.routing import Routing, Sums, blocks_of, digest_of
from mlx_experts.registry.errors import ConfigError, SettingError
from mlx_experts.registry.resolve.config_keys import keys_of, put_key

Measure = Literal["reap", "frequency", "unused"]
Spread = Literal["even", "layer"]


@dataclass(frozen=True)
class Cut:
    """What stays of one layer.

    Args:
        layer: index of the decoder layer.
        kept: the experts that stay, in order.
        experts: how many there were.
    """

    layer: int
    kept: tuple[int, ...]
    experts: int


def plan_cuts(
    model: LanguageModel,
    routing: Routing,
    keep: float,
    measure: Measure = "reap",
    spread: Spread = "even",
) -> list[Cut]:
    """Which experts stay, by a measure of what a text needs.

    Args:
        keep: the share of experts that stays.
        measure: `reap` for weight times output norm, averaged over the tokens that pick it; `frequency`
            for how often it is picked; `unused` for the contrary of frequency, as a control.
        spread: `even` keeps equally many in each layer, `layer` the best of the whole model.

    Raises:
        SettingError: the share leaves too few experts, or the statistics are of another model.
        ConfigError: a layer's experts cannot be cut.
    """
    if not 0 < keep <= 1:
        raise SettingError("--keep is a share of the experts", expected="above 0, at most 1", found=str(keep))
    if routing.model != digest_of(model):
        raise SettingError(
            "the statistics are of another model",
            expected=f"a {model.plan.family.family} of these layers and experts",
            found=f"{routing.family}, {len(routing.layers)} layers with experts",
            hint="record them with `registry routing` on this checkpoint",
        )
    blocks = blocks_of(model)
    for index, block in blocks:
        block.check_keepable(f"layer {index}")
    scores = [_scores(layer, measure) for layer in routing.layers]
    counts = _counts(blocks, scores, keep, spread)
    cuts = []
    for (index, block), score, count in zip(blocks, scores, counts, strict=True):
        groups = block.groups
        if count < block.top_k or count % groups:
            raise SettingError(
                f"layer {index} would have experts that its router cannot pick from",
                expected=f"at least {block.top_k} experts"
                + (f" in {groups} equal groups" if groups > 1 else ""),
                found=f"{count} of {block.experts}",
                hint="raise --keep",
            )
        cuts.append(Cut(index, _best(score, count, groups), block.experts))
    return cuts


def _scores(layer: Any, measure: Measure) -> Sums:
    if measure == "reap":
        return np.asarray(layer.saliency)
    frequency = layer.picks.astype(np.float64)
    return frequency if measure == "frequency" else -frequency


def _counts(
    blocks: Sequence[tuple[int, MoE]], scores: Sequence[Sums], keep: float, spread: Spread
) -> list[int]:
    """Experts that stay in each layer, a multiple of its groups."""
    if spread == "even":
        return [_whole(keep * block.experts, block.groups) for _, block in blocks]
    # Saliencies of different layers have different sizes; a share of the layer's own sum can be compared.
    shares = [score / total if (total := np.abs(score).sum()) else score for score in scores]
    order = np.sort(np.concatenate(shares))[::-1]
    bound = order[max(0, round(keep * len(order)) - 1)]
    return [
        max(_whole(float((share >= bound).sum()), block.groups), _least(block))
        for share, (_, block) in zip(shares, blocks, strict=True)
    ]


def _whole(count: float, groups: int) -> int:
    return max(groups, round(count / groups) * groups)


def _least(block: MoE) -> int:
    """The fewest experts that a block's router can pick from."""
    return -(-block.top_k // block.groups) * block.groups


def _best(score: Sums, count: int, groups: int) -> tuple[int, ...]:
    """The best experts, equally many of each group, in order; the first of equals stays."""
    size = len(score) // groups
    kept: list[int] = []
    for start in range(0, len(score), size):
        order = np.argsort(-score[start : start + size], kind="stable")[: count // groups]
        kept += [start + int(i) for i in order]
    return tuple(sorted(kept))


def cut_experts(model: LanguageModel, cuts: Sequence[Cut]) -> None:
    """Leave out what the cuts do not keep, in the model itself."""
    blocks = dict(blocks_of(model))
    for cut in cuts:
        blocks[cut.layer].keep_experts(cut.kept)


def config_after(config: Mapping[str, Any], model: LanguageModel, cuts: Sequence[Cut]) -> dict[str, Any]:
    """The config of the model that is left, with the experts under the family's own key.

    Equal counts are one number, which other engines read too. Unequal ones are a list with one entry for each
    decoder layer, which this package reads for every family.

    Raises:
        ConfigError: the config does not state the number of experts under a key of its own.
    """
    counts = {cut.layer: len(cut.kept) for cut in cuts}
    value: int | list[int] = next(iter(counts.values()))
    if len(set(counts.values())) > 1:
        value = [counts.get(i, layer.sizes.num_experts) for i, layer in enumerate(model.plan.layers)]
    keys = keys_of(model.plan.family.config.num_experts)
    changed = put_key(config, keys, value)
    if changed is None:
        raise ConfigError(
            "the config does not say how many experts there are",
            where="config.json",
            expected=" or ".join(keys) or "a key for the number of experts",
        )
    return changed
