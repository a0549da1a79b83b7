"""One rank of two: spreads tiny models and prints, as JSON, how far their logits are from whole ones.

Run as a script by test_shard.py, with MLX_RANK and MLX_HOSTFILE in the environment.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import quantize_model

from mlx_experts.engine.models.decoder import Model
from mlx_experts.engine.models.known_families import catalog
from mlx_experts.engine.tools.family_check import build_tiny
from mlx_experts.registry.resolve.tiny_config import tiny_config

IDS = mx.array([[3, 17, 42, 9, 5, 64, 23]])


def stored_bytes(model: Model) -> int:
    return sum(int(value.nbytes) for _, value in tree_flatten(model.parameters()))


def logits(model: Model) -> np.ndarray:
    """Prefill in one piece, then token by token, so that every path of the experts runs."""
    cache = make_prompt_cache(model)
    parts = [model(IDS[:, :4], cache=cache)]
    parts += [model(IDS[:, i : i + 1], cache=cache) for i in range(4, IDS.shape[1])]
    return np.array(mx.concatenate(parts, axis=1))


def spread(name: str, group: mx.distributed.Group) -> dict[str, float]:
    """The relative error of the logits, and the share of the bytes that this rank keeps."""
    family_name, _, bits = name.partition("@")
    family = catalog().load(family_name)
    config: dict[str, Any] = tiny_config(family)
    model = build_tiny(family, config)
    if bits:
        model, _ = quantize_model(model, config, 32, int(bits))
    want, before = logits(model), stored_bytes(model)
    model.shard(group)
    error = np.abs(logits(model) - want).max() / np.abs(want).max()
    return {"error": float(error), "kept": stored_bytes(model) / before}


if __name__ == "__main__":
    mx.set_default_device(mx.Device(mx.cpu))
    ranks = mx.distributed.init(strict=True, backend="ring")
    print(json.dumps({name: spread(name, ranks) for name in sys.argv[1:]}))
