"""One rank of two: spreads tiny models and prints, as JSON, how far their logits are from whole ones.

A name is a family, with ``@BITS`` where its weights are quantised and ``|pipeline`` where layers are spread.
Run as a script by test_tensor_parallel.py, with MLX_RANK and MLX_HOSTFILE in the environment.
"""

from __future__ import annotations

import json
import sys
from importlib.resources import files
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm import utils
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import quantize_model

from mlx_experts.engine.loading.doors import Doors, open_doors
from mlx_experts.engine.models.known_families import catalog
from mlx_experts.engine.models.model import Model
from mlx_experts.engine.tools.family_check import build_tiny
from mlx_experts.registry.errors import SettingError
from mlx_experts.registry.resolve.tiny_config import tiny_config

DEMO = files("mlx_experts").joinpath("demo")
IDS = mx.array([[3, 17, 42, 9, 5, 64, 23]])


def stored_bytes(model: Model) -> int:
    return sum(int(value.nbytes) for _, value in tree_flatten(model.parameters()))


def logits(model: Model) -> np.ndarray:
    """Prefill in one piece, then token by token, so that every path of the experts runs.

    What prefilling leaves is evaluated alone, as generating does it.
    """
    cache = make_prompt_cache(model)
    parts = [model(IDS[:, :4], cache=cache)]
    mx.eval([each.state for each in cache])
    parts += [model(IDS[:, i : i + 1], cache=cache) for i in range(4, IDS.shape[1])]
    return np.array(mx.concatenate(parts, axis=1))


def spread(name: str, group: mx.distributed.Group) -> dict[str, Any]:
    """The relative error of the logits, and the share of the bytes that this rank keeps."""
    family_name, _, way = name.partition("|")
    family_name, _, bits = family_name.partition("@")
    family = catalog().load(family_name)
    config: dict[str, Any] = tiny_config(family)
    model = build_tiny(family, config)
    if bits:
        model, _ = quantize_model(model, config, 32, int(bits))
    want, before = logits(model), stored_bytes(model)
    try:
        model.pipeline(group) if way else model.shard(group)
    except SettingError as error:
        return {"refused": error.what}
    error = np.abs(logits(model) - want).max() / np.abs(want).max()
    return {"error": float(error), "kept": stored_bytes(model) / before}


def served(way: str, group: mx.distributed.Group) -> dict[str, Any]:
    """Tokens of the demo, loaded as mlx-lm's server loads a model that is spread."""
    groups = (group, None) if way == "pipeline" else (None, group)
    with open_doors(Doors(tell=lambda text: None)):
        model, tokenizer = utils.sharded_load(str(DEMO), *groups)
    prompt = mx.array(tokenizer.encode("A mixture-of-experts model"))
    steps = generate_step(prompt, model, max_tokens=12)
    return {"tokens": [token for token, _ in steps], "layers": len(model.layers)}


if __name__ == "__main__":
    mx.set_default_device(mx.Device(mx.cpu))
    ranks = mx.distributed.init(strict=True, backend="ring")
    answers = {name: spread(name, ranks) for name in sys.argv[1:]}
    answers |= {f"demo|{way}": served(way, ranks) for way in ("tensor", "pipeline")}
    print(json.dumps(answers))
