"""`registry coverage`: the installed neighbours against the catalogue, and what changed since a record."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Annotated

import typer

from mlx_experts.registry.checks import config_drift, engines
from mlx_experts.registry.checks.coverage import coverage as compare
from mlx_experts.registry.checks.coverage import mlx_lm_families, transformers_families
from mlx_experts.registry.cli.common import Families, Json, Plugins, open_catalog, print_json, print_table
from mlx_experts.registry.errors import CheckFailed


def coverage(
    against: Annotated[
        Path | None, typer.Option("--against", help="Fail where anything differs from this record.")
    ] = None,
    record: Annotated[
        Path | None, typer.Option("--record", help="Write what is installed now as a record.")
    ] = None,
    json: Json = False,
    families: Families = None,
    plugin: Plugins = None,
) -> None:
    """Compare mlx-lm, transformers, and vLLM and SGLang where installed, with the catalogue.

    Example: registry coverage --against tests/data/neighbours.json
    """
    catalog = open_catalog(families)
    known = [*mlx_lm_families(), *transformers_families()]
    found = compare(catalog, known)
    types: dict[str, list[str]] = defaultdict(list)
    for item in known:
        types[item.source].append(item.model_type)
    architectures = [*engines.vllm_architectures(), *engines.sglang_architectures()]
    elsewhere = engines.not_described(catalog, architectures)
    keys = config_drift.installed_keys(catalog)
    if record is not None:
        config_drift.record(record, types, keys)
    changes = (
        [] if against is None else config_drift.drift(config_drift.read_record(against)["config_keys"], keys)
    )
    if json:
        print_json(
            {
                "versions": config_drift.installed_versions(),
                "described": found.registered,
                "unsupported": found.declared,
                "unknown": [vars(item) for item in found.unknown],
                "stale": found.stale,
                "engines": [vars(item) for item in elsewhere],
                "changes": [vars(change) for change in changes],
            }
        )
    else:
        rows = [("described", str(len(found.registered)), ""), ("unsupported", str(len(found.declared)), "")]
        rows += [("UNKNOWN", item.model_type, f"{item.source}: {item.file}") for item in found.unknown]
        rows += [("only elsewhere", item.name, f"{item.source}: {item.file}") for item in elsewhere]
        print_table("", ("state", "architecture", "where"), rows)
        print(f"{len(keys)} config classes compared" if against else f"{len(keys)} config classes read")
    if found.unknown:
        names = ", ".join(item.model_type for item in found.unknown)
        raise CheckFailed("a neighbour has architectures that no family describes", found=names)
    if against is not None:
        config_drift.refuse_drift(changes, against)
