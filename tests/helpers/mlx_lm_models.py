"""mlx-lm's own tiny models of random weights, and what mlx-lm writes of them."""

from __future__ import annotations

import contextlib
import functools
import io
import tempfile
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import yaml
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.utils import _get_classes, quantize_model, save_config
from mlx_lm.utils import save_model as save_mlx_lm_model

_FILE = Path(__file__).parent.parent / "families" / "mlx_lm_configs.yaml"
CONFIGS: dict[str, dict[str, Any]] = yaml.safe_load(_FILE.read_text(encoding="utf-8"))
COMMON = CONFIGS.pop("common")
IDS = mx.array([[3, 17, 42, 99, 5, 64, 23], [1, 2, 3, 4, 5, 6, 7]])


# What mlx-lm computes otherwise than the authors in one place, which is mended in the model that is compared.
PATCHED = {
    "bailing_moe_linear": "inclusionAI's modeling_bailing_moe_linear_v2.py counts layers from one less"
}


def config_of(model_type: str) -> dict[str, Any]:
    """The tiny config of a model type; null takes a common key away."""
    stated = {"model_type": model_type, **COMMON, **CONFIGS[model_type]}
    if "text_config" in stated:
        stated["text_config"] = {**COMMON, **stated["text_config"]}
    return {key: value for key, value in stated.items() if value is not None}


def make_model(config: dict[str, Any]) -> Any:
    """mlx-lm's own model with everything random, norms and biases too, in float32."""
    mx.random.seed(7)
    kind, args = _get_classes(config)
    model = kind(args.from_dict(config))
    drawn = []
    for name, value in tree_flatten(model.parameters()):
        noise = mx.random.normal(value.shape)
        if value.ndim > 1:
            drawn.append((name, noise * value.shape[-1] ** -0.5))
        else:
            drawn.append((name, (1.0 if "norm" in name and name.endswith("weight") else 0.0) + 0.2 * noise))
    model.update(tree_unflatten(drawn))
    model.eval()
    if config["model_type"] in PATCHED:
        _first_rates(model)
    return model


def _first_rates(model: Any) -> None:
    """The first layer's decay as the authors count it: from one less, where mlx-lm starts at nothing."""
    attention, last = model.layers[0].attention, max(1, len(model.layers) - 1)
    attention._slope = attention._slope * ((1 + 1 / last + 1e-5) / (1 + 1e-5))


def save_in_mlx_lm(folder: Path, model: Any, config: dict[str, Any]) -> None:
    """Write a model as mlx-lm does."""
    save_mlx_lm_model(folder, model, donate_model=False)
    save_config(dict(config), config_path=folder / "config.json")


@functools.cache
def _scratch() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory()


@functools.cache
def written(model_type: str) -> tuple[Path, np.ndarray]:
    """The folder of a checkpoint of mlx-lm in full precision, and its logits for ``IDS``."""
    folder, config = Path(_scratch().name) / model_type, config_of(model_type)
    model = make_model(config)
    save_in_mlx_lm(folder, model, config)
    return folder, np.array(model(IDS).astype(mx.float32))


# Where the module tree here has other parts than mlx-lm's, each by what differs.
OTHER_TREES = {
    "dbrx": "mlx-lm keeps the experts apart",
    "ernie4_5_moe": "mlx-lm throws the selection bias away",
    "ernie4_5_moe_zero": "mlx-lm throws the selection bias away",
    "bailing_moe_v3": "a head of its own stands where mlx-lm ties",
    "kimi_linear_tied": "a head of its own stands where mlx-lm ties",
}


@functools.cache
def parameter_names(model_type: str) -> set[str]:
    """Names of the parameters of mlx-lm's model."""
    return {name for name, _ in tree_flatten(make_model(config_of(model_type)).parameters())}


def quantised(model: Any, model_type: str) -> set[str]:
    """Paths of the modules that a conversion of a model to mxfp8 quantises."""
    with contextlib.redirect_stdout(io.StringIO()):
        quantize_model(model, config_of(model_type), 32, 8, mode="mxfp8")
    return {name for name, module in model.named_modules() if "scales" in module}


@functools.cache
def quantised_there(model_type: str) -> set[str]:
    """The same of mlx-lm's own model."""
    return quantised(make_model(config_of(model_type)), model_type)
