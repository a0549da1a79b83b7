"""`registry inspect`: what a checkpoint would become, from its config and headers alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from mlx_experts.registry.cli.common import Families, Json, Plugins, console, print_json, print_table

if TYPE_CHECKING:
    from mlx_experts.engine.tools.inspect import Inspection


def inspect(
    checkpoint: Annotated[str, typer.Argument(help="Checkpoint folder or Hugging Face repository id.")],
    context: Annotated[int, typer.Option("--context", help="Tokens to size the cache for.")] = 4096,
    family: Annotated[str | None, typer.Option("--family", help="Use this family.")] = None,
    dtype: Annotated[str | None, typer.Option("--dtype", help="Compute dtype.")] = None,
    expert_memory: Annotated[
        str | None,
        typer.Option("--expert-memory", help="Plan for this much memory for experts, such as 4GB."),
    ] = None,
    revision: Annotated[str | None, typer.Option("--revision", help="Branch, tag or commit.")] = None,
    json: Json = False,
    families: Families = None,
    plugin: Plugins = None,
) -> None:
    """Tell family, layers, tensors, memory and the path of every MoE layer before anything is loaded.

    Example: registry inspect path/to/model --context 32768
    """
    from mlx_experts.engine.tools.inspect import inspect as inspect_path

    result = inspect_path(
        checkpoint,
        context=context,
        revision=revision,
        families=families or (),
        family=family,
        dtype=dtype,
        expert_memory=expert_memory,
    )
    if json:
        print_json(result.to_dict())
    else:
        _print(result)
    if not result.loadable:
        raise typer.Exit(1)


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def _count(count: int) -> str:
    for unit, size in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return str(count)


def _print(r: Inspection) -> None:
    out = console()
    out.print(f"[bold]{r.family}[/bold] because {r.why}; {r.files} file(s) at {r.where}")
    print_table("layers", ("count", "kind"), [(n, kind) for kind, n in r.layers.items()])
    tensors = [(f"{r.claimed} claimed", "")]
    tensors += [(f"{n} ignored by rule", rule) for rule, n in r.ignored.items()]
    tensors += [("UNCLAIMED", name) for name in r.unclaimed]
    tensors += [("MISSING", name) for name in r.missing]
    tensors += [("WRONG SHAPE", text) for text in r.misshapen[:8]]
    tensors += [("WRONG DTYPE", text) for text in r.mistyped[:8]]
    tensors += [("PROBLEM", text) for text in r.problems]
    print_table("tensors", ("state", "pattern"), tensors)
    if r.weight_bytes:
        _print_sizes(r)
    if r.memory is not None:
        from mlx_experts.engine.weights.in_place.budget import words

        m = r.memory
        few, many = m.slots
        held = str(few) if few == many else f"{few} to {many}"
        out.print(
            f"experts: {_size(m.slot_bytes)} of {_size(m.expert_bytes)} in memory, {held} of {m.experts} a "
            f"layer; the smallest budget that runs is {words(m.least_budget)}"
        )
        out.print(f"peak memory: {_size(m.peak_bytes)}, with {_size(m.process_bytes)} of the process itself")
    if r.paths:
        print_table(
            "experts",
            ("rows", "path", "layers", "because", "what would change it"),
            [(p["rows"], p["path"], p["layers"], p["reason"], p["hint"]) for p in r.paths],
        )
    for notice in r.notices:
        out.print(f"note: {notice}")
    out.print("loads" if r.loadable else f"[bold]does not load[/bold]: {r.parts} do not fit")


def _print_sizes(r: Inspection) -> None:
    out = console()
    out.print(
        f"{_count(r.parameters)} parameters, {_count(r.active_parameters)} active a token, "
        f"{r.bits_per_weight} bits a weight as loaded ({r.dtype} compute)"
    )
    for text, count in r.formats.items():
        out.print(f"  {count} modules {text}")
    out.print(
        f"memory: weights {_size(r.weight_bytes)}, cache {_size(r.cache_bytes)} at {r.context} tokens, "
        + (f"{_size(r.workspace_bytes)} for the experts of many rows, " if r.workspace_bytes else "")
        + f"of {_size(r.machine_bytes)} here: {'fits' if r.fits else 'DOES NOT FIT'}"
    )
