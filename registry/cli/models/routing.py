"""`registry routing`: what a model's routers pick on a text."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mlx_experts.registry.cli.common import Families, Json, Plugins, console, print_json, print_table
from mlx_experts.registry.errors import SettingError

if TYPE_CHECKING:
    from mlx_experts.engine.tools.routing import Routing


def routing(
    model: Annotated[str, typer.Argument(help="Checkpoint folder or Hugging Face repository id.")],
    text: Annotated[Path | None, typer.Option("--text", help="A text to route.")] = None,
    data: Annotated[Path | None, typer.Option("--data", help="Lines of JSON to route.")] = None,
    against: Annotated[
        Path | None, typer.Option("--against", help="Statistics of another text of the same model.")
    ] = None,
    window: Annotated[int, typer.Option("--window", min=2, help="Tokens in one pass.")] = 512,
    tokens: Annotated[int | None, typer.Option("--tokens", min=2, help="Stop after so many tokens.")] = None,
    output: Annotated[Path | None, typer.Option("--output", help="Write the statistics as JSON.")] = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", help="Draw layers against experts: .svg or .png.")
    ] = None,
    revision: Annotated[str | None, typer.Option("--revision", help="Branch, tag or commit.")] = None,
    json: Json = False,
    families: Families = None,
    plugin: Plugins = None,
) -> None:
    """Count what every router picks on a text: how often, with what weight, and together with whom.

    Example: registry routing path/to/model --text notes.txt --output routing.json --plot routing.svg
    """
    from mlx_experts.registry.cli.plot import check_plot, draw_routing

    if plot is not None:
        check_plot(plot)
    if output is not None and not output.parent.is_dir():
        raise SettingError(
            "the folder for the statistics does not exist", where="--output", found=str(output)
        )
    from mlx_experts import load
    from mlx_experts.engine.tools import texts
    from mlx_experts.engine.tools.routing import read_routing, record_routing
    from mlx_experts.registry.cli.progress import shard_progress, track

    other = read_routing(against) if against is not None else None
    with shard_progress(quiet=json) as progress:
        loaded, tokenizer = load(model, revision=revision, families=tuple(families or ()), progress=progress)
    given = texts.windows(texts.read_texts(text, data, tokenizer), tokenizer, window, tokens)
    if not given:
        raise SettingError("the text has fewer than two tokens", where=str(text or data))
    with record_routing(loaded) as found:
        for each in track(given, "routing", len(given), quiet=json):
            texts.evaluate(loaded, each)
    change = found.difference(other) if other is not None else None
    result = {**found.to_dict(), **({} if change is None else {"difference": change})}
    if output is not None:
        import json as json_module

        output.write_text(json_module.dumps(result) + "\n", encoding="utf-8")
    if plot is not None:
        shares = [[n / max(layer.tokens, 1) for n in layer.picks.tolist()] for layer in found.layers]
        draw_routing(
            plot, shares, [layer.layer for layer in found.layers], f"{found.family}, {found.tokens} tokens"
        )
    if json:
        print_json(result)
    else:
        _print(found, change)


def _print(found: Routing, change: list[float] | None) -> None:
    head = ["layer", "entropy", "most picked", "least picked", "dead", "together"]
    rows = []
    for i, layer in enumerate(found.layers):
        shares = layer.picks / max(layer.tokens, 1)
        best, worst = int(shares.argmax()), int(shares.argmin())
        pairs = ", ".join(f"{a}+{b} ({n})" for a, b, n in layer.together(2))
        row = [
            str(layer.layer),
            f"{layer.entropy:.3f}",
            f"{best} ({shares[best]:.1%} of tokens)",
            f"{worst} ({shares[worst]:.1%})",
            str(len(layer.dead)),
            pairs,
        ]
        rows.append(row if change is None else [*row, f"{change[i]:.3f}"])
    print_table("", head if change is None else [*head, "difference"], rows)
    console().print(f"{found.tokens} tokens through {len(found.layers)} layers of {found.family}")
