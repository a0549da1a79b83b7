"""`registry parity`: fused against gather against truth, or a checkpoint against a reference."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from mlx_experts.registry.cli.common import Families, Json, open_catalog, print_json, print_table
from mlx_experts.registry.cli.progress import track
from mlx_experts.registry.errors import CheckFailed, SettingError


def parity(
    names: Annotated[list[str] | None, typer.Argument(help="Families to try.")] = None,
    every: Annotated[bool, typer.Option("--all", help="Try every family.")] = False,
    checkpoint: Annotated[
        Path | None, typer.Option("--checkpoint", help="Compare this checkpoint instead.")
    ] = None,
    reference: Annotated[
        str, typer.Option("--reference", help="`mlx-lm`, or an .npz file with input_ids and logits.")
    ] = "mlx-lm",
    json: Json = False,
    families: Families = None,
) -> None:
    """Compare paths with the float32 truth, or a real checkpoint with a reference.

    Example: registry parity --checkpoint path/to/model --reference answers.npz
    """
    if checkpoint is not None:
        _checkpoint(checkpoint, reference, tuple(families or ()), json)
        return
    catalog = open_catalog(families)
    wanted = catalog.names() if every else list(names or [])
    if not wanted:
        raise SettingError("nothing to compare", expected="FAMILY, --all or --checkpoint PATH")
    from mlx_experts.engine.parity import ExpertParity, synthetic_parity

    rows: list[ExpertParity] = []
    for name in track(wanted, "comparing", len(wanted), json):
        rows += synthetic_parity(catalog.load(name))
    if json:
        print_json([{**asdict(row), "ok": row.ok} for row in rows])
    else:
        print_table(
            "relative RMS distance to the float32 truth",
            ("family", "format", "dtype", "rows", "path", "error", "bound", "", "not fused because"),
            [
                (
                    *(r.family, r.format, r.dtype, r.rows, r.path, f"{r.error:.1e}"),
                    *(f"{r.bound:.0e}" if r.bound else "-", "ok" if r.ok else "FAILED", r.reason),
                )
                for r in rows
            ],
        )
    bad = sorted({r.family for r in rows if not r.ok})
    if bad:
        raise CheckFailed("a path is farther from the truth than it may be", found=", ".join(bad))


def _checkpoint(folder: Path, reference: str, families: tuple[Path, ...], json: bool) -> None:
    from mlx_experts.engine.parity import CheckpointParity, against_arrays, against_mlx_lm

    result: CheckpointParity
    if reference == "mlx-lm":
        result = against_mlx_lm(folder, families=families)
    else:
        result = against_arrays(folder, Path(reference), families)
    if json:
        print_json({**asdict(result), "ok": result.ok})
    else:
        _print(result)
    if not result.ok:
        raise CheckFailed(
            "the checkpoint and the reference disagree",
            where=str(folder),
            expected="logits within 1e-4 of the largest, equal greedy tokens",
            hint="the first layer that differs much is where to look",
        )


def _print(result: Any) -> None:
    print(f"against {result.reference}: logits differ by {result.logits:.1e} of the largest")
    if result.decode is not None:
        print(f"cached decoding differs by {result.decode:.1e}")
    if result.layers:
        print_table("", ("layer", "difference"), [(i, f"{e:.1e}") for i, e in enumerate(result.layers)])
    if result.first_difference is None:
        print(f"all {result.tokens} greedy tokens are equal")
    else:
        print(
            f"greedy tokens differ first at step {result.first_difference}; the reference prefers its own by "
            f"{result.logit_gap:.3g} logits"
        )
