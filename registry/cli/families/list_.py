"""`registry list`: the families and the names they answer to."""

from __future__ import annotations

from mlx_experts.registry.cli.common import (
    Families,
    Json,
    Plugins,
    console,
    open_catalog,
    print_json,
    print_table,
)

# The longest names of each kind stand on one line from this width on.
_WIDE = 100


def columns_for(width: int) -> tuple[str, ...]:
    """The columns of the table that fit into a terminal without breaking a name."""
    return ("family", "model types", "architectures") if width >= _WIDE else ("family", "model types")


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
    columns = columns_for(console().width)
    cells = [(e.name, ", ".join(e.model_types), ", ".join(e.architectures))[: len(columns)] for e in rows]
    print_table("", columns, cells)
    print(f"{len(rows)} families")
