"""Latent attention in both forms, against each other and against its definition."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.cache import BatchKVCache

from mlx_experts.engine.layers.forward_context import ForwardState
from mlx_experts.engine.models.decoder import make_mixer
from mlx_experts.engine.models.known_families import catalog
from mlx_experts.registry.errors import SpecError
from mlx_experts.registry.resolve.planner import LayerPlan, Plan, resolve
from mlx_experts.registry.resolve.tiny_config import tiny_config

H, N, R, V, C = 4, 32, 16, 24, 32  # heads, widths of their three parts, latent width
YARN = {
    "rope_type": "yarn",
    "rope_theta": 5000.0,
    "factor": 4.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.8,
    "original_max_position_embeddings": 64,
}


def plan_of(**options: Any) -> Plan:
    """deepseek_v3's plan on a tiny config, with further options of the mixer."""
    family = catalog().load("deepseek_v3")
    sizes = {"qk_nope_head_dim": N, "qk_rope_head_dim": R, "v_head_dim": V, "kv_lora_rank": C}
    config = {**tiny_config(family), **sizes, "rope_parameters": YARN}
    assert family.attention is not None
    mixer = family.attention.model_copy(
        update={"options": {**family.attention.options, **options}}  # type: ignore[union-attr]
    )
    return resolve(family.model_copy(update={"attention": mixer}), config)


def built(plan: Plan, layer: LayerPlan | None = None) -> Any:
    mixer = make_mixer(layer or plan.layers[0], plan)
    assert mixer is not None
    mx.random.seed(3)
    drawn = [(k, v + 0.2 * mx.random.normal(v.shape)) for k, v in tree_flatten(mixer.parameters())]
    mixer.update(tree_unflatten(drawn))
    return mixer


def pair(**options: Any) -> tuple[Any, Any]:
    """The two forms with the same weights."""
    latent, expanded = built(plan_of(**options)), built(plan_of(**options, expanded=True))
    weights = dict(tree_flatten(latent.parameters()))
    keys = weights.pop("embed_q.weight").swapaxes(-1, -2)
    values = weights.pop("unembed_out.weight")
    weights["kv_b_proj.weight"] = mx.concatenate([keys, values], axis=1).flatten(0, 1)
    expanded.update(tree_unflatten(list(weights.items())))
    return latent, expanded


def tokens(rows: int = 2, length: int = 9) -> mx.array:
    return mx.random.normal((rows, length, 64), key=mx.random.key(1))


def run(mixer: Any, x: mx.array, cache: Any = None) -> mx.array:
    return mixer(x, ForwardState(mx.zeros(x.shape[:2], dtype=mx.int32)), cache)


def stepwise(mixer: Any, x: mx.array, cache: Any) -> mx.array:
    parts = [run(mixer, x[:, :4], cache), run(mixer, x[:, 4:6], cache)]
    parts += [run(mixer, x[:, i : i + 1], cache) for i in range(6, x.shape[1])]
    return mx.concatenate(parts, axis=1)


def close(a: mx.array, b: mx.array, tolerance: float = 1e-5) -> bool:
    return bool((mx.abs(a - b).max() < tolerance * mx.abs(b).max()).item())


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "full queries": {"q_rank": 0},
    "biases": {"bias": True},
    "scaled": {"scale_q": True, "scale_kv": True},
    "gate by head": {"gate": {"function": "sigmoid", "over": "head", "path": "g_proj"}},
    "gate by element": {"gate": {"function": "softplus", "over": "element", "path": "g_proj"}},
    "temperature": {"temperature": {"scale": 0.5, "floor": 3}},
    "other output name": {"out": "dense"},
}


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
def test_latent_and_expanded_forms_agree_whole_and_token_by_token(options: dict[str, Any]) -> None:
    latent, expanded = pair(**options)
    x = tokens()
    whole = run(expanded, x)
    assert close(run(latent, x), whole)
    for mixer in (latent, expanded):
        assert close(stepwise(mixer, x, mixer.make_cache()), whole)


def test_expanded_form_is_the_definition() -> None:
    _, mixer = pair()
    x = tokens(1, 5)
    q = mixer.q_b_proj(mixer.q_a_layernorm(mixer.q_a_proj(x))).reshape(5, H, N + R)
    a = mixer.kv_a_proj_with_mqa(x)[0]
    latent, shared = mixer.kv_a_layernorm(a[:, :C]), mixer._rope(a[None, None, :, C:])[0, 0]
    kv = mixer.kv_b_proj(latent).reshape(5, H, N + V)
    rotated = mixer._rope(q[..., N:].swapaxes(0, 1)[None])[0]
    heads = []
    for h in range(H):
        scores = q[:, h, :N] @ kv[:, h, :N].T + rotated[h] @ shared.T
        scores = scores * (N + R) ** -0.5 * (0.1 * 0.8 * mx.log(mx.array(4.0)) + 1) ** 2
        scores = mx.where(mx.tri(5) > 0, scores, -mx.inf)
        heads.append(mx.softmax(scores, axis=-1) @ kv[:, h, N:])
    want = mixer.o_proj(mx.concatenate(heads, axis=-1))
    assert close(run(mixer, x)[0], want)


def test_the_cache_holds_latents_and_one_rotated_key() -> None:
    latent, _ = pair()
    cache = latent.make_cache()
    run(latent, tokens(), cache)
    assert cache.keys.shape[1::2] == (1, C)
    assert cache.values.shape[1::2] == (1, R)


def test_a_row_padded_on_the_left_gives_its_own_output() -> None:
    latent, _ = pair()
    x = tokens()
    alone = run(latent, x[:1, 3:])
    padded = stepwise(latent, x, BatchKVCache([3, 0]))
    assert close(padded[:1, 3:], alone)
    assert close(padded[1:], run(latent, x[1:]))


def test_a_quantised_cache_follows_the_full_one() -> None:
    # Rotated keys of 16 values do not fill a group.
    plan = plan_of(rope_dim=32)
    latent = built(plan)
    x = tokens()
    quantised = latent.make_cache().to_quantized(group_size=32, bits=8)
    assert close(stepwise(latent, x, quantised), run(latent, x), tolerance=0.05)


def test_without_rope_parameters_positions_do_not_matter() -> None:
    family = catalog().load("deepseek_v3")
    assert family.attention is not None
    mixer_spec = family.attention.model_copy(update={"rope": None})
    plan = resolve(family.model_copy(update={"attention": mixer_spec}), tiny_config(family))
    mixer = built(plan)
    x = tokens(1, 4)
    swapped = mx.concatenate([x[:, 1:2], x[:, :1], x[:, 2:]], axis=1)
    assert close(run(mixer, swapped)[:, 3:], run(mixer, x)[:, 3:])


def test_a_width_that_is_not_positive_is_refused() -> None:
    with pytest.raises(SpecError, match="v_dim"):
        built(plan_of(v_dim=0))


def test_an_unknown_option_is_refused() -> None:
    with pytest.raises(SpecError, match="unknown key 'q_rnak'"):
        built(plan_of(q_rnak=3))
