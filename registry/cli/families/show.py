"""`registry show`: one family, as its file says it after `extends` is merged."""

from __future__ import annotations

from typing import Annotated

import typer
import yaml

from mlx_experts.registry.cli.common import Families, Json, Plugins, open_catalog, print_json


def show(
    family: Annotated[str, typer.Argument(help="Name of a family.")],
    json: Json = False,
    families: Families = None,
    plugin: Plugins = None,
) -> None:
    """Show a family with everything that it inherits.

    Example: registry show qwen3_moe
    """
    catalog = open_catalog(families)
    spec = catalog.load(family)
    data = spec.model_dump(mode="json", by_alias=True, exclude_unset=True)
    if json:
        print_json({"file": str(catalog.path(family)), **data})
        return
    print(f"# {catalog.path(family)}")
    print(yaml.safe_dump(data, sort_keys=False, width=100, default_flow_style=None), end="")
