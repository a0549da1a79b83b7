"""`registry generate`: text from a checkpoint, streamed, with speed, memory and the trace."""

from __future__ import annotations

import json as json_module
import math
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from mlx_experts.registry.cli.common import Families, Json, Plugins, console, print_table
from mlx_experts.registry.errors import CheckpointError, SettingError

# What a chat template is made of; none of them can be told guilty alone.
_TOKENIZER = "chat_template.jinja, tokenizer_config.json, special_tokens_map.json or tokenizer.json"


def generate(
    model: Annotated[str, typer.Argument(help="Checkpoint folder or Hugging Face repository id.")],
    prompt: Annotated[
        str, typer.Option("--prompt", "-p", help="Text to continue; `-` reads standard input.")
    ],
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-m", min=1, help="Longest continuation.")] = 256,
    temp: Annotated[float, typer.Option("--temp", help="Sampling temperature; 0 for greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option("--top-p", help="Nucleus sampling; 1 for off.")] = 1.0,
    seed: Annotated[
        int | None, typer.Option("--seed", min=0, max=2**64 - 1, help="Seed of the sampler.")
    ] = None,
    system: Annotated[str | None, typer.Option("--system", help="System message, for chat models.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Do not apply the chat template.")] = False,
    fused: Annotated[
        bool | None, typer.Option("--fused/--no-fused", help="Force or forbid the fused path.")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option("--dtype", help="Compute dtype: float32, float16 or bfloat16.")
    ] = None,
    draft_model: Annotated[
        str | None, typer.Option("--draft-model", help="Smaller model of the same vocabulary that drafts.")
    ] = None,
    mtp: Annotated[
        bool, typer.Option("--mtp", help="Draft with the checkpoint's own prediction layer.")
    ] = False,
    num_draft_tokens: Annotated[
        int | None, typer.Option("--num-draft-tokens", min=1, help="Guesses a round; 3, or 1 with --mtp.")
    ] = None,
    adaptive_draft: Annotated[
        bool, typer.Option("--adaptive-draft/--always-draft", help="End drafting where it loses time.")
    ] = True,
    adapter: Annotated[Path | None, typer.Option("--adapter", help="Folder of LoRA adapters.")] = None,
    expert_memory: Annotated[
        str | None, typer.Option("--expert-memory", help="Memory for experts, such as 4GB; others are read.")
    ] = None,
    experts_per_token: Annotated[
        int | None, typer.Option("--experts-per-token", help="Experts that a token picks.")
    ] = None,
    revision: Annotated[str | None, typer.Option("--revision", help="Branch, tag or commit.")] = None,
    families: Families = None,
    plugin: Plugins = None,
    family: Annotated[str | None, typer.Option("--family", help="Use this family.")] = None,
    trace: Annotated[bool, typer.Option("--trace", help="Show which paths the layers took.")] = False,
    json: Json = False,
) -> None:
    """Generate text.

    Example: registry generate path/to/model --prompt "A mixture-of-experts model" --max-tokens 80
    """
    _check(temp, top_p)
    import mlx.core as mx
    from mlx_lm.sample_utils import make_sampler

    from mlx_experts import load, stream_generate
    from mlx_experts import trace as counts
    from mlx_experts.engine.dispatch.trace import memory_line
    from mlx_experts.registry.cli.progress import shard_progress, tell_of_compiling

    if seed is not None:
        mx.random.seed(seed)
    tell_of_compiling(quiet=json)
    with shard_progress(quiet=json) as progress:
        loaded, tokenizer = load(
            model,
            adapter_path=str(adapter) if adapter else None,
            revision=revision,
            fused=fused,
            dtype=dtype,
            families=tuple(families or ()),
            family=family,
            progress=progress,
            mtp=mtp,
            expert_memory=expert_memory,
            experts_per_token=experts_per_token,
        )
    text = _text(prompt)
    tokens = _tokens(tokenizer, text, system, raw)
    known = loaded.plan.sizes.vocab_size
    if max(tokens) >= known:
        raise CheckpointError(
            "the tokenizer knows tokens that the model does not",
            where=model,
            expected=f"ids below {known}",
            found=str(max(tokens)),
            hint="put the tokenizer of this very checkpoint beside its config.json",
        )
    # Kernels are compiled or read from their cache at the first call, which is not the model's speed.
    if mx.isnan(loaded(mx.array([tokens[:1]]))).any().item():
        raise CheckpointError(
            "the model answers with NaN",
            where=model,
            hint="its tensors hold NaN or infinity, or the compute dtype is too narrow: try --dtype float32",
        )
    drafting, drafts = _drafts(draft_model, mtp, num_draft_tokens, adaptive_draft, json)
    counts.reset()
    texts: list[str] = []
    last: Any = None
    for last in stream_generate(
        loaded, tokenizer, tokens, max_tokens=max_tokens, sampler=make_sampler(temp, top_p), **drafts
    ):
        texts.append(last.text)
        if not json:
            print(last.text, end="", flush=True)
    if json:
        result = _result("".join(texts), last, counts)
        print(json_module.dumps(result | ({"drafting": _drafted(drafting)} if drafts else {}), indent=2))
        return
    print()
    if last is not None:
        console().print(
            f"[dim]prompt {last.prompt_tokens} tokens, {last.prompt_tps:.1f} tokens/s · "
            f"generation {last.generation_tokens} tokens, {last.generation_tps:.1f} tokens/s · "
            f"peak memory {last.peak_memory:.3f} GB[/dim]"
        )
    if drafts:
        found = _drafted(drafting)
        console().print(
            f"[dim]draft {found['drafted']} tokens, {found['accepted']} accepted ({found['rate']:.0%})"
            + (f" · {drafting.stopped}" if drafting.stopped else "")
            + "[/dim]"
        )
    if trace:
        from mlx_experts.engine.dispatch.trace import linear_trace

        rows = [(r.layer, r.path, r.rows, r.reason, r.count, r.note) for r in counts.table()]
        columns = ("layers", "path", "rows", "reason", "calls", "note")
        print_table("experts", columns, rows)
        linear = [(r.layer, r.path, r.rows, r.reason, r.count, r.note) for r in linear_trace.table()]
        if linear:
            print_table("linear layers", columns, linear)
    if (read := counts.memory_total()) is not None:
        console().print(f"[dim]{memory_line(read)}[/dim]")


def _drafts(
    draft_model: str | None, mtp: bool, count: int | None, adaptive: bool, quiet: bool
) -> tuple[Any, dict[str, Any]]:
    """The account of what drafting does, and the options that ask for it; none where nothing drafts."""
    from mlx_experts.engine.loading.doors import Doors
    from mlx_experts.engine.loading.speculative import Account

    account = Account()
    if draft_model is None and not mtp:
        return account, {}
    if draft_model is not None and mtp:
        raise SettingError("either a draft model or the prediction layer drafts", found="--draft-model --mtp")
    options: dict[str, Any] = {
        "adaptive_draft": adaptive,
        "drafting": account,
        "num_draft_tokens": count or (1 if mtp else 3),
    }
    if draft_model is None:
        return account, options | {"mtp": True}
    doors = Doors(tell=lambda text: None if quiet else print(text, file=sys.stderr))
    return account, options | {"draft_model": doors.load(draft_model)[0]}


def _drafted(account: Any) -> dict[str, Any]:
    return {
        "drafted": account.drafted,
        "accepted": account.accepted,
        "rate": account.rate,
        "stopped": account.stopped,
    }


def _text(prompt: str) -> str:
    """The prompt, or what stands on standard input."""
    text = sys.stdin.read() if prompt == "-" else prompt
    try:
        text.encode()
    except UnicodeEncodeError as error:
        # Python keeps bytes that it cannot read as halves of surrogate pairs.
        where = "standard input" if prompt == "-" else "--prompt"
        raise SettingError(
            "the prompt is not text", where=where, expected="UTF-8", found=repr(text[error.start])
        ) from error
    return text


def _check(temp: float, top_p: float) -> None:
    if not 0 <= temp < math.inf:
        raise SettingError("--temp must be a number from 0 up", found=str(temp))
    if not 0 < top_p <= 1:
        raise SettingError("--top-p must lie above 0 and at most at 1", found=str(top_p))


def _tokens(tokenizer: Any, text: str, system: str | None, raw: bool) -> list[int]:
    if raw or tokenizer.chat_template is None:
        if system is not None:
            raise SettingError("--system needs a chat template", hint="leave out --raw or --system")
        tokens: list[int] = tokenizer.encode(text)
    else:
        messages = [{"role": "system", "content": system}] if system is not None else []
        messages.append({"role": "user", "content": text})
        from jinja2 import TemplateError

        try:
            tokens = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True)
        except (TemplateError, TypeError, ValueError) as error:
            raise CheckpointError(
                "the chat template cannot be used",
                where=_TOKENIZER,
                found=f"{type(error).__name__}: {error}"[:300],
                hint="--raw continues the prompt without a template",
            ) from error
    if text and not tokens:
        raise CheckpointError("the tokenizer leaves nothing of the prompt", where=_TOKENIZER)
    if not tokens:
        raise SettingError("the prompt is empty", hint="give at least one character")
    return list(tokens)


def _result(text: str, last: Any, counts: Any) -> dict[str, Any]:
    from mlx_experts.engine.dispatch.trace import linear_trace

    return {
        "text": text,
        "prompt_tokens": last.prompt_tokens if last else 0,
        "generation_tokens": last.generation_tokens if last else 0,
        "prompt_tps": last.prompt_tps if last else 0.0,
        "generation_tps": last.generation_tps if last else 0.0,
        "peak_memory_gb": last.peak_memory if last else 0.0,
        "finish_reason": last.finish_reason if last else None,
        "trace": [asdict(row) for row in counts.snapshot()],
        **({"expert_memory": [asdict(row) for row in counts.memory()]} if counts.memory() else {}),
        "linear_trace": [asdict(row) for row in linear_trace.table()],
    }
