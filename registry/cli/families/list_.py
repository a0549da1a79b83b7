"""`registry list`: the families and the names they answer to."""

from __future__ import annotations

from mlx_experts.registry.cli.common import Families, Json, Plugins, open_catalog, print_json, print_table


def list_families(json: Json = False, families: Families = None, plugin: Plugins = None) -> None:
    """List the families.

    Example: registry list --json
    """
    entries = open_catalog(families).entries
    rows = [entries[name] for name in sorted(entries)]
    if json:
        print_json(
            [
                {
                    "family": e.name,
                    "model_types": e.model_types,
                    "architectures": e.architectures,
                    "file": str(e.path),
                }
                for e in rows
            ]
        )
        return
    print_table(
        "",
        ("family", "model types", "architectures"),
        [(e.name, ", ".join(e.model_types), ", ".join(e.architectures)) for e in rows],
    )
    print(f"{len(rows)} families")
