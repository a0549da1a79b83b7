"""Time generating on this machine: alone, with drafts, several at once, and spread over ranks.

    python scripts/time_generation.py [--model PATH] [--tokens 128] [--write]
    python scripts/time_generation.py --ranks 2 --backend nccl --model PATH

Run it on an idle machine. A time is the shortest of several. Tokens of every way are compared with those of
one process, and a difference ends the script. Ranks are started by ``mlx.launch`` and load the model as
mlx-lm's tools do, through this package's ``sharded_load``. ``--write`` puts the table into docs/mlx-lm.md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm import utils
from mlx_lm.generate import generate_step

from mlx_experts import batch_generate, load, stream_generate, trace
from mlx_experts.engine.loading.doors import Doors, open_doors
from mlx_experts.engine.loading.speculative import Account
from mlx_experts.registry.errors import RegistryError

ROOT = Path(__file__).parent.parent
DEMO, PAGE = ROOT / "api" / "demo", ROOT / "docs" / "mlx-lm.md"
BEGIN, END = "<!-- times: scripts/time_generation.py -->", "<!-- end of times -->"
PROMPT = "A mixture-of-experts model"
BATCH, DRAFTS, REPEATS = 8, 3, 3


@dataclass
class Row:
    """One way of generating.

    Args:
        way: what it is.
        seconds: of one token of one sequence.
        paths: what experts took, as the trace has it.
    """

    way: str
    seconds: float
    paths: str = ""


def shortest(run: Callable[[], Any]) -> tuple[float, Any]:
    """The shortest of several runs, after one that compiles, and what the last gave."""
    run()
    times = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        found = run()
        times.append(time.perf_counter() - began)
    return min(times), found


def paths() -> str:
    """The paths of experts that were counted, with their numbers of rows."""
    rows: dict[str, set[str]] = {}
    for row in trace.snapshot():
        rows.setdefault(row.path, set()).add(row.rows)
    return "; ".join(f"{path} {', '.join(sorted(found))}" for path, found in sorted(rows.items()))


def alone(model: Any, tokenizer: Any, tokens: int) -> Iterator[Row]:
    """Plain decoding, drafts of the model itself, of its prediction layer, and eight at once."""
    ids = tokenizer.encode(PROMPT)

    def stream(**options: Any) -> list[int]:
        return [r.token for r in stream_generate(model, tokenizer, ids, max_tokens=tokens, **options)]

    def measured(way: str, run: Callable[[], Any], made: int, want: Any) -> Row:
        trace.reset()
        seconds, found = shortest(run)
        if want is not None and found != want:
            sys.exit(f"error: {way} gives other tokens than plain decoding")
        return Row(way, seconds / made, paths())

    want = stream()
    made = len(want)
    yield measured("one sequence", stream, made, want)
    itself: dict[str, Any] = {"draft_model": model, "num_draft_tokens": DRAFTS}
    for name, adaptive in (("", True), (", drafting to the end", False)):
        account = Account()
        options = itself | {"adaptive_draft": adaptive, "drafting": account}
        row = measured(
            f"its own draft model, {DRAFTS} tokens{name}", lambda o=options: stream(**o), made, want
        )
        yield row
    prompts = [tokenizer.encode(f"{PROMPT} {i}") for i in range(BATCH)]

    def in_turn() -> int:
        return sum(1 for each in prompts for _ in stream_generate(model, tokenizer, each, max_tokens=tokens))

    def together() -> None:
        batch_generate(model, tokenizer, prompts, max_tokens=tokens, verbose=False)

    count = in_turn()
    yield measured(f"{BATCH} sequences in turn", in_turn, count, None)
    yield measured(f"{BATCH} sequences at once", together, count, None)


def one_rank(model: str, tokens: int, way: str, backend: str) -> dict[str, Any]:
    """Tokens and the time of one, on this rank of those that were started."""
    if backend == "ring":
        mx.set_default_device(mx.Device(mx.cpu))
    group = mx.distributed.init(strict=True, backend=backend)
    groups = {"pipeline": (group, None), "tensor": (None, group)}
    with open_doors(Doors(tell=lambda text: None)):
        loaded, tokenizer = utils.sharded_load(model, *groups[way])
    ids = mx.array(tokenizer.encode(PROMPT))
    seconds, found = shortest(lambda: [token for token, _ in generate_step(ids, loaded, max_tokens=tokens)])
    return {"seconds": seconds / len(found), "tokens": found}


def spread(model: str, tokens: int, ranks: int, backend: str) -> Iterator[Row]:
    """One process, and the model over several ranks by widths and by layers."""
    loaded, tokenizer = load(model)
    ids = mx.array(tokenizer.encode(PROMPT))
    seconds, want = shortest(lambda: [token for token, _ in generate_step(ids, loaded, max_tokens=tokens)])
    yield Row("1 rank", seconds / len(want))
    launch = [str(Path(sys.executable).parent / "mlx.launch"), "-n", str(ranks), "--backend", backend, "--"]
    for way in ("tensor", "pipeline"):
        command = [*launch, sys.executable, str(Path(__file__).resolve()), "--rank-of", way]
        command += ["--model", model, "--tokens", str(tokens), "--backend", backend]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        if done.returncode or len(lines) != ranks:
            sys.exit(f"error: {' '.join(command)}: exit {done.returncode}\n{done.stdout}\n{done.stderr}")
        for line in lines:
            if json.loads(line)["tokens"] != want:
                sys.exit(f"error: {ranks} ranks, {way}, give other tokens than one process")
        seconds = max(json.loads(line)["seconds"] for line in lines)
        yield Row(f"{ranks} ranks, {way}, {backend}", seconds)


def table(rows: list[Row], model: str) -> str:
    """The rows as a table of Markdown, under what they belong to."""
    device = mx.default_device().type.name.upper()
    name = Path(model).name if Path(model) != DEMO else "the demo"
    lines = [
        f"Of {name}, on {device} with {os.cpu_count()} cores ({platform.machine()}), mlx {version('mlx')}, "
        f"mlx-lm {version('mlx-lm')}:",
        "",
        "| way | ms a token | to the first of its kind | experts: path and rows |",
        "|---|--:|--:|---|",
    ]
    first = rows[0]
    for row in rows:
        if row.way.startswith(("1 rank", f"{BATCH} sequences in turn")):
            first = row
        ratio = row.seconds / first.seconds
        lines.append(f"| {row.way} | {1e3 * row.seconds:.2f} | {ratio:.2f} | {row.paths} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default=str(DEMO), help="checkpoint; the demo without")
    parser.add_argument("--tokens", type=int, default=128, help="tokens of each run")
    parser.add_argument("--ranks", type=int, default=2, help="ranks on this machine; 1 for none")
    parser.add_argument("--backend", default="ring", choices=("ring", "nccl", "mpi"), help="of the ranks")
    parser.add_argument("--only-ranks", action="store_true", help="leave out what one process does")
    parser.add_argument("--write", action="store_true", help="write the table to docs/mlx-lm.md")
    parser.add_argument("--rank-of", choices=("tensor", "pipeline"), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.rank_of:
        print(json.dumps(one_rank(asked.model, asked.tokens, asked.rank_of, asked.backend)), flush=True)
        return
    if asked.only_ranks and asked.ranks < 2:
        parser.error("--only-ranks times at least two ranks")
    rows = []
    try:
        if not asked.only_ranks:
            rows += alone(*load(asked.model), asked.tokens)
        if asked.ranks > 1:
            rows += spread(asked.model, asked.tokens, asked.ranks, asked.backend)
    except RegistryError as error:
        sys.exit(f"error: {error}")
    made = table(rows, asked.model)
    print(made)
    if asked.write:
        text = PAGE.read_text(encoding="utf-8")
        head, rest = text.split(BEGIN)
        PAGE.write_text(f"{head}{BEGIN}\n{made}\n{END}{rest.split(END)[1]}", encoding="utf-8")


if __name__ == "__main__":
    main()
