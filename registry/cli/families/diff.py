"""`registry diff`: how one family differs from another, in words."""

from __future__ import annotations

from typing import Annotated

import typer

from mlx_experts.registry.cli.common import Families, Json, Plugins, open_catalog, print_json


def diff(
    a: Annotated[str, typer.Argument(help="The family to compare with.")],
    b: Annotated[str, typer.Argument(help="The family to describe.")],
    json: Json = False,
    families: Families = None,
    plugin: Plugins = None,
) -> None:
    """Say how family B differs from family A.

    Example: registry diff qwen3_moe glm4_moe
    """
    from mlx_experts.registry.spec.describe import difference, sentence

    catalog = open_catalog(families)
    first, second = catalog.load(a), catalog.load(b)
    if json:
        print_json([{"key": k, a: left, b: right} for k, left, right in difference(first, second)])
        return
    print(sentence(first, second))
