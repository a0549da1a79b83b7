"""Run every command of the installed mlx-lm on this package's engine, and write the table of docs/mlx-lm.md.

Each command runs as a user starts it, ``python -m mlx_experts.run TOOL``, on the demo checkpoint and on data
made here; nothing is downloaded. `evaluate` needs ``lm_eval`` and ``datasets``, `dwq` and `perplexity` need
``datasets``, and the server is asked by the ``openai`` client: install those first.

    python scripts/run_mlx_lm_tools.py [TOOL ...] [--write]
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from importlib.metadata import distributions, version
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_experts import save_model
from mlx_experts.engine.models.known_families import catalog
from mlx_experts.engine.tools.family_check import build_tiny
from mlx_experts.engine.tools.mlx_lm_tools import tools
from mlx_experts.registry.resolve.tiny_config import tiny_config

ROOT = Path(__file__).parent.parent
DEMO, TEXT, PAGE = ROOT / "api" / "demo", ROOT / "scripts" / "demo_text", ROOT / "docs" / "mlx-lm.md"
BEGIN, END = "<!-- commands: scripts/run_mlx_lm_tools.py -->", "<!-- end of commands -->"
PROMPT = "A mixture-of-experts model"
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
LIMIT_S = 300
# What the table's versions are of, the commands' own needs among them.
PACKAGES = ("mlx-lm", "mlx", "lm_eval", "datasets", "openai")


@dataclass
class Ran:
    """One run of a command.

    Args:
        out: what stood on standard output.
        told: this package's lines on standard error.
    """

    out: str
    told: str

    @property
    def calls(self) -> tuple[int, int]:
        """Calls of experts that ran fused, and that were gathered."""
        found = re.findall(r"experts of mlx-experts: (\d+) calls fused, (\d+) gathered", self.told)
        return (sum(int(f) for f, _ in found), sum(int(g) for _, g in found))

    def then(self, *others: Ran) -> Ran:
        """This run and what was made of its results, as one."""
        return Ran(self.out, "\n".join([self.told, *(each.told for each in others)]))


class Place:
    """A folder with data, and the commands that run in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = str(DEMO)
        self.environment = {**os.environ, "HOME": str(folder / "home"), "HF_HUB_OFFLINE": "1"}
        self._write_data()

    def _write_data(self) -> None:
        text = "\n\n".join(path.read_text(encoding="utf-8") for path in sorted(TEXT.glob("*.md")))
        parts = [part for part in text.split("\n\n") if len(part) > 60]
        (self.folder / "data").mkdir()
        for name, some in (("train", parts[:24]), ("valid", parts[24:32]), ("test", parts[32:40])):
            lines = "".join(json.dumps({"text": part}) + "\n" for part in some)
            (self.folder / "data" / f"{name}.jsonl").write_text(lines)
        cache = self.folder / "home" / ".cache" / "mlx-lm"
        cache.mkdir(parents=True)
        (self.folder / "home" / ".cache" / "huggingface" / "hub").mkdir(parents=True)
        # mlx-lm's quantisers fetch their calibration text unless it lies here.
        (cache / "calibration_v5.txt").write_text(text[:6000])

    def run(self, tool: str, *arguments: str, stdin: str = "", launcher: tuple[str, ...] = ()) -> Ran:
        """Run a command to its end.

        Raises:
            RuntimeError: it failed, or did not say that this package's engine is under it.
        """
        command = [*launcher, sys.executable, "-m", "mlx_experts.run", tool, *arguments]
        done = subprocess.run(
            command,
            cwd=self.folder,
            env=self.environment,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        if done.returncode or "runs on the engine of mlx-experts" not in done.stderr:
            raise RuntimeError(f"{' '.join(command)}: exit {done.returncode}\n{done.stdout}\n{done.stderr}")
        return Ran(done.stdout, done.stderr)

    def whole(self) -> str:
        """The demo without quantisation, which the quantisers start from."""
        if not (self.folder / "whole").exists():
            self.run("convert", "--hf-path", self.model, "--mlx-path", "whole", "-d")
        return "whole"

    def chatting(self) -> str:
        """The demo with a chat template."""
        folder = self.folder / "chatting"
        if not folder.exists():
            shutil.copytree(DEMO, folder)
            (folder / "chat_template.jinja").write_text(TEMPLATE)
        return str(folder)

    def deepseek(self) -> str:
        """A tiny model of random weights of the one MoE family that mlx-lm's AWQ knows."""
        folder = self.folder / "deepseek_v2"
        if not folder.exists():
            family = catalog().load("deepseek_v2")
            yarn = {"type": "yarn", "factor": 2.0, "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32}
            yarn |= {"beta_slow": 1, "original_max_position_embeddings": 256}
            config = {**tiny_config(family), "vocab_size": 1536, "eos_token_id": 0, "q_lora_rank": None}
            config |= {"rope_scaling": yarn, "topk_method": "greedy"}
            save_model(folder, build_tiny(family, config), config)
            for name in ("tokenizer.json", "tokenizer_config.json"):
                shutil.copy(DEMO / name, folder / name)
        return str(folder)

    def dtypes(self, folder: str) -> set[str]:
        """Dtypes of the floating tensors of a checkpoint that was written."""
        tensors = mx.load(str(self.folder / folder / "model.safetensors")).values()
        return {
            str(t.dtype).removeprefix("mlx.core.") for t in tensors if mx.issubdtype(t.dtype, mx.floating)
        }

    def says(self, folder: str) -> Ran:
        """The run in which a written checkpoint continues the prompt, on this package's engine."""
        ran = self.run("generate", "--model", folder, "--prompt", PROMPT, "-m", "12", "--verbose", "False")
        needs(bool(ran.out.strip()), f"what was written to {folder} says nothing")
        needs(ran.calls[0] > 0, f"nothing of {folder} ran fused")
        return ran


def needs(condition: bool, what: str) -> None:
    """Raise where something that was promised did not happen."""
    if not condition:
        raise RuntimeError(what)


def generate(place: Place) -> tuple[str, Ran]:
    common = ("--model", place.model, "--prompt", PROMPT, "-m", "24", "--verbose", "False")
    plain = place.run("generate", *common)
    drafted = place.run("generate", *common, "--draft-model", place.model)
    needs(plain.out == drafted.out, "speculative decoding gives another text")
    needs(plain.calls[0] > 0, "nothing ran fused")
    return "text; the same text with `--draft-model`", plain


def cache_prompt(place: Place) -> tuple[str, Ran]:
    head, tail = PROMPT[:12], PROMPT[12:]
    for bound in ((), ("--max-kv-size", "64")):
        file = ("--prompt-cache-file", "cache.safetensors")
        ran = place.run("cache_prompt", "--model", place.model, "--prompt", head, *file, *bound)
        answer = place.run("generate", "--prompt", tail, *file, "-m", "8", "--verbose", "False").out
        needs(bool(answer.strip()), "the prompt cache was not continued")
    return "a prompt cache, with `--max-kv-size` too, that `generate` continues", ran


def chat(place: Place) -> tuple[str, Ran]:
    ran = place.run("chat", "--model", place.chatting(), "-m", "12", stdin="Hello\nr\nWhat is a router?\nq\n")
    needs(ran.calls[0] > 0, "nothing ran fused")
    return "two questions and a reset between them", ran


def benchmark(place: Place) -> tuple[str, Ran]:
    common = ("--model", place.model, "-p", "32", "-g", "16", "-n", "1")
    place.run("benchmark", *common, "-b", "4")
    ran = place.run("benchmark", *common)
    needs("Averages: prompt_tps=" in ran.out, "no averages")
    return "one sequence, and a batch of four", ran


def convert(place: Place) -> tuple[str, Ran]:
    ran = place.run("convert", "--hf-path", place.whole(), "--mlx-path", "eight", "-q", "--q-bits", "8")
    needs(place.dtypes("whole") == place.dtypes("eight") == {"bfloat16"}, "another dtype was written")
    for mode in ("mxfp4", "nvfp4"):
        place.run("convert", "--hf-path", place.whole(), "--mlx-path", mode, "-q", "--q-mode", mode)
    place.run(
        "convert", "--hf-path", place.whole(), "--mlx-path", "mixed", "-q", "--quant-predicate", "mixed_4_6"
    )
    said = [place.says(folder) for folder in ("whole", "eight", "mxfp4", "nvfp4", "mixed")]
    return "dequantised, then to 8 bits, mxfp4, nvfp4 and a mixed recipe; each generates", ran.then(*said)


def lora(place: Place) -> tuple[str, Ran]:
    data = ("--model", place.model, "--data", "data", "--adapter-path", "adapters", "--batch-size", "2")
    training = (
        "--train",
        "--iters",
        "3",
        "--num-layers",
        "2",
        "--max-seq-length",
        "64",
        "--val-batches",
        "1",
    )
    ran = place.run("lora", *data, *training)
    tested = place.run("lora", *data, "--test", "--test-batches", "1", "--max-seq-length", "64")
    needs("Test loss" in tested.out, "no loss")
    return "three steps on experts and attention, then a test of the adapters", ran


def fuse(place: Place) -> tuple[str, Ran]:
    if not (place.folder / "adapters").exists():
        lora(place)
    ran = place.run("fuse", "--model", place.model, "--adapter-path", "adapters", "--save-path", "fused")
    needs(place.dtypes("fused") == {"bfloat16"}, "another dtype was written")
    return "the adapters in the weights, in the checkpoint's dtype; it generates", ran.then(
        place.says("fused")
    )


def perplexity(place: Place) -> tuple[str, Ran]:
    data = ("--data-path", "data", "--num-samples", "8", "--sequence-length", "64")
    ran = place.run("perplexity", "--model", place.model, *data)
    found = re.search(r"Perplexity: ([\d.]+)", ran.out)
    needs(found is not None and float(found[1]) < 50, "no perplexity of a trained model")
    return "on a local data set", ran


def evaluate(place: Place) -> tuple[str, Ran]:
    task = {
        "task": "local",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": "questions.jsonl"}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "answer",
        "metric_list": [{"metric": "acc"}],
    }
    # YAML reads JSON.
    (place.folder / "local.yaml").write_text(json.dumps(task))
    questions = [
        {
            "question": "A mixture-of-experts model is a language",
            "choices": [" banana", " model"],
            "answer": 1,
        },
        {
            "question": "Each token uses only a small part of the",
            "choices": [" weights", " sea"],
            "answer": 0,
        },
    ]
    (place.folder / "questions.jsonl").write_text("".join(json.dumps(q) + "\n" for q in questions))
    ran = place.run("evaluate", "--model", place.model, "--tasks", "local.yaml", "--output-dir", "results")
    needs('"acc,none"' in ran.out, "no accuracy")
    return "a local multiple-choice task of lm_eval", ran


def gptq(place: Place) -> tuple[str, Ran]:
    size = ("--num-samples", "8", "--sequence-length", "64")
    ran = place.run("gptq", "--model", place.whole(), "--mlx-path", "gptq", *size)
    needs(place.dtypes("gptq") == {"bfloat16"}, "another dtype was written")
    return "4 bits on local calibration text; it generates", ran.then(place.says("gptq"))


def awq(place: Place) -> tuple[str, Ran]:
    size = ("--num-samples", "4", "--sequence-length", "32", "--group-size", "32")
    ran = place.run("awq", "--model", place.deepseek(), "--mlx-path", "awq", *size)
    needs("Loss reduction" in ran.out, "no loss")
    return "a tiny `deepseek_v2`: mlx-lm's AWQ knows no other family with experts", ran.then(
        place.says("awq")
    )


def dynamic_quant(place: Place) -> tuple[str, Ran]:
    ran = place.run("dynamic_quant", "--model", place.whole(), "--mlx-path", "dynamic")
    return "4 and 5 bits by sensitivity on local text; it generates", ran.then(place.says("dynamic"))


def dwq(place: Place) -> tuple[str, Ran]:
    data = ("--data-path", "data", "--num-samples", "4", "--max-seq-length", "64", "--batch-size", "4")
    ran = place.run("dwq", "--model", place.whole(), "--mlx-path", "dwq", "--group-size", "32", *data)
    return "one step of distillation on local text; it generates", ran.then(place.says("dwq"))


def manage(place: Place) -> tuple[str, Ran]:
    return "a scan of the local cache; it loads no model", place.run("manage", "--scan")


def share(place: Place) -> tuple[str, Ran]:
    (place.folder / "sent").mkdir()
    shutil.copy(DEMO / "config.json", place.folder / "sent" / "config.json")
    launcher = (str(Path(sys.executable).parent / "mlx.launch"), "-n", "2", "--")
    with tempfile.TemporaryDirectory() as there:
        arguments = ("--path", "sent", "--dst", f"{there}/got", "--tmpdir", there)
        ran = place.run("share", *arguments, launcher=launcher)
        needs((Path(there) / "got" / "config.json").exists(), "nothing was sent")
    return "a folder from one of two ranks to the other; it loads no model", ran


def upload(place: Place) -> tuple[str, Ran]:
    ran = place.run("upload", "--help")
    return "its help alone: it loads no model, and needs an account of the hub", ran


@contextmanager
def serving(place: Place, *arguments: str) -> Iterator[tuple[int, list[str]]]:
    """The server as a process; its port, and the lines of its standard error so far."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "mlx_experts.run", "server", "--port", str(port), *arguments]
    log = place.folder / "server.log"
    with log.open("w") as stderr:
        process = subprocess.Popen(command, cwd=place.folder, env=place.environment, stderr=stderr)
        lines: list[str] = []
        try:
            until = time.monotonic() + 120
            while "ready: warmed up" not in log.read_text():
                needs(process.poll() is None and time.monotonic() < until, log.read_text())
                time.sleep(0.1)
            yield port, lines
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
            lines += log.read_text().splitlines()


def client_of(port: int) -> Any:
    """OpenAI's own client of the server at a port."""
    from openai import OpenAI

    return OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)


def complete(client: Any, prompt: str = PROMPT, **options: Any) -> Any:
    """A completion of the model that the server was started with."""
    return client.completions.create(model="default_model", prompt=prompt, **options)


def server(place: Place) -> tuple[str, Ran]:
    with serving(place, "--model", place.chatting(), "--draft-model", place.model) as (port, _):
        drafted = complete(client_of(port), max_tokens=16).choices[0].text
    with serving(place, "--model", place.chatting()) as (port, lines):
        client = client_of(port)
        for check in (_completion, _chat, _stream, _stop, _logprobs, _cache, _eight, _tools):
            check(client)
        needs(complete(client, max_tokens=16).choices[0].text == drafted, "with a draft it answers otherwise")
    ran = Ran("", "\n".join(lines))
    needs(ran.calls[0] > 0, "nothing ran fused")
    asked = "completion, chat, stream, stop, log-probabilities, prompt-cache reuse, eight at once, tools"
    return f"by the `openai` client: {asked}; the same answer with `--draft-model`", ran


def _completion(client: Any) -> None:
    began = time.perf_counter()
    answer = complete(client, max_tokens=12)
    first = time.perf_counter() - began
    needs(answer.usage.completion_tokens == 12, "not as many tokens as asked for")
    began = time.perf_counter()
    again = complete(client, max_tokens=12)
    second = time.perf_counter() - began
    needs(again.choices[0].text == answer.choices[0].text, "the second answer differs")
    needs(first < 3 * second + 0.5, f"the first request took {first:.2f} s, the second {second:.2f} s")


def _chat(client: Any) -> None:
    answer = client.chat.completions.create(
        model="default_model", messages=[{"role": "user", "content": "What is a router?"}], max_tokens=8
    )
    needs(bool(answer.choices[0].message.content), "no answer")


def _stream(client: Any) -> None:
    whole = complete(client, max_tokens=12).choices[0].text
    parts = [part.choices[0].text for part in complete(client, max_tokens=12, stream=True) if part.choices]
    needs(len(parts) > 2 and "".join(parts) == whole, "the stream is not the whole answer")


def _stop(client: Any) -> None:
    # mlx-lm looks for the tokens of the word, which has its space with it.
    word = f" {complete(client, max_tokens=24).choices[0].text.split()[2]}"
    answer = complete(client, max_tokens=24, stop=[word]).choices[0]
    needs(answer.finish_reason == "stop" and word not in answer.text, "it did not stop")


def _logprobs(client: Any) -> None:
    def ask(**options: Any) -> Any:
        messages = [{"role": "user", "content": PROMPT}]
        answer = client.chat.completions.create(
            model="default_model", messages=messages, max_tokens=4, logprobs=True, **options
        )
        return answer.choices[0].logprobs.content

    own, three = [each.logprob for each in ask()], [each.top_logprobs for each in ask(top_logprobs=3)]
    needs(len(own) == len(three) == 4, "not a log-probability a token")
    needs(all(len(each) == 3 for each in three), "not three of them")
    best = [max(each.logprob for each in some) for some in three]
    needs(all(abs(a - b) < 1e-4 for a, b in zip(own, best, strict=True)), "a greedy token is not the best")


def _cache(client: Any) -> None:
    long = " ".join([PROMPT] * 12)
    complete(client, long, max_tokens=4)
    usage = complete(client, f"{long} is", max_tokens=4).usage
    needs(usage.prompt_tokens_details.cached_tokens > 40, "the prompt cache was not used again")


def _eight(client: Any) -> None:
    def ask(i: int) -> str:
        return str(complete(client, f"{PROMPT} {i}", max_tokens=16).choices[0].text)

    alone = [ask(i) for i in range(8)]
    with ThreadPoolExecutor(8) as threads:
        needs(list(threads.map(ask, range(8))) == alone, "eight at once answer otherwise than one by one")


def _tools(client: Any) -> None:
    function = {"name": "look_up", "parameters": {"type": "object", "properties": {}}}
    answer = client.chat.completions.create(
        model="default_model",
        messages=[{"role": "user", "content": "Look it up."}],
        tools=[{"type": "function", "function": function}],
        max_tokens=4,
    )
    needs(answer.choices[0].finish_reason in ("length", "stop", "tool_calls"), "no answer with tools")


RUNS: dict[str, Callable[[Place], tuple[str, Ran]]] = {
    each.__name__: each
    for each in (
        awq,
        benchmark,
        cache_prompt,
        chat,
        convert,
        dwq,
        dynamic_quant,
        evaluate,
        fuse,
        generate,
        gptq,
        lora,
        manage,
        perplexity,
        server,
        share,
        upload,
    )
}


def table(rows: list[tuple[str, str, Ran]]) -> str:
    """The rows as a table of Markdown, under the versions that they belong to."""
    named = ", ".join(f"{package} {version(package)}" for package in PACKAGES)
    lines = [
        f"Every command ran on {date.today().isoformat()} on {mx.default_device().type.name.upper()} "
        f"with {named}. The last columns count calls of experts in the run "
        "shown, and where it wrote a checkpoint in what that one generated.",
        "",
        "| command | what ran | fused | gathered |",
        "|---|---|--:|--:|",
    ]
    for name, what, ran in rows:
        fused, gathered = ran.calls
        lines.append(f"| `{name}` | {what} | {fused:,} | {gathered:,} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tools", nargs="*", metavar="TOOL", help="commands to run; all without any")
    parser.add_argument("--write", action="store_true", help="write the table to docs/mlx-lm.md")
    asked = parser.parse_args()
    # A shell lets what it runs in the background ignore this signal, and so would the server.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    found = tools()
    needs(set(found) == set(RUNS), f"commands without a run: {sorted(set(found) ^ set(RUNS))}")
    if unknown := sorted(set(asked.tools) - set(RUNS)):
        parser.error(f"mlx-lm has no command {', '.join(unknown)}; it has {', '.join(found)}")
    if asked.write and asked.tools:
        parser.error("the table has every command: give --write without TOOL")
    installed = {each.metadata["Name"].lower().replace("-", "_") for each in distributions()}
    if lacking := [each for each in PACKAGES if each.replace("-", "_") not in installed]:
        parser.error(f"some commands need {', '.join(lacking)}: pip install {' '.join(lacking)}")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        place = Place(Path(folder))
        for name in asked.tools or found:
            began = time.perf_counter()
            what, ran = RUNS[name](place)
            rows.append((name, what, ran))
            fused, gathered = ran.calls
            print(
                f"{name}: {time.perf_counter() - began:.0f} s, {fused} fused, {gathered} gathered", flush=True
            )
    if asked.write:
        text = PAGE.read_text(encoding="utf-8")
        head, rest = text.split(BEGIN)
        PAGE.write_text(f"{head}{BEGIN}\n{table(rows)}\n{END}{rest.split(END)[1]}", encoding="utf-8")
    else:
        print(table(rows))


if __name__ == "__main__":
    main()
