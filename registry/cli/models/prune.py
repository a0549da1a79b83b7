"""`registry prune`: a checkpoint without the experts that a text needs least."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mlx_experts.registry.cli.common import Families, Json, Plugins, console, print_json, print_table
from mlx_experts.registry.errors import SettingError


def prune(
    model: Annotated[str, typer.Argument(help="Checkpoint folder or Hugging Face repository id.")],
    keep: Annotated[float, typer.Option("--keep", help="Share of the experts that stays.")],
    output: Annotated[Path, typer.Option("--output", help="Folder to write; must be new or empty.")],
    stats: Annotated[
        Path | None, typer.Option("--stats", help="Statistics from `registry routing --output`.")
    ] = None,
    text: Annotated[Path | None, typer.Option("--text", help="A text to record statistics on.")] = None,
    by: Annotated[str, typer.Option("--by", help="`reap` or `frequency`.")] = "reap",
    spread: Annotated[
        str, typer.Option("--spread", help="`even`: as many in each layer; `layer`: the best of the model.")
    ] = "even",
    window: Annotated[int, typer.Option("--window", min=2, help="Tokens in one pass.")] = 512,
    tokens: Annotated[int | None, typer.Option("--tokens", min=2, help="Stop after so many tokens.")] = None,
    revision: Annotated[str | None, typer.Option("--revision", help="Branch, tag or commit.")] = None,
    json: Json = False,
    families: Families = None,
    plugin: Plugins = None,
) -> None:
    """Leave out experts by REAP's measure, and write what is left with its perplexity before and after.

    Example: registry prune path/to/model --keep 0.75 --text notes.txt --output pruned
    """
    if by not in ("reap", "frequency"):
        raise SettingError("--by is `reap` or `frequency`", found=by)
    if spread not in ("even", "layer"):
        raise SettingError("--spread is `even` or `layer`", found=spread)
    if (stats is None) == (text is None) and stats is None:
        raise SettingError("pruning needs statistics", expected="--stats FILE or --text FILE")
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise SettingError("the folder to write is there already", where="--output", found=str(output))
    from mlx_experts import load
    from mlx_experts.engine.loading.api import copy_tokenizer, save_model
    from mlx_experts.engine.tools import prune as pruning
    from mlx_experts.engine.tools import texts
    from mlx_experts.engine.tools.routing import read_routing, record_routing
    from mlx_experts.registry.checkpoint.hub import resolve_path
    from mlx_experts.registry.cli.progress import shard_progress, track

    routing = read_routing(stats) if stats is not None else None
    folder = resolve_path(model, revision)
    with shard_progress(quiet=json) as progress:
        loaded, tokenizer, config = load(
            folder, families=tuple(families or ()), progress=progress, return_config=True
        )
    given = texts.windows(texts.read_texts(text, None, tokenizer), tokenizer, window, tokens) if text else []
    if routing is None:
        with record_routing(loaded) as routing:
            for each in track(given, "routing", len(given), quiet=json):
                texts.evaluate(loaded, each)
    before = texts.perplexity(loaded, given) if given else None
    cuts = pruning.plan_cuts(loaded, routing, keep, by, spread)  # type: ignore[arg-type]  # checked above
    changed = pruning.config_after(config, loaded, cuts)
    pruning.cut_experts(loaded, cuts)
    after = texts.perplexity(loaded, given) if given else None
    save_model(output, loaded, changed)
    copy_tokenizer(folder, output)
    if json:
        print_json(
            {
                "layers": [vars(cut) for cut in cuts],
                "perplexity": {"before": before, "after": after},
                "output": str(output),
            }
        )
        return
    print_table("", ("layer", "experts", "kept"), [(c.layer, c.experts, len(c.kept)) for c in cuts])
    if before is not None and after is not None:
        console().print(f"perplexity on {text}: {before:.4f} before, {after:.4f} after")
    console().print(f"wrote {output}")
