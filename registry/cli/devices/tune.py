"""`registry tune`: find and keep where this device's fused kernels pay."""

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
    storages: Annotated[
        int, typer.Option(min=1, help="How many storage formats to time, the most used ones first.")
    ] = 11,
    json: Json = False,
) -> None:
    """Time the paths of an expert call by storage, width and rows, and keep where each one pays.

    The most used storage is timed at every width, the others at four; more rows than one at one width.
    A width or a number of rows is given to the gather path only where another path is slower by more than
    the noise. The outcome is kept for this device, this MLX version and these kernels;
    MLX_EXPERTS_FUSED_MAX_DFF overrides its widths.

    Example: registry tune
    """
    from mlx_experts.engine.dispatch import tuning_cache as kept
    from mlx_experts.engine.dispatch.expert_dispatch import current_device
    from mlx_experts.engine.tools import bench_experts as measure

    chosen = select(families or [])
    by_width = {s.width: s for s in sorted(chosen, key=lambda s: s.width)}
    shapes = list(by_width.values())
    looked_at = {s.name(): s for s in measure.STORAGES[:storages]}
    timings: list[kept.Timing] = []
    for name in track(list(looked_at), "timing", len(looked_at), json):
        storage = looked_at[name]
        its = shapes if storage == measure.STORAGES[0] or families else _spread(shapes, 4)
        timings += measure.tuned_timings(its, storage, rounds)
    device = current_device()
    bounds = kept.save(device, timings)
    if json:
        found = {
            "bounds": {storage: asdict(b) for storage, b in bounds.items()},
            "timings": [asdict(t) for t in timings],
        }
        print_json({**measure.about(), **found, "file": str(kept.cache_file())})
        return
    print(f"{measure.about()['device']}: gather against the other paths")
    print_table(
        "",
        ("storage", "F", "rows", "path", "gather µs", "µs", "ratio", "± %", ""),
        [
            (
                t.storage,
                t.width,
                t.rows,
                t.path,
                f"{t.gather_us:.0f}",
                f"{t.fused_us:.1f}",
                f"{t.ratio:.2f}x",
                f"{t.noise:.0%}".rstrip("%"),
                "loses" if t.loses else "",
            )
            for t in timings
        ],
    )
    for stored, b in bounds.items():
        width = "every width measured" if b.max_width is None else f"F <= {b.max_width}"
        many = "never" if b.many_from is None else f"from {b.many_from} rows on"
        print(f"{stored}: fused at {width} and up to {b.max_rows} rows, the path for many rows {many}")
    print(f"kept in {kept.cache_file()}")


def _spread(shapes: list[Shape], count: int) -> list[Shape]:
    """Shapes from the narrowest to the widest, in steps as even as can be."""
    last = len(shapes) - 1
    picked = {round(i * last / max(count - 1, 1)) for i in range(count)}
    return [shapes[i] for i in sorted(picked)]
