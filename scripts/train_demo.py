"""Make the bundled demo checkpoint: a small qwen3_moe that knows `scripts/demo_text` by heart.

    pip install torch==2.13.0        # not a dependency of the package
    python scripts/train_demo.py --out api/demo

The command trains a tokenizer and the model with transformers' own Qwen3MoeForCausalLM, converts the result
with `mlx_lm convert` to 4 bits, and stores the greedy text of the float32 reference (demo_reference.py) for
the tests. Seeds are fixed; torch does not promise equal bits between machines, so a new run may give other
weights of the same quality.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import demo_reference
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn.utils import parametrize
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

ROOT = Path(__file__).resolve().parent.parent
END = "<|endoftext|>"
PROMPT = "A mixture-of-experts model"
# Every third step reads long windows from anywhere; the others read short ones from where a prompt may begin,
# so that the text is known without what stands before it.
LONG, SHORT = (4, 512), (32, 64)

CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "decoder_sparse_step": 1,
    "eos_token_id": 0,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 128,
    "initializer_range": 0.05,
    "intermediate_size": 512,
    "max_position_embeddings": 1024,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 128,
    "norm_topk_prob": True,
    "num_attention_heads": 4,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "output_router_logits": False,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "router_aux_loss_coef": 0.01,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 1536,
}

TOKENIZER_CONFIG = {
    "add_bos_token": False,
    "bos_token": END,
    "clean_up_tokenization_spaces": False,
    "eos_token": END,
    "model_max_length": CONFIG["max_position_embeddings"],
    "pad_token": END,
    "tokenizer_class": "PreTrainedTokenizerFast",
}


def read_chapters(folder: Path) -> list[str]:
    """Every chapter as one string: its title, then its paragraphs, each unwrapped to one line."""
    chapters = []
    for path in sorted(folder.glob("*.md")):
        for body in path.read_text(encoding="utf-8").split("# ")[1:]:
            paragraphs = [" ".join(part.split()) for part in body.split("\n\n")]
            chapters.append("\n\n".join(part for part in paragraphs if part))
    return chapters


def train_tokenizer(chapters: list[str]) -> Tokenizer:
    """Byte-level BPE: any text can be encoded, and decoding gives it back unchanged."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=CONFIG["vocab_size"],
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(chapters, trainer)
    if tokenizer.get_vocab_size() != CONFIG["vocab_size"]:
        raise SystemExit(f"the text yields only {tokenizer.get_vocab_size()} tokens")
    return tokenizer


def window_starts(ids: list[int], tokenizer: Tokenizer) -> torch.Tensor:
    """Positions where a prompt is likely to begin: sentences once, titles and paragraphs three times."""
    starts = [0] * 3
    for i in range(1, len(ids) - 1):
        # The two line ends of a paragraph are two tokens.
        text = tokenizer.decode(ids[i - 1 : i + 1], skip_special_tokens=False)
        if text.endswith((END, "\n\n")):
            starts += [i + 1] * 3
        elif text.endswith((".", "?", ":")):
            starts.append(i + 1)
    return torch.tensor(starts)


class FakeQuant(torch.nn.Module):
    """Rounds a weight as MLX's affine quantisation will, and lets the gradient pass unchanged.

    One scale and one bias for 64 neighbours of a row; the end of the range that is larger in size is kept
    exact, and zero stays zero (MLX, `mx.quantize`).
    """

    def __init__(self, bits: int) -> None:
        super().__init__()
        self.steps = 2**bits - 1

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            groups = weight.bfloat16().float().unflatten(-1, (-1, 64))
            low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
            from_low = low.abs() > high.abs()
            scale = ((high - low) / self.steps).clamp(min=1e-7)
            scale = torch.where(from_low, scale, -scale)
            edge = torch.where(from_low, low, high)
            zero = (edge / scale).round()
            scale = torch.where(zero == 0, scale, edge / torch.where(zero == 0, 1.0, zero))
            bias = torch.where(zero == 0, 0.0, edge)
            level = ((groups - bias) / scale).round().clamp(0, self.steps)
            rounded = (level * scale.bfloat16().float() + bias.bfloat16().float()).flatten(-2)
        return weight + (rounded - weight).detach()


def quantised_leaves(model: Qwen3MoeForCausalLM) -> list[tuple[torch.nn.Module, str, int]]:
    """What `mlx_lm convert` will quantise: every matrix, the routers with 8 bits and the rest with 4."""
    leaves = []
    for path, module in model.named_modules():
        for name, leaf in module.named_parameters(recurse=False):
            if leaf.dim() > 1:
                leaves.append((module, name, 8 if path.endswith("mlp.gate") else 4))
    return leaves


def train(ids: torch.Tensor, starts: torch.Tensor, steps: int, quantised_from: float) -> Qwen3MoeForCausalLM:
    """Trains on windows of the text; from the given part of the steps on the weights are seen as quantised.

    Args:
        ids: the whole text, (tokens,).
        starts: positions of `ids` where the short windows begin; the long ones begin anywhere.
    """
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**CONFIG, "torch_dtype": "float32"}))
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}],
        betas=(0.9, 0.98),
    )
    leaves = quantised_leaves(model)
    looped = torch.cat([ids, ids[: LONG[1]]])
    warmup, began, mean = steps // 20, time.time(), 8.0
    for step in range(steps):
        if step == int(steps * quantised_from):
            for module, name, bits in leaves:
                parametrize.register_parametrization(module, name, FakeQuant(bits))
        rate = (
            3e-3 * min(1.0, (step + 1) / warmup) * (0.01 + 0.99 * (1 + math.cos(math.pi * step / steps)) / 2)
        )
        for group in optimizer.param_groups:
            group["lr"] = rate
        count, length = SHORT if step % 3 else LONG
        choices = starts if step % 3 else torch.arange(len(ids))
        begins = choices[torch.randint(len(choices), (count,))]
        batch = torch.stack([looped[b : b + length] for b in begins.tolist()])
        with parametrize.cached():
            out = model(input_ids=batch, labels=batch, output_router_logits=True, use_cache=False)
        optimizer.zero_grad(set_to_none=True)
        out.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        balance = out.aux_loss.item()
        if step % 3 == 0:
            mean += 0.1 * (out.loss.item() - model.router_aux_loss_coef * balance - mean)
        if step % 100 == 0 or step == steps - 1:
            print(
                f"step {step:5d}  loss {mean:.3f}  balance {balance:.2f}  {time.time() - began:.0f} s",
                flush=True,
            )
    for module, name, _ in leaves:
        if parametrize.is_parametrized(module, name):
            parametrize.remove_parametrizations(module, name, leave_parametrized=False)
    return model.eval()


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    _write_json(folder / "tokenizer_config.json", TOKENIZER_CONFIG)


def convert(model: Qwen3MoeForCausalLM, tokenizer: Tokenizer, out: Path, python: str) -> None:
    """Saves the model as the Hub would hold it and lets mlx-lm quantise it into `out`."""
    with tempfile.TemporaryDirectory() as scratch:
        hub, mlx = Path(scratch, "hub"), Path(scratch, "mlx")
        model.bfloat16().save_pretrained(hub)
        # transformers 5 writes renamed keys; the bundled config keeps the spelling that mlx-lm reads.
        _write_json(hub / "config.json", CONFIG)
        _write_json(
            hub / "generation_config.json", {"bos_token_id": 0, "do_sample": False, "eos_token_id": 0}
        )
        save_tokenizer(tokenizer, hub)
        command = [python, "-m", "mlx_lm", "convert", "--hf-path", hub, "--mlx-path", mlx, "-q"]
        command += ["--q-bits", "4", "--q-group-size", "64"]
        subprocess.run([str(part) for part in command], check=True)
        out.mkdir(parents=True, exist_ok=True)
        for name in ("config.json", "generation_config.json", "model.safetensors"):
            shutil.copy(mlx / name, out / name)
    save_tokenizer(tokenizer, out)


def _write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "api/demo", help="folder of the checkpoint")
    parser.add_argument("--reference", type=Path, default=ROOT / "tests/data/demo_greedy.json")
    parser.add_argument("--text", type=Path, default=ROOT / "scripts/demo_text")
    parser.add_argument("--steps", type=int, default=1600)
    parser.add_argument("--quantised-from", type=float, default=0.6)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--mlx-python", default=sys.executable, help="a Python that has mlx-lm")
    args = parser.parse_args()

    torch.manual_seed(0)
    torch.set_num_threads(args.threads)
    chapters = read_chapters(args.text)
    tokenizer = train_tokenizer(chapters)
    ids = tokenizer.encode("".join(chapter + END for chapter in chapters)).ids
    print(f"{len(chapters)} chapters, {sum(len(c.split()) for c in chapters)} words, {len(ids)} tokens")
    model = train(torch.tensor(ids), window_starts(ids, tokenizer), args.steps, args.quantised_from)
    convert(model, tokenizer, args.out, args.mlx_python)
    demo_reference.write(args.out, PROMPT, args.reference)


if __name__ == "__main__":
    main()
