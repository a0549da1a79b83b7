"""Tiny models of any family, written as checkpoints in any spelling and quantised in any mode."""

from __future__ import annotations

import functools
import json
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from mlx_experts.engine.dispatch.trace import trace
from mlx_experts.engine.layers.moe import MoE
from mlx_experts.engine.loading.api import load_with_report
from mlx_experts.engine.loading.checkpoint_loader import LoadReport
from mlx_experts.engine.models.known_families import catalog
from mlx_experts.engine.models.model import Model
from mlx_experts.engine.tools.family_check import build_tiny
from mlx_experts.registry.resolve.tiny_config import tiny_config
from mlx_experts.registry.spec.values import Ref

Tensors = dict[str, mx.array]


@functools.cache
def _built(name: str, stated: str) -> tuple[Model, str]:
    family = catalog().load(name)
    config = _merged(tiny_config(family), json.loads(stated))
    return build_tiny(family, config), json.dumps(config)


def _merged(config: dict[str, Any], stated: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(config)
    for key, value in stated.items():
        nested = isinstance(value, dict) and isinstance(result.get(key), dict)
        result[key] = _merged(result[key], value) if nested else value
    return result


class Lab:
    """What the tests of this folder share; models are built once and must not be changed."""

    ids = mx.array([[3, 17, 42, 9, 5, 64, 23]])

    def tiny(self, name: str, stated: Mapping[str, Any] | None = None) -> tuple[Model, dict[str, Any]]:
        """A family's tiny model with random parameters, and its config with ``stated`` merged in."""
        model, config = _built(name, json.dumps(stated or {}, sort_keys=True))
        return model, json.loads(config)

    def resized(self, name: str, **sizes: Any) -> dict[str, Any]:
        """A family's tiny config with other sizes, by the engine's names of them."""
        family = catalog().load(name)
        config = tiny_config(family)
        level = config[family.text_keys[0]] if family.text_config else config
        for size, value in sizes.items():
            ref = getattr(family.config, size)
            *parents, leaf = ref.keys[0].split(".") if isinstance(ref, Ref) else ["unread"]
            found = [level]
            for part in parents:
                # A list of layers, of which those that state the size state another.
                inside = (at if part == "{layer}" else [at[part]] for at in found)
                found = [each for group in inside for each in group]
            for at in found:
                if "{layer}" not in parents or leaf in at:
                    at[leaf] = value
        return config

    def blocks(self, model: Model) -> list[MoE]:
        """The Mixture-of-Experts blocks of a model."""
        return [module for module in model.modules() if isinstance(module, MoE)]

    @contextmanager
    def within(self, seconds: float) -> Iterator[None]:
        """Fail where the body computes longer, in the main thread of a process that has alarms.

        A process that waits for its turn on a busy machine takes no time by this.
        """

        def late(number: int, frame: Any) -> None:
            pytest.fail(f"it computed for more than {seconds} s")

        before = signal.signal(signal.SIGPROF, late)
        signal.setitimer(signal.ITIMER_PROF, seconds)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.signal(signal.SIGPROF, before)

    def parameters(self, model: Model) -> Tensors:
        return dict(tree_flatten(model.parameters()))

    def write(self, folder: Path, tensors: Mapping[str, mx.array], config: Mapping[str, Any]) -> Path:
        """A checkpoint folder with these tensors in one file."""
        folder.mkdir(parents=True, exist_ok=True)
        mx.save_safetensors(str(folder / "model.safetensors"), dict(tensors), metadata={"format": "mlx"})
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    def load(self, folder: Path, **options: Any) -> tuple[Model, dict[str, Any], LoadReport]:
        return load_with_report(folder, **options)

    def logits(self, model: Model) -> np.ndarray:
        return np.array(model(self.ids).astype(mx.float32))

    def decoded(self, model: Model) -> np.ndarray:
        """Logits of one token after the other, which is where the fused path runs."""
        cache = make_prompt_cache(model)
        count = self.ids.shape[1]
        return np.concatenate([np.array(model(self.ids[:, i : i + 1], cache=cache)) for i in range(count)], 1)

    def agree(self, loaded: Model, truth: Model, within: float = 1e-4) -> bool:
        """Prefill, and single tokens with experts fused, of a quantised model against float32 values."""
        trace.reset()
        got = self.decoded(loaded)
        fused = trace.total("fused") > 0
        want = self.logits(truth)
        close = self.distance(self.logits(loaded), want) < within and self.distance(got, want) < 50 * within
        return fused and close

    def distance(self, got: np.ndarray, want: np.ndarray) -> float:
        """Largest difference over largest value; infinite where something is not finite."""
        if got.shape != want.shape or not np.isfinite(got).all():
            return float("inf")
        return float(np.abs(got - want).max() / np.abs(want).max())

    def same(self, got: Mapping[str, mx.array], want: Mapping[str, mx.array]) -> list[str]:
        """Names that are missing, surplus or differ in shape, dtype or any bit; empty when all is equal."""
        odd = sorted(set(got) ^ set(want))
        for name in set(got) & set(want):
            a, b = got[name], want[name]
            if a.dtype != b.dtype or a.shape != b.shape or not mx.array_equal(a, b, equal_nan=True).item():
                odd.append(name)
        return odd

    def pack(
        self,
        tensors: Mapping[str, mx.array],
        bits: int = 4,
        group: int = 32,
        mode: str = "affine",
        *,
        only: Callable[[str], bool] = lambda name: True,
    ) -> tuple[Tensors, Tensors]:
        """The tensors with every matrix that fits quantised, and with the values that those then have."""
        stored, values = dict(tensors), dict(tensors)
        for name, value in tensors.items():
            fits = name.endswith(".weight") and value.ndim > 1 and value.shape[-1] % group == 0
            if fits and only(name) and "norm" not in name and "conv" not in name:
                planes = mx.quantize(value, group_size=group, bits=bits, mode=mode)
                named = dict(zip(("weight", "scales", "biases"), planes, strict=False))
                base = name.removesuffix("weight")
                stored |= {f"{base}{plane}": array for plane, array in named.items()}
                values[name] = mx.dequantize(
                    *planes, group_size=group, bits=bits, mode=mode, dtype=mx.float32
                )
        return stored, values


@pytest.fixture(scope="session")
def lab() -> Lab:
    """Builds, writes, loads and compares tiny models."""
    return Lab()
