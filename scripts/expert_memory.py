"""Measures a model whose experts stay in files against the same model in memory.

    scripts/expert_memory.py make FOLDER [--layers 24]
    scripts/expert_memory.py run FOLDER [--expert-memory 1GB] [--cold] [--limit 3GB]
    scripts/expert_memory.py compare FOLDER --budgets 1GB,2GB,4GB [--cold] [--whole]

``make`` writes a random checkpoint in the shape of Qwen3-30B-A3B, with 4-bit weights, tensor by tensor. Its
48 layers are 17 GB, 24 are 8.7 GB. Its routers are random: hit rates of a trained model are its own.
``run`` decodes random tokens and prints JSON with the likeliest next ones. ``compare`` runs each budget in a
process of its own, and the whole model, and says whether the tokens are equal.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_experts import load_model, trace
from mlx_experts.engine.weights.in_place.budget import bytes_of
from mlx_experts.engine.weights.in_place.writer import write_tensors

GROUP, BITS = 64, 4
# Bits that every matrix is made of, shifted and mixed with a number of its own.
_BLOCK = 1 << 22


def config(layers: int) -> dict[str, Any]:
    """Of Qwen3-30B-A3B, with fewer layers."""
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_hidden_layers": layers,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": False,
        "vocab_size": 151936,
        "torch_dtype": "bfloat16",
        "quantization": {"group_size": GROUP, "bits": BITS, "mode": "affine"},
    }


class Random:
    """Random tensors that are computed when they are written."""

    def __init__(self) -> None:
        self._block = mx.array(np.random.default_rng(0).integers(0, 1 << 32, _BLOCK, np.uint32))
        self._count = 0
        self.tensors: dict[str, mx.array] = {}

    def packed(self, name: str, *shape: int) -> None:
        """A 4-bit matrix, or a stack of them, whose products keep the size of their input."""
        self._count += 1
        *rows, width = shape
        words = [*rows, width * BITS // 32]
        size = 1
        for each in words:
            size *= each
        repeats = -(-size // _BLOCK)
        salt = np.arange(repeats, dtype=np.uint32)[:, None] * np.uint32(2654435761) + np.uint32(
            self._count * 40503
        )
        mixed = mx.array(salt)
        bits = (self._block[None] ^ mixed).reshape(-1)[:size].reshape(words)
        noise = (bits[..., :: GROUP * BITS // 32] & 255).astype(mx.float32) / 255
        scales = ((0.5 + noise) / (4.6 * width**0.5)).astype(mx.bfloat16)
        self.tensors[f"{name}.weight"] = bits
        self.tensors[f"{name}.scales"] = scales
        self.tensors[f"{name}.biases"] = scales * -7.5

    def plain(self, name: str, value: mx.array) -> None:
        """A tensor that is not quantised."""
        self.tensors[f"{name}.weight"] = value.astype(mx.bfloat16)


def make(folder: Path, layers: int) -> None:
    """Write the checkpoint."""
    sizes, made = config(layers), Random()
    wide, narrow, count = sizes["hidden_size"], sizes["moe_intermediate_size"], sizes["num_experts"]
    head = sizes["head_dim"]
    queries, keys = sizes["num_attention_heads"] * head, sizes["num_key_value_heads"] * head
    made.packed("model.embed_tokens", sizes["vocab_size"], wide)
    for i in range(layers):
        at = f"model.layers.{i}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            made.plain(f"{at}.{norm}", mx.ones((wide,)))
        for norm in ("q_norm", "k_norm"):
            made.plain(f"{at}.self_attn.{norm}", mx.ones((head,)))
        made.packed(f"{at}.self_attn.q_proj", queries, wide)
        made.packed(f"{at}.self_attn.k_proj", keys, wide)
        made.packed(f"{at}.self_attn.v_proj", keys, wide)
        made.packed(f"{at}.self_attn.o_proj", wide, queries)
        made.plain(f"{at}.mlp.gate", mx.random.normal((count, wide), key=mx.random.key(i)) * 0.05)
        made.packed(f"{at}.mlp.switch_mlp.gate_proj", count, narrow, wide)
        made.packed(f"{at}.mlp.switch_mlp.up_proj", count, narrow, wide)
        made.packed(f"{at}.mlp.switch_mlp.down_proj", count, wide, narrow)
    made.plain("model.norm", mx.ones((wide,)))
    made.packed("lm_head", sizes["vocab_size"], wide)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(sizes, indent=2))
    write_tensors(folder, made.tensors)


def forget(folder: Path) -> None:
    """Take the checkpoint's files out of the system's cache."""
    for file in folder.glob("*.safetensors"):
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def run(folder: Path, budget: str | None, prompt: int, tokens: int, cold: bool) -> dict[str, Any]:
    """Load and decode; what it took."""
    from mlx_lm.models.cache import make_prompt_cache

    start = time.perf_counter()
    model, _ = load_model(folder, expert_memory=budget)
    loaded = time.perf_counter() - start
    cache = make_prompt_cache(model)
    vocabulary = model.plan.sizes.vocab_size
    ids = mx.random.randint(0, vocabulary, (1, prompt), key=mx.random.key(5))
    # Greedy tokens of random weights soon repeat, and with them the experts; random ones do not.
    given = mx.random.randint(0, vocabulary, (1, 256), key=mx.random.key(6))
    mx.eval(ids, given)
    # Kernels are compiled or read from their cache at the first call.
    mx.eval(model(ids[:, :1]))
    if cold:
        forget(folder)
    trace.reset()
    start = time.perf_counter()
    token = model(ids, cache=cache)[:, -1].argmax(axis=-1, keepdims=True)
    mx.eval(token)
    prompted = time.perf_counter() - start
    before = trace.memory_total()
    trace.reset()
    found, times, digest = [token.item()], [], hashlib.sha256()
    for i in range(tokens):
        if cold:
            forget(folder)
        start = time.perf_counter()
        logits = model(given[:, i : i + 1], cache=cache)[:, -1]
        token = logits.argmax(axis=-1, keepdims=True)
        mx.eval(logits, token)
        times.append(time.perf_counter() - start)
        if i < 8:
            digest.update(np.array(logits.astype(mx.float32)).tobytes())
        found.append(token.item())
    total = trace.memory_total()
    row: dict[str, Any] = {
        "budget": budget or "whole",
        "cold": cold,
        "load_s": round(loaded, 2),
        "prompt_s": round(prompted, 3),
        "token_ms": round(median(times) * 1e3, 1),
        "mean_ms": round(sum(times) / len(times) * 1e3, 1),
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "device_peak_bytes": mx.get_peak_memory(),
        "paths": sorted({(each.path, each.rows, each.reason) for each in trace.snapshot()}),
        "tokens": found,
        "logits_of_8_tokens": digest.hexdigest()[:16],
    }
    if total is not None and before is not None:
        row |= {
            "hit_rate": round(total.hit_rate, 4),
            "token_mb": round(total.bytes_read / tokens / 1e6, 1),
            "stall_ms": round(total.stall / tokens * 1e3, 1),
            "prompt_hit_rate": round(before.hit_rate, 4),
            "prompt_gb": round(before.bytes_read / 1e9, 3),
        }
    return row


def planned(folder: Path, budget: str) -> int:
    """What `registry inspect` says the peak will be."""
    command = [sys.executable, "-m", "mlx_experts", "inspect", str(folder), "--json", "--context", "256"]
    done = subprocess.run([*command, "--expert-memory", budget], stdout=subprocess.PIPE, check=True)
    peak: int = json.loads(done.stdout)["memory"]["peak_bytes"]
    return peak


def compare(arguments: argparse.Namespace) -> None:
    """Each budget in a process of its own, and the whole model."""
    wanted = arguments.budgets.split(",") + ([""] if arguments.whole else [])
    rows = []
    for budget in wanted:
        for cold in (False, True) if arguments.cold and budget else (False,):
            # Reads from a disk are slow, and a few of them say as much.
            count = min(8, arguments.tokens) if cold else arguments.tokens
            options = ["--prompt", str(arguments.prompt), "--tokens", str(count)]
            options += ["--expert-memory", budget] if budget else []
            command = [sys.executable, __file__, "run", str(arguments.folder), *options]
            done = subprocess.run(command + ["--cold"] * cold, stdout=subprocess.PIPE, text=True, check=True)
            row = json.loads(done.stdout)
            if budget:
                row["plan_bytes"] = planned(arguments.folder, budget)
            rows.append(row)
            print(json.dumps(row), flush=True)
    few = min(len(row["tokens"]) for row in rows)
    equal = all(row["tokens"][:few] == rows[-1]["tokens"][:few] for row in rows)
    logits = len({row["logits_of_8_tokens"] for row in rows}) == 1
    print(json.dumps({"tokens_equal": equal, "logits_equal": logits, "processes": len(rows)}))


def main() -> None:
    """Read the arguments and do what they say."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    for verb in ("make", "run", "compare"):
        each = verbs.add_parser(verb)
        each.add_argument("folder", type=Path)
        if verb == "make":
            each.add_argument("--layers", type=int, default=24)
            continue
        each.add_argument("--prompt", type=int, default=8, help="tokens of the prompt")
        each.add_argument("--tokens", type=int, default=24, help="tokens to decode, at most 256")
        each.add_argument("--cold", action="store_true", help="empty the system's cache of the files first")
        if verb == "run":
            each.add_argument("--expert-memory")
            each.add_argument("--limit", help="most bytes of data that the process may have")
        else:
            each.add_argument("--budgets", default="1GB,2GB,4GB")
            each.add_argument("--whole", action="store_true", help="the whole model too")
    arguments = parser.parse_args()
    if arguments.verb == "make":
        make(arguments.folder, arguments.layers)
    elif arguments.verb == "compare":
        compare(arguments)
    else:
        if arguments.limit:
            most = bytes_of(arguments.limit)
            resource.setrlimit(resource.RLIMIT_DATA, (most, most))
        row = run(
            arguments.folder, arguments.expert_memory, arguments.prompt, arguments.tokens, arguments.cold
        )
        print(json.dumps(row))


if __name__ == "__main__":
    main()
