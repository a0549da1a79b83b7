"""The greedy text of the demo checkpoint by a second implementation: transformers in float32, without MLX.

    python scripts/demo_reference.py api/demo "A mixture-of-experts model" tests/data/demo_greedy.json

The 4-bit planes are unpacked here by hand, so an error in MLX's unpacking, in the routing or in the layout of
the experts makes the stored text and the text of the engine differ.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM

LENGTH = 160


def dequantise(words: torch.Tensor, scales: torch.Tensor, biases: torch.Tensor, bits: int) -> torch.Tensor:
    """Float32 weights, (..., out, in), of an affine plane of MLX.

    Args:
        words: (..., out, in * bits / 32) of 32 bits, the first weight in the lowest bits.
        scales: (..., out, in / group); a weight is scale * level + bias.
        biases: as `scales`.
    """
    shifts = torch.arange(0, 32, bits)
    levels = ((words.to(torch.int64)[..., None] >> shifts) & (2**bits - 1)).flatten(-2)
    groups = levels.float().unflatten(-1, (scales.shape[-1], -1))
    return (groups * scales.float()[..., None] + biases.float()[..., None]).flatten(-2)


def load_float32(folder: Path) -> Qwen3MoeForCausalLM:
    """Transformers' model with the dequantised weights of an mlx-lm checkpoint."""
    config = json.loads((folder / "config.json").read_text())
    quantisation = config.pop("quantization")
    config.pop("quantization_config")
    planes = load_file(folder / "model.safetensors")
    weights = {}
    for path in [name.removesuffix(".weight") for name in planes if name.endswith(".weight")]:
        weight = planes[f"{path}.weight"]
        if f"{path}.scales" in planes:
            bits = quantisation.get(path, quantisation)["bits"]
            weight = dequantise(weight, planes[f"{path}.scales"], planes[f"{path}.biases"], bits)
        weights[f"{path}.weight"] = weight.float()
    for layer in range(config["num_hidden_layers"]):
        mlp = f"model.layers.{layer}.mlp"
        gate, up, down = (
            weights.pop(f"{mlp}.switch_mlp.{leaf}.weight") for leaf in ("gate_proj", "up_proj", "down_proj")
        )
        weights[f"{mlp}.experts.gate_up_proj"] = torch.cat([gate, up], dim=1)
        weights[f"{mlp}.experts.down_proj"] = down
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**config, "torch_dtype": "float32"}))
    model.load_state_dict(weights, strict=True)
    return model.float().eval()


@torch.no_grad()
def greedy(
    model: Qwen3MoeForCausalLM, ids: list[int], length: int, end: int
) -> tuple[list[int], list[float]]:
    """The best tokens after `ids`, each from a full pass without a cache, and how far each one won by.

    Returns:
        tokens: up to `length` ids; an `end` token is the last one.
        gaps: for each token its logit less the second-best logit.
    """
    tokens: list[int] = []
    gaps: list[float] = []
    while len(tokens) < length and (not tokens or tokens[-1] != end):
        logits = model(input_ids=torch.tensor([ids + tokens]), use_cache=False).logits[0, -1]
        best, second = logits.topk(2).values.tolist()
        tokens.append(int(logits.argmax()))
        gaps.append(round(best - second, 3))
    return tokens, gaps


def write(folder: Path, prompt: str, path: Path) -> None:
    """Stores prompt, token ids, text and gaps as JSON and prints what a reader wants to know of them."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = load_float32(folder)
    ids = tokenizer.encode(prompt)
    tokens, gaps = greedy(model, ids, LENGTH, tokenizer.eos_token_id)
    text = tokenizer.decode(tokens)
    record = {"prompt": prompt, "prompt_ids": ids, "ids": tokens, "text": text, "gaps": gaps}
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in record.items())
    path.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")
    print(f"{prompt}{text}\n{len(tokens)} tokens, smallest gap {min(gaps)}")


if __name__ == "__main__":
    write(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
