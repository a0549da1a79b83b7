"""Decode and prefill of one model shape on the CPU, this package and llama.cpp in turn.

Both hold random weights of the same shape in 4 bits: `FOLDER` is a checkpoint for this package, `GGUF` a Q4_0
file of the same sizes. llama.cpp comes prebuilt from npm, outside the repository:

    npm init -y && npm i --ignore-scripts node-llama-cpp @node-llama-cpp/linux-x64

Run it on a machine with nothing else running: llama.cpp's threads spin.

    python scripts/compare_llama_cpp.py FOLDER GGUF --node-folder WHERE_NPM_INSTALLED
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import time
from pathlib import Path

import mlx.core as mx
from mlx_lm.generate import generate_step

from mlx_experts import load_model
from mlx_experts.engine.models.model import LastPosition, Model

CONTEXT = 32

LLAMA = """
import {getLlama} from "node-llama-cpp";
const [file, tokens, threads, ...prompts] = process.argv.slice(2);
const llama = await getLlama({gpu: false, build: "never", maxThreads: +threads});
const model = await llama.loadModel({modelPath: file});
const median = (times) => times.sort((a, b) => a - b)[times.length >> 1];
const prompt = (length) => Array.from({length}, (_, i) => 300 + (i * 37) % 9000);
const options = {temperature: 0, yieldEogToken: true};
for (const length of prompts.map(Number)) {
  const context = await model.createContext({contextSize: 1024, threads: +threads, batchSize: 512});
  const sequence = context.getSequence(), times = [];
  for (let round = 0; round < 3; round++) {
    await sequence.clearHistory();
    const start = performance.now();
    for await (const _ of sequence.evaluate(prompt(length), options)) break;
    times.push(performance.now() - start);
  }
  console.log(`prefill ${length} ${median(times)}`);
  await context.dispose();
}
const context = await model.createContext({contextSize: 512, threads: +threads, batchSize: 64});
const times = [];
let last = performance.now();
for await (const _ of context.getSequence().evaluate(prompt(32), options)) {
  times.push(performance.now() - last);
  last = performance.now();
  if (times.length >= +tokens + 4) break;
}
console.log(`decode 1 ${median(times.slice(4))}`);
process.exit(0);
"""

Times = dict[tuple[str, int], float]


def llama(gguf: Path, node_folder: Path, tokens: int, threads: int, prompts: list[int]) -> Times:
    """Median milliseconds of llama.cpp by ``(kind, rows)``."""
    script = node_folder / "compare.mjs"
    script.write_text(LLAMA)
    command = ["node", script.name, str(gguf.resolve()), str(tokens), str(threads), *map(str, prompts)]
    ran = subprocess.run(command, cwd=node_folder, capture_output=True, text=True, check=True)
    lines = [line.split() for line in ran.stdout.splitlines() if line.startswith(("prefill", "decode"))]
    return {(kind, int(rows)): float(ms) for kind, rows, ms in lines}


def ours(model: Model, tokens: int, prompts: list[int]) -> Times:
    """Median milliseconds of this package by ``(kind, rows)``."""
    found: Times = {}
    for length in prompts:
        times = [next(_spans(model, length, 1)) for _ in range(3)]
        found["prefill", length] = statistics.median(times)
    found["decode", 1] = statistics.median(list(_spans(model, CONTEXT, tokens + 4))[4:])
    return found


def _spans(model: Model, length: int, tokens: int):
    """Milliseconds until each next token."""
    prompt = (mx.arange(length) * 37) % 9000 + 300
    last = time.perf_counter()
    # As this package's own `stream_generate` calls it: no logits but the last position's.
    for _ in generate_step(prompt, LastPosition(model), max_tokens=tokens):
        now = time.perf_counter()
        yield (now - last) * 1e3
        last = now


def main() -> None:
    """Print one line for each kind and round."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("gguf", type=Path)
    parser.add_argument("--node-folder", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=40)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompts", type=int, nargs="*", default=[64, 256])
    parser.add_argument("--activations", nargs="*", default=["float32", "int8"])
    asked = parser.parse_args()
    models = {a: load_model(asked.folder, cpu_activations=a)[0] for a in asked.activations}
    for model in models.values():
        ours(model, 2, asked.prompts)  # compiles and reads the weights
    for _ in range(asked.rounds):
        theirs = llama(asked.gguf, asked.node_folder, asked.tokens, asked.threads, asked.prompts)
        mine = {name: ours(model, asked.tokens, asked.prompts) for name, model in models.items()}
        for (kind, rows), ms in theirs.items():
            beside = "  ".join(f"{name} {found[kind, rows]:8.1f} ms" for name, found in mine.items())
            print(f"{kind:8} {rows:4}  llama.cpp {ms:8.1f} ms  mlx-experts {beside}", flush=True)


if __name__ == "__main__":
    main()
