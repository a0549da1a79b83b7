"""Expert blocks: any number of tokens, identity experts, cancelling outputs and narrow types."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache
from mlx_lm.models.switch_layers import SwitchGLU, SwitchLinear
from stateful import hands_on

from mlx_experts.engine.dispatch.expert_dispatch import ExpertDispatch
from mlx_experts.engine.kernels import activations
from mlx_experts.engine.layers.module_tree import find
from mlx_experts.engine.loading.api import save_model
from mlx_experts.engine.models.known_families import catalog
from mlx_experts.engine.tools.family_check import build_tiny
from mlx_experts.registry.resolve.tiny_config import tiny_config

FAMILIES = [name for name in catalog().names() if catalog().load(name).backbone is None]
ZERO = [name for name in FAMILIES if "zero_expert" in str(catalog().load(name).moe.experts.zero_experts)]


def packed(name: str) -> nn.Module:
    """A family's tiny model with its experts in 4 bits."""
    family = catalog().load(name)
    model = build_tiny(family, tiny_config(family))
    nn.quantize(model, 32, 4, class_predicate=lambda _, module: isinstance(module, SwitchLinear))
    model.eval()
    return model


@pytest.mark.report("RTE-07", "KRN-29")
@pytest.mark.parametrize("name", [name for name in FAMILIES if not hands_on(name)])
def test_tokens_give_alone_what_they_give_together(name: str, lab: Any) -> None:
    """Around the count from which pairs are sorted by expert, in one row of a batch and in two."""
    moe = lab.blocks(packed(name))[0]
    moe.use_fused(False)
    mx.random.seed(5)
    x = mx.random.normal((1, 64, moe._router.dims))
    want = mx.concatenate([moe.routed(x[:, i : i + 1]) for i in range(64)], axis=1)
    scale = float(mx.abs(want).max())
    for tokens in (31, 32, 33, 64):
        assert float(mx.abs(moe.routed(x[:, :tokens]) - want[:, :tokens]).max()) < 1e-5 * scale
    halves = x.reshape(2, 32, -1)
    assert float(mx.abs(moe.routed(halves).reshape(x.shape) - want).max()) < 1e-5 * scale
    assert moe.routed(x[:, :0]).shape == (1, 0, moe._router.dims)


@pytest.mark.report("RTE-03")
@pytest.mark.parametrize("name", ZERO)
@pytest.mark.parametrize("fused", [True, False])
def test_an_identity_expert_keeps_its_weight(name: str, fused: bool, lab: Any) -> None:
    family = catalog().load(name)
    moe = lab.blocks(build_tiny(family, {**tiny_config(family), "moe_topk": 2}))[0]
    moe.use_fused(fused)
    real = moe._experts
    bias = mx.zeros((moe._router.experts,))
    bias[1], bias[real] = 100.0, 100.0
    holder, _, leaf = moe._router.bias_path.rpartition(".")
    find(moe, holder)[leaf] = bias
    x = mx.random.normal((1, 1, moe._router.dims))
    indices, weights = moe.route(x)
    by_expert = dict(zip(indices.flatten().tolist(), weights.flatten().tolist(), strict=True))
    assert sorted(by_expert) == [1, real]
    experts = find(moe, moe.experts_path)
    inner = x.reshape(1, -1)
    gate, up, down = (experts[leaf].weight[1] for leaf in ("gate_proj", "up_proj", "down_proj"))
    hidden = nn.silu(inner @ gate.T) * (inner @ up.T)
    want = by_expert[1] * (hidden @ down.T) + by_expert[real] * inner
    assert float(mx.abs(moe.routed(x)[0] - want).max()) < 1e-4 * float(mx.abs(want).max())


@pytest.mark.report("RTE-09")
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16, mx.float32])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("rows", [1, 9])
def test_large_outputs_that_cancel_are_summed_in_float32(dtype: mx.Dtype, fused: bool, rows: int) -> None:
    """Eight experts give 64 times a value and its opposite in turn, weighted almost alike."""
    container = SwitchGLU(32, 32, 8)
    for leaf in ("gate_proj", "up_proj"):
        container[leaf].weight = mx.broadcast_to(mx.eye(32)[None], (8, 32, 32))
    container.down_proj.weight = mx.array([64.0, -64.0] * 4)[:, None, None] * mx.eye(32)[None]
    container.set_dtype(dtype)
    container.eval()
    x = mx.broadcast_to(mx.full((32,), 4.0), (1, rows, 32)).astype(dtype)
    indices = mx.broadcast_to(mx.arange(8), (1, rows, 8))
    shares = [0.1257, 0.1247] + [0.1253, 0.1253] * 3
    weights = mx.broadcast_to(mx.array(shares), (1, rows, 8))
    swiglu = activations.make("swiglu")
    got = ExpertDispatch("block", swiglu, fused)(container, x, indices, weights)
    hidden = float(activations.apply(swiglu, x[0, 0, :1], x[0, 0, :1]).item())
    assert got.dtype == dtype
    assert np.array(got.astype(mx.float32)).ravel() == pytest.approx(0.064 * hidden, rel=4e-3)


class Watched(nn.Module):
    """A decoder layer that keeps the dtypes of its inputs and outputs."""

    def __init__(self, layer: nn.Module, seen: list[mx.Dtype]) -> None:
        super().__init__()
        self.layer = layer
        self._seen = seen

    def make_cache(self) -> Any:
        return self.layer.make_cache()

    def __call__(self, x: mx.array, *rest: Any) -> mx.array:
        y: mx.array = self.layer(x, *rest)
        self._seen += [dtype for each in (x, y) for dtype in dtypes(each)]
        return y


# Originals that keep the residual stream in float32, whatever their weights are.
WIDE_STREAMS = {"zaya": "modeling_zaya.py: the residual_in_fp32 path of the authors"}


def dtypes(stream: Any) -> set[mx.Dtype]:
    """What a residual stream holds: an array, or the sums of blocks of layers."""
    if isinstance(stream, mx.array):
        return {stream.dtype}
    return {each.dtype for each in (stream.open, *stream.closed)}


@pytest.mark.report("RTE-12")
@pytest.mark.parametrize("name", FAMILIES)
def test_no_constant_widens_the_residual_stream(name: str, lab: Any, tmp_path: Any) -> None:
    model, config = lab.tiny(name)
    save_model(tmp_path, model, config)
    narrow, _, _ = lab.load(tmp_path, dtype="bfloat16")
    cache = make_prompt_cache(narrow)
    seen: list[mx.Dtype] = []
    names = narrow.args.plan.family.names
    layers = [Watched(layer, seen) for layer in narrow.layers]
    *parents, leaf = names.layers.split(".")
    find(narrow.decoder, ".".join(parents))[leaf] = layers
    logits = [narrow(lab.ids, cache=cache), narrow(lab.ids[:, :1], cache=cache)]
    assert set(seen) == {mx.float32 if name in WIDE_STREAMS else mx.bfloat16}
    assert len(seen) >= 4 * len(layers)
    assert {each.dtype for each in logits} == {mx.bfloat16}
    for each in cache:
        if isinstance(each, KVCache | RotatingKVCache):
            arrays = [v for _, v in tree_flatten(each.state) if isinstance(v, mx.array)]
            assert {value.dtype for value in arrays} == {mx.bfloat16}
