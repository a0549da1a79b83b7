"""Make a case of next-token prediction: a tiny random checkpoint, and what its prediction layer guesses.

transformers drops these layers, so the layer is put together here from transformers' own decoder layer, norms
and head, in the order of SGLang 0.5.23 (srt/models/deepseek_nextn.py, glm4_moe_nextn.py, qwen3_next_mtp.py).

    pip install torch==2.13.0 transformers==5.24.0 safetensors numpy
    python scripts/make_prediction_case.py

Each case under tests/data/prediction holds config.json, model.safetensors in the names of the Hub and
reference.npz: input_ids [1, 9], guesses [1, 8, V] for the tokens from the third on, all float32.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek
from transformers.models.glm4_moe import modeling_glm4_moe as glm
from transformers.models.qwen3_next import modeling_qwen3_next as qwen

OUT = Path(__file__).parent.parent / "tests" / "data" / "prediction"
SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 24,
    "moe_intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-3,
    "rope_theta": 5000.0,
    "attn_implementation": "eager",
}
DEEPSEEK = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 12,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "num_key_value_heads": 4,
}
GLM = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "head_dim": 8,
    "use_qk_norm": True,
}
QWEN = {
    "num_experts": 4,
    "shared_expert_intermediate_size": 20,
    "head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
    "layer_types": ["linear_attention", "full_attention"],
}


class Prediction(torch.nn.Module):
    """The prediction layer: a decoder layer behind a projection of two norms, and a norm before the head."""

    def __init__(self, config: Any, layer: Any, norm: Any) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.enorm, self.hnorm, self.norm = (norm(width, eps=eps) for _ in range(3))
        self.eh_proj = torch.nn.Linear(2 * width, width, bias=False)
        # Layers with experts and full attention stand last.
        self.layer = layer(config, config.num_hidden_layers - 1)

    def forward(self, model: Any, ids: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [1, L - 1, V] after the tokens ``ids`` [1, L] from the second on."""
        embedded = model.model.embed_tokens(ids[:, 1:])
        h = self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(hidden[:, :-1])], dim=-1))
        length = h.shape[1]
        positions = torch.arange(length)[None]
        mask = torch.full((length, length), torch.finfo(h.dtype).min).triu(1)[None, None]
        rotated = model.model.rotary_emb(h, positions)
        out = self.layer(h, position_embeddings=rotated, attention_mask=mask, position_ids=positions)
        return model.lm_head(self.norm(out[0] if isinstance(out, tuple) else out))


def randomise(module: torch.nn.Module) -> None:
    """Values that show where one is skipped; norms near what they start with."""
    for name, parameter in [*module.named_parameters(), *module.named_buffers()]:
        if not parameter.dtype.is_floating_point or "inv_freq" in name:
            continue
        noise = torch.randn_like(parameter)
        scale = 0.2 if parameter.ndim < 2 else parameter.shape[-1] ** -0.5
        parameter.data = parameter.data * (parameter.ndim < 2) + scale * noise


def make(family: str, model: Any, prediction: Prediction, names: dict[str, str]) -> None:
    """Write one case; ``names`` says where checkpoints keep each part of the prediction layer."""
    ids = torch.randint(3, model.config.vocab_size, (1, 9))
    with torch.no_grad():
        hidden = model.model(ids).last_hidden_state
        guesses = prediction(model, ids, hidden)
    folder = OUT / family
    folder.mkdir(parents=True, exist_ok=True)
    # save_pretrained takes the experts apart, as the files of the Hub have them.
    model.save_pretrained(folder, safe_serialization=True)
    carrier = type(model)(model.config)
    carrier.model.layers[-1].load_state_dict(prediction.layer.state_dict())
    carrier.save_pretrained(folder / "carrier", safe_serialization=True)
    from safetensors.torch import load_file

    tensors = load_file(folder / "model.safetensors")
    last = f"model.layers.{model.config.num_hidden_layers - 1}."
    for name, value in load_file(folder / "carrier" / "model.safetensors").items():
        if name.startswith(last):
            tensors[names["layer"] + name.removeprefix(last)] = value
    for part in ("enorm", "hnorm", "eh_proj", "norm"):
        tensors[f"{names[part]}.weight"] = getattr(prediction, part).weight.data
    if family != "qwen3_next":
        # Files of the Hub repeat these.
        tensors[f"{names['layer']}embed_tokens.weight"] = model.model.embed_tokens.weight.data.clone()
        tensors[f"{names['layer']}shared_head.head.weight"] = model.lm_head.weight.data.clone()
    tensors = {name: value.clone().contiguous() for name, value in tensors.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    for path in (folder / "carrier").iterdir():
        path.unlink()
    (folder / "carrier").rmdir()
    (folder / "generation_config.json").unlink(missing_ok=True)
    config = json.loads((folder / "config.json").read_text())
    config["num_nextn_predict_layers"] = 1
    (folder / "config.json").write_text(json.dumps(config, indent=1, sort_keys=True) + "\n")
    np.savez(folder / "reference.npz", input_ids=ids.numpy(), guesses=guesses.numpy())


def main() -> None:
    torch.manual_seed(5)
    for family, source, more, prefix in (
        ("deepseek_v3", deepseek, DEEPSEEK, "DeepseekV3"),
        ("glm4_moe", glm, GLM, "Glm4Moe"),
        ("qwen3_next", qwen, QWEN, "Qwen3Next"),
    ):
        config = getattr(source, f"{prefix}Config")(**{**SIZES, **more})
        model = getattr(source, f"{prefix}ForCausalLM")(config).float().eval()
        layer, norm = getattr(source, f"{prefix}DecoderLayer"), getattr(source, f"{prefix}RMSNorm")
        prediction = Prediction(config, layer, norm).float().eval()
        randomise(model)
        randomise(prediction)
        at = f"model.layers.{config.num_hidden_layers}."
        names = {"layer": at, "norm": f"{at}shared_head.norm"}
        names |= {part: f"{at}{part}" for part in ("enorm", "hnorm", "eh_proj")}
        if family == "qwen3_next":
            names = {"layer": "mtp.layers.0.", "norm": "mtp.norm", "eh_proj": "mtp.fc"}
            names |= {"enorm": "mtp.pre_fc_norm_embedding", "hnorm": "mtp.pre_fc_norm_hidden"}
        make(family, model, prediction, names)


if __name__ == "__main__":
    main()
