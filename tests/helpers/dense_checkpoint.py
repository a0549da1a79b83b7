"""A tiny dense checkpoint that mlx-lm knows and no family describes, with the demo's tokenizer."""

from __future__ import annotations

import json
import shutil
from importlib.resources import files
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models import llama

DEMO = Path(str(files("mlx_experts").joinpath("demo")))
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "vocab_size": 1536,
    "tie_word_embeddings": True,
    "eos_token_id": 0,
}


def write_dense(folder: Path, **changes: Any) -> Path:
    """Write the checkpoint, its config with ``changes``."""
    mx.random.seed(3)
    model = llama.Model(llama.ModelArgs.from_dict(CONFIG))
    folder.mkdir(parents=True)
    tensors = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), tensors, metadata={"format": "mlx"})
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, folder / name)
    return folder
