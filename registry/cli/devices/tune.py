"""`registry tune`: find and keep this device's break-even expert width."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from mlx_experts.registry.catalog.public_shapes import Shape, select
from mlx_experts.registry.cli.common import Json, print_json, print_table
from mlx_experts.registry.cli.progress import track


def tune(
    families: Annotated[
        list[str] | None, typer.Argument(help="Families whose shapes to time; one for each width by default.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=5, help="Samples of each path.")] = 21,
    json: Json = False,
) -> None:
    """Time both paths by expert width and keep the width up to which fused is used.

    A width is given to the gather path only where fused is slower by more than the noise. The outcome is
    kept for this device, this MLX version and these kernels; MLX_EXPERTS_FUSED_MAX_DFF overrides it.

    Example: registry tune
    """
    from mlx_experts.engine.dispatch import tuning_cache as kept
    from mlx_experts.engine.dispatch.expert_dispatch import current_device
    from mlx_experts.engine.tools import bench_experts as measure

    chosen = select(families or [])
    by_width: dict[str, Shape] = {str(s.width): s for s in sorted(chosen, key=lambda s: s.width)}
    timings = []
    for width in track(list(by_width), "timing F =", len(by_width), json):
        shape = by_width[width]
        layer = measure.layer_of(shape, measure.Storage(), None)
        timings.append(measure.compare(layer, rounds=rounds).timing(shape.width))
    device = current_device()
    bound = kept.save(device, timings)
    if json:
        found = {"max_width": bound.max_width, "timings": [asdict(t) for t in timings]}
        print_json({**measure.about(), **found, "file": str(kept.cache_file())})
        return
    print(f"{measure.about()['device']}: gather against fused by expert width")
    print_table(
        "",
        ("F", "gather µs", "fused µs", "ratio", "± %", ""),
        [
            (
                t.width,
                f"{t.gather_us:.0f}",
                f"{t.fused_us:.1f}",
                f"{t.ratio:.2f}x",
                f"{t.noise:.0%}".rstrip("%"),
                "fused loses" if t.loses else "",
            )
            for t in timings
        ],
    )
    print(
        f"fused up to F = {bound.max_width}"
        if bound.max_width is not None
        else "fused at every width measured"
    )
    print(f"kept in {kept.cache_file()}")
