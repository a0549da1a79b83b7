"""Save what transformers computes for a checkpoint: python scripts/save_answers.py CHECKPOINT answers.npz

A checkpoint that brings code of its own needs a third word, --trust-remote-code, which runs that code.

The file holds input_ids [1, 16], logits [1, 16, V] and hidden_states [layers, 1, 16, H], the output of each
decoder layer, all in float32. `registry parity --checkpoint CHECKPOINT --reference answers.npz` compares. It
needs torch and transformers, in an environment of their own.
"""

import sys

import numpy as np
import torch
from transformers import AutoModelForCausalLM

checkpoint, answers, *trust = sys.argv[1:]
options = {"dtype": torch.float32, "attn_implementation": "eager"}
options["trust_remote_code"] = trust == ["--trust-remote-code"]
model = AutoModelForCausalLM.from_pretrained(checkpoint, **options).eval()
sizes = model.config.get_text_config()
ids = torch.randint(sizes.vocab_size, (1, 16), generator=torch.Generator().manual_seed(0))
lists = [each for each in model.modules() if isinstance(each, torch.nn.ModuleList)]
layers = next(each for each in lists if len(each) == sizes.num_hidden_layers)
states = []
for layer in layers:
    layer.register_forward_hook(
        lambda *call: states.append(call[2][0] if isinstance(call[2], tuple) else call[2])
    )
with torch.no_grad():
    logits = model(ids, use_cache=False).logits
arrays = {"input_ids": ids, "logits": logits, "hidden_states": torch.stack(states)}
np.savez(answers, **{name: array.numpy() for name, array in arrays.items()})
