"""An invented family, written down twice: its random checkpoint, and its mathematics in NumPy.

Known pieces in a mixture that no family has: sigmoid scores with a selection bias, three of eight experts,
a shared expert, per-head query and key norms, biased projections, and names of its own.
"""

from __future__ import annotations

import json
import shutil
from importlib.resources import files
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

CONFIG: dict[str, Any] = {
    "model_type": "birch_moe",
    "architectures": ["BirchForCausalLM"],
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 128,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 64,
    "shared_width": 96,
    "route_scale": 1.5,
    "first_dense": 1,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5000.0,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}


def make(folder: Path, vocabulary: int) -> None:
    """Write the checkpoint with the demo's tokenizer, and beside it answers.npz with NumPy's results."""
    config = {**CONFIG, "vocab_size": vocabulary}
    tensors = _tensors(config)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    arrays = {name: mx.array(value) for name, value in tensors.items()}
    mx.save_safetensors(str(folder / "model.safetensors"), arrays, metadata={"format": "pt"})
    ids = np.random.default_rng(1).integers(0, vocabulary, (2, 9))
    rows = [_forward(row, tensors, config) for row in ids]
    answers, states = (np.stack(each, -3) for each in zip(*rows, strict=True))
    for file in Path(str(files("mlx_experts").joinpath("demo"))).glob("token*"):
        shutil.copy(file, folder)
    np.savez(
        folder.parent / "answers.npz",
        input_ids=ids,
        logits=answers.astype(np.float32),
        hidden_states=states.astype(np.float32),
    )


def _tensors(c: dict[str, Any]) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    width, head = c["hidden_size"], c["head_dim"]
    q_width, k_width = c["num_attention_heads"] * head, c["num_key_value_heads"] * head

    def matrix(*shape: int) -> np.ndarray:
        return (random.standard_normal(shape) * 0.7 / shape[-1] ** 0.5).astype(np.float32)

    def vector(size: int, around: float = 1.0) -> np.ndarray:
        return (around + 0.1 * random.standard_normal(size)).astype(np.float32)

    t = {
        "model.embed_tokens.weight": matrix(c["vocab_size"], width) * 8,
        "model.norm.weight": vector(width),
        "lm_head.weight": matrix(c["vocab_size"], width),
    }
    for i in range(c["num_hidden_layers"]):
        at, ff = f"model.layers.{i}", f"model.layers.{i}.feed_forward"
        t[f"{at}.attention_norm.weight"], t[f"{at}.ffn_norm.weight"] = vector(width), vector(width)
        for name, rows in (("q", q_width), ("k", k_width), ("v", k_width)):
            t[f"{at}.self_attn.{name}_proj.weight"] = matrix(rows, width)
            t[f"{at}.self_attn.{name}_proj.bias"] = vector(rows, 0.0)
        t[f"{at}.self_attn.o_proj.weight"] = matrix(width, q_width)
        t[f"{at}.self_attn.q_norm.weight"] = vector(head)
        t[f"{at}.self_attn.k_norm.weight"] = vector(head)
        if i < c["first_dense"]:
            _mlp(t, ff, width, c["intermediate_size"], ("w1", "w3", "w2"), matrix)
            continue
        t[f"{ff}.router.weight"] = matrix(c["n_routed_experts"], width) * 3
        t[f"{ff}.router_bias"] = vector(c["n_routed_experts"], 0.0)
        _mlp(t, f"{ff}.shared", width, c["shared_width"], ("gate_proj", "up_proj", "down_proj"), matrix)
        for e in range(c["n_routed_experts"]):
            _mlp(t, f"{ff}.experts.{e}", width, c["moe_intermediate_size"], ("w1", "w3", "w2"), matrix)
    return t


def _mlp(t: dict[str, np.ndarray], at: str, width: int, inner: int, names: Any, matrix: Any) -> None:
    t[f"{at}.{names[0]}.weight"] = matrix(inner, width)
    t[f"{at}.{names[1]}.weight"] = matrix(inner, width)
    t[f"{at}.{names[2]}.weight"] = matrix(width, inner)


def _rms(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def _rotate(x: np.ndarray, theta: float) -> np.ndarray:
    """``x`` [L, heads, d], first and second half of a head rotating together."""
    half = x.shape[-1] // 2
    angle = np.arange(len(x))[:, None] * theta ** (-np.arange(half) / half)
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def _swiglu(x: np.ndarray, t: Any, at: str, names: tuple[str, str, str]) -> np.ndarray:
    gate, up = (x @ t[f"{at}.{n}.weight"].T for n in names[:2])
    return (gate / (1 + np.exp(-gate)) * up) @ t[f"{at}.{names[2]}.weight"].T


def _attention(x: np.ndarray, t: Any, at: str, c: dict[str, Any]) -> np.ndarray:
    head, heads, eps = c["head_dim"], c["num_attention_heads"], c["rms_norm_eps"]
    q, k, v = (
        (x @ t[f"{at}.{n}_proj.weight"].T + t[f"{at}.{n}_proj.bias"]).reshape(len(x), -1, head) for n in "qkv"
    )
    q = _rotate(_rms(q, t[f"{at}.q_norm.weight"], eps), c["rope_theta"])
    k = _rotate(_rms(k, t[f"{at}.k_norm.weight"], eps), c["rope_theta"])
    k, v = (np.repeat(a, heads // c["num_key_value_heads"], axis=1) for a in (k, v))
    scores = np.einsum("qhd,khd->hqk", q, k) / head**0.5
    scores = np.where(np.tri(len(x), dtype=bool), scores, -np.inf)
    scores = np.exp(scores - scores.max(-1, keepdims=True))
    mixed = np.einsum("hqk,khd->qhd", scores / scores.sum(-1, keepdims=True), v)
    return mixed.reshape(len(x), -1) @ t[f"{at}.o_proj.weight"].T


def _experts(x: np.ndarray, t: Any, at: str, c: dict[str, Any]) -> np.ndarray:
    scores = 1 / (1 + np.exp(-(x @ t[f"{at}.router.weight"].T)))
    out = _swiglu(x, t, f"{at}.shared", ("gate_proj", "up_proj", "down_proj"))
    for row in range(len(x)):
        picked = np.argsort(-(scores[row] + t[f"{at}.router_bias"]))[: c["num_experts_per_tok"]]
        weights = scores[row, picked] / scores[row, picked].sum() * c["route_scale"]
        for e, weight in zip(picked, weights, strict=True):
            out[row] += weight * _swiglu(x[row], t, f"{at}.experts.{e}", ("w1", "w3", "w2"))
    return out


def _forward(
    ids: np.ndarray, tensors: dict[str, np.ndarray], c: dict[str, Any]
) -> tuple[np.ndarray, np.ndarray]:
    """Logits [L, vocabulary] of one prompt and the layers' outputs [layers, L, width], in float64."""
    t = {name: value.astype(np.float64) for name, value in tensors.items()}
    eps, x, states = c["rms_norm_eps"], t["model.embed_tokens.weight"][ids], []
    for i in range(c["num_hidden_layers"]):
        at = f"model.layers.{i}"
        x = x + _attention(_rms(x, t[f"{at}.attention_norm.weight"], eps), t, f"{at}.self_attn", c)
        h = _rms(x, t[f"{at}.ffn_norm.weight"], eps)
        dense = i < c["first_dense"]
        ff = f"{at}.feed_forward"
        x = x + (_swiglu(h, t, ff, ("w1", "w3", "w2")) if dense else _experts(h, t, ff, c))
        states.append(x)
    return _rms(x, t["model.norm.weight"], eps) @ t["lm_head.weight"].T, np.stack(states)


if __name__ == "__main__":
    make(Path("mystery"), 2048)
