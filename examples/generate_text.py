"""Loads a checkpoint and prints text as it is made, with the path that every expert call took.

python examples/generate_text.py path/to/checkpoint "A mixture-of-experts model"
"""

import sys

from mlx_experts import load, stream_generate, trace

model, tokenizer = load(sys.argv[1])
for piece in stream_generate(model, tokenizer, sys.argv[2], max_tokens=20):
    print(piece.text, end="", flush=True)
print("\n", trace, sep="\n")
