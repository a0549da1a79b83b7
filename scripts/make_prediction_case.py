"""Make a case of next-token prediction: a tiny random checkpoint, and what its prediction layer guesses.

transformers 5.24 runs such layers for some families (``modeling_layers.MtpModel``); there the guesses are
what it gives for the file of the case. For the others it drops them. Their layer is put together here from
its own decoder layer, norms and head, in the order of the code that the family file names as its reference.

    pip install torch==2.13.0 transformers==5.24.0 safetensors numpy
    python scripts/make_prediction_case.py [FAMILY ...]

Each case under tests/data/prediction holds config.json, model.safetensors in the names of the Hub and
reference.npz: input_ids [1, 9], guesses [1, 8, V] for the tokens from the third on, all float32.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers.modeling_layers import MtpModel

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
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WINDOW = 4
LATENT = {
    "q_lora_rank": 12,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "num_key_value_heads": 4,
}
GROUPED = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
DELTA = {
    "num_experts": 4,
    "shared_expert_intermediate_size": 20,
    "head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
    "layer_types": ["linear_attention", "full_attention"],
}
BOTH_ROTATIONS = {
    "full_attention": {"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 0.5},
}
# Where checkpoints keep the parts: as the layer past the last one, or apart under `mtp`.
NUMBERED = {part: f"{{layer}}{part}" for part in ("enorm", "hnorm", "eh_proj")}
NUMBERED |= {"layer": "model.layers.{count}.", "norm": "{layer}shared_head.norm"}
FINAL = {**NUMBERED, "norm": "{layer}final_layernorm"}
APART = {
    "layer": "mtp.layers.0.",
    "norm": "mtp.norm",
    "eh_proj": "mtp.fc",
    "enorm": "mtp.pre_fc_norm_embedding",
    "hnorm": "mtp.pre_fc_norm_hidden",
}
COPIES = {"embed_tokens": "model.embed_tokens", "shared_head.head": "lm_head"}


@dataclass
class Case:
    """One family's case.

    Args:
        module: transformers' module of the family.
        classes: what its classes are called before `Config`, `ForCausalLM` and so on.
        config: beside or over SIZES.
        names: where checkpoints keep each part of the layer.
        like: the layer that the prediction layer is one of.
        layer: changes of the config for the layer alone.
        attends: its type, where rotations or masks differ by it.
        copies: tensors of the model that checkpoints repeat in the layer.
        renames: parts of the layer that checkpoints name otherwise, as regular expressions.
        wrap: changes tensors' names and the config to those of the released checkpoints.
        reads: transformers runs the layer itself.
        configured: what its class of settings is called.
        states: what the config says of such layers.
    """

    module: str
    classes: str
    config: dict[str, Any]
    names: dict[str, str] = field(default_factory=lambda: NUMBERED)
    like: int = 1
    layer: dict[str, Any] = field(default_factory=dict)
    attends: str = ""
    copies: dict[str, str] = field(default_factory=dict)
    renames: dict[str, str] = field(default_factory=dict)
    wrap: Callable[[dict[str, Any], dict[str, Any]], tuple[dict[str, Any], dict[str, Any]]] | None = None
    reads: bool = False
    configured: str = "Config"
    states: dict[str, Any] = field(default_factory=lambda: {"num_nextn_predict_layers": 1})

    def get(self, name: str) -> Any:
        """A class of the family."""
        source = import_module(f"transformers.models.{self.module}.modeling_{self.module}")
        return getattr(source, f"{self.classes}{name}")


class Parts(torch.nn.Module):
    """The layer where transformers has none: a decoder layer behind a projection of two norms, and a norm."""

    def __init__(self, case: Case, config: Any) -> None:
        super().__init__()
        width, norm = config.hidden_size, case.get("RMSNorm")
        self.attends = case.attends
        self.enorm, self.hnorm, self.norm = (norm(width, eps=config.rms_norm_eps) for _ in range(3))
        self.eh_proj = torch.nn.Linear(2 * width, width, bias=False)
        self.layer = case.get("DecoderLayer")(config, case.like)

    def forward(self, model: Any, ids: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [1, L - 1, V] after the tokens ``ids`` [1, L] from the second on."""
        embedded = model.model.embed_tokens(ids[:, 1:])
        h = self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(hidden[:, :-1])], dim=-1))
        length = h.shape[1]
        positions = torch.arange(length)[None]
        lowest = torch.finfo(h.dtype).min
        mask = torch.full((length, length), lowest).triu(1)
        if self.attends == "sliding_attention":
            mask += torch.full((length, length), lowest).tril(-WINDOW)
        nested = "full_attention" in (getattr(model.config, "rope_parameters", None) or {})
        kind = (self.attends,) if nested else ()
        rotated = model.model.rotary_emb(h, positions, *kind)
        mask = mask.clamp(min=lowest)[None, None]
        out = self.layer(h, position_embeddings=rotated, attention_mask=mask, position_ids=positions)
        return model.lm_head(self.norm(out[0] if isinstance(out, tuple) else out))


def randomise(module: torch.nn.Module) -> None:
    """Values that show where one is skipped; norms near what they start with."""
    for name, parameter in [*module.named_parameters(), *module.named_buffers()]:
        if not parameter.dtype.is_floating_point or "inv_freq" in name:
            continue
        noise = torch.randn_like(parameter)
        scale = 0.2 if parameter.ndim < 2 else parameter.shape[-1] ** -0.5
        kept = parameter.data if parameter.ndim < 2 and "norm" in name else 0.0
        parameter.data = kept + scale * noise


def saved(model: Any) -> dict[str, torch.Tensor]:
    """A model's tensors as transformers writes them, which takes experts apart as the Hub has them."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder, safe_serialization=True)
        return load_file(Path(folder) / "model.safetensors")


def layer_tensors(case: Case, config: Any, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A decoder layer's tensors as checkpoints name them, without the layer's own path."""
    carrier = case.get("ForCausalLM")(config)
    carrier.model.layers[case.like].load_state_dict(state)
    at, found = f"model.layers.{case.like}.", {}
    for name, value in saved(carrier).items():
        if name.startswith(at):
            name = name.removeprefix(at)
            for old, new in case.renames.items():
                name = re.sub(old, new, name)
            found[name] = value
    return found


def make(family: str, case: Case) -> None:
    """Write one case."""
    config = case.get(case.configured)(**{**SIZES, **case.config})
    own = case.get(case.configured)(**{**SIZES, **case.config, **case.layer})
    model = case.get("ForCausalLM")(config).float().eval()
    randomise(model)
    ids = torch.randint(3, config.vocab_size, (1, 9))
    with torch.no_grad():
        hidden = model.model(ids).last_hidden_state
    extra = MtpModel(model, 1).float().eval() if case.reads else Parts(case, own).float().eval()
    layer = extra.layers[0] if case.reads else extra
    randomise(layer)
    block, norm = (layer.mtp_block, layer.post_norm) if case.reads else (layer.layer, layer.norm)
    at = {
        "count": config.num_hidden_layers,
        "layer": case.names["layer"].format(count=config.num_hidden_layers),
    }
    tensors = saved(model)
    head = tensors.get("lm_head.weight", model.lm_head.weight.data)
    for name, value in layer_tensors(case, own, block.state_dict()).items():
        tensors[at["layer"] + name] = value
    for part, module in (
        ("enorm", layer.enorm),
        ("hnorm", layer.hnorm),
        ("eh_proj", layer.eh_proj),
        ("norm", norm),
    ):
        tensors[f"{case.names[part].format(**at)}.weight"] = module.weight.data
    for copy, source in case.copies.items():
        tensors[f"{at['layer']}{copy}.weight"] = head if source == "lm_head" else tensors[f"{source}.weight"]
    written = {**json.loads(config.to_json_string()), "architectures": [type(model).__name__], **case.states}
    if case.wrap is not None:
        tensors, written = case.wrap(tensors, written)
    folder = OUT / family
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: value.clone().contiguous() for name, value in tensors.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(written, indent=1, sort_keys=True) + "\n")
    with torch.no_grad():
        guesses = read(case, folder, ids) if case.reads else extra(model, ids, hidden)
        if case.reads:
            direct = guess(extra, model, ids, hidden)
            assert torch.allclose(direct, guesses, atol=1e-5), "what is read is not what was written"
    np.savez(folder / "reference.npz", input_ids=ids.numpy(), guesses=guesses.numpy())
    print(f"{family}: {len(tensors)} tensors, {'transformers runs it' if case.reads else 'put together'}")


def read(case: Case, folder: Path, ids: torch.Tensor) -> torch.Tensor:
    """What transformers guesses from the files that were written."""
    model = case.get("ForCausalLM").from_pretrained(folder, attn_implementation="eager").float().eval()
    # It states the number of the largest released model's layer.
    count = model.config.num_hidden_layers
    model._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{count}\..*", r"^mtp\."]
    extra = MtpModel.from_pretrained(model).float().eval()
    return guess(extra, model, ids, model.model(ids).last_hidden_state)


def guess(extra: MtpModel, model: Any, ids: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """Logits [1, L - 1, V] by transformers' prediction layer."""
    positions = torch.arange(1, ids.shape[1])[None]
    states = extra.forward_layer(0, hidden[:, :-1], positions, None, input_ids=ids[:, 1:])
    return model.lm_head(states)


def in_a_wrapper(tensors: dict[str, Any], config: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """As the released qwen3_5_moe is: a text model in one that sees, experts of a layer in two tensors."""
    outer = {"architectures": ["Qwen3_5MoeForConditionalGeneration"], "model_type": "qwen3_5_moe"}
    outer["tie_word_embeddings"] = config["tie_word_embeddings"]
    named = {re.sub(r"^model\.", "model.language_model.", name): value for name, value in tensors.items()}
    return named, {**outer, "text_config": config}


CASES = {
    "deepseek_v3": Case("deepseek_v3", "DeepseekV3", {**LATENT, **GROUPED}, copies=COPIES, reads=True),
    "glm4_moe": Case(
        "glm4_moe",
        "Glm4Moe",
        {**GROUPED, "n_group": 1, "head_dim": 8, "use_qk_norm": True},
        copies=COPIES,
        reads=True,
    ),
    "glm4_moe_lite": Case("glm4_moe_lite", "Glm4MoeLite", {**LATENT, **GROUPED, "n_group": 1}, copies=COPIES),
    "mellum": Case(
        "mellum",
        "Mellum",
        {
            "num_experts": 4,
            "head_dim": 8,
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": WINDOW,
            "num_mtp_layers": 1,
            "rope_parameters": {
                name: {**each, "partial_rotary_factor": 1.0} for name, each in BOTH_ROTATIONS.items()
            },
        },
        names=APART,
        like=0,
        attends="sliding_attention",
        reads=True,
        states={},
    ),
    "qwen3_next": Case("qwen3_next", "Qwen3Next", DELTA, names=APART),
    "qwen3_5_moe": Case(
        "qwen3_5_moe",
        "Qwen3_5Moe",
        DELTA,
        names=APART,
        configured="TextConfig",
        wrap=in_a_wrapper,
        states={"mtp_num_hidden_layers": 1},
    ),
    "mimo_v2_flash": Case(
        "mimo_v2_flash",
        "MiMoV2Flash",
        {
            "n_routed_experts": 4,
            "head_dim": 8,
            "v_head_dim": 6,
            "num_key_value_heads": 1,
            "layer_types": ["full_attention", "sliding_attention"],
            "mlp_layer_types": ["dense", "sparse"],
            "sliding_window": WINDOW,
            "rope_parameters": BOTH_ROTATIONS,
        },
        names={part: f"{{layer}}{part}" for part in ("enorm", "hnorm", "eh_proj")}
        | {"layer": "model.mtp.layers.0.", "norm": "{layer}final_layernorm"},
        layer={"mlp_layer_types": ["dense", "dense"]},
        attends="sliding_attention",
        renames={"^post_attention_layernorm": "pre_mlp_layernorm"},
        states={},
    ),
    "hy_v3": Case(
        "hy_v3",
        "HYV3",
        {"num_experts": 4, "num_shared_experts": 1, "head_dim": 8, "first_k_dense_replace": 1},
        names=FINAL,
    ),
    "exaone_moe": Case(
        "exaone_moe",
        "ExaoneMoe",
        {
            "num_experts": 4,
            "n_group": 1,
            "topk_group": 1,
            "head_dim": 8,
            "layer_types": ["sliding_attention", "full_attention"],
            "mlp_layer_types": ["dense", "sparse"],
            "sliding_window": WINDOW,
        },
        names=APART,
        like=0,
        attends="sliding_attention",
    ),
    "bailing_moe_v3": Case(
        "bailing_hybrid",
        "BailingHybrid",
        {
            **LATENT,
            "num_local_experts": 4,
            "num_experts_per_token": 2,
            "num_expert_group": 2,
            "topk_group": 1,
            "head_dim": 8,
            "layer_types": ["linear_attention", "full_attention"],
            "mlp_layer_types": ["dense", "sparse"],
        },
        names=FINAL,
    ),
}


def main() -> None:
    for family in sys.argv[1:] or CASES:
        torch.manual_seed(5)
        make(family, CASES[family])


if __name__ == "__main__":
    main()
