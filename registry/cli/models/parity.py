"""`registry parity`: fused against gather against truth, or a checkpoint against a reference."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from mlx_experts.registry.catalog.catalog import Catalog
from mlx_experts.registry.checks import evidence
from mlx_experts.registry.cli.common import (
    Families,
    Json,
    Plugins,
    open_catalog,
    print_json,
    print_table,
    versions,
)
from mlx_experts.registry.cli.progress import track
from mlx_experts.registry.errors import CheckFailed, DeviceError, RegistryError, SettingError


def parity(
    names: Annotated[list[str] | None, typer.Argument(help="Families to try.")] = None,
    every: Annotated[bool, typer.Option("--all", help="Try every family.")] = False,
    checkpoint: Annotated[
        str | None, typer.Option("--checkpoint", help="Compare this checkpoint instead.")
    ] = None,
    reference: Annotated[
        str, typer.Option("--reference", help="`mlx-lm`, or an .npz file with input_ids and logits.")
    ] = "mlx-lm",
    originals: Annotated[
        Path | None, typer.Option("--originals", help="Try every reference case below this folder.")
    ] = None,
    record: Annotated[
        Path | None, typer.Option("--record", help="Write what the cases gave as an evidence file.")
    ] = None,
    json: Json = False,
    families: Families = None,
    plugin: Plugins = None,
) -> None:
    """Compare paths with the float32 truth, or a real checkpoint with a reference.

    Example: registry parity --checkpoint path/to/model --reference answers.npz
    """
    if checkpoint is not None:
        _checkpoint(checkpoint, reference, tuple(families or ()), json)
        return
    catalog = open_catalog(families)
    if originals is not None:
        _originals(originals, record, catalog, json)
        return
    wanted = catalog.names() if every else list(names or [])
    if not wanted:
        raise SettingError("nothing to compare", expected="FAMILY, --all or --checkpoint PATH")
    from mlx_experts.engine.tools.parity import ExpertParity, synthetic_parity

    rows: list[ExpertParity] = []
    for name in track(wanted, "comparing", len(wanted), json):
        rows += synthetic_parity(catalog.load(name))
    if json:
        print_json([{**asdict(row), "ok": row.ok} for row in rows])
    else:
        print_table(
            "relative RMS distance to the float32 truth",
            (
                "family",
                "format",
                "dtype",
                "rows",
                "path",
                "error",
                "bound",
                "",
                "not fused or skipped because",
            ),
            [
                (
                    *(r.family, r.format, r.dtype, r.rows or "-", r.path),
                    *("-" if v is None else f"{v:.0{d}e}" for v, d in ((r.error, 1), (r.bound, 0))),
                    *("skipped" if r.path == "skipped" else "ok" if r.ok else "FAILED", r.reason),
                )
                for r in rows
            ],
        )
    bad = sorted({r.family for r in rows if not r.ok})
    if bad:
        raise CheckFailed(
            "a path is farther from the truth than it may be, or one row did not run fused",
            expected="errors below their bounds, one row fused or declined for an expected reason",
            found=", ".join(bad),
            hint="the rows that say FAILED are where to look",
        )


def _checkpoint(checkpoint: str, reference: str, families: tuple[Path, ...], json: bool) -> None:
    from mlx_experts.engine.tools.parity import CheckpointParity, against_arrays, against_mlx_lm
    from mlx_experts.registry.checkpoint.hub import resolve_path

    folder = resolve_path(checkpoint)

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
            hint=_where_to_look(result),
        )


def _where_to_look(result: Any) -> str:
    """The first layer that departs, or how to find it."""
    if not result.layers:
        return "save hidden_states too, as scripts/save_answers.py does, to see which layer departs first"
    first = result.departs
    if first is None:
        return "every layer agrees: look at the final norm, the head and the cache"
    kind = f" ({result.kinds[first]})" if result.kinds else ""
    before = "the embedding, or" if first == 0 else f"layer {first - 1} still agrees, so look at"
    return f"layer {first}{kind} departs first; {before} this layer's mixer, MLP or norms"


def _originals(folder: Path, path: Path | None, catalog: Catalog, json: bool) -> None:
    from mlx_experts.engine.tools.reference_cases import all_views, measure_view

    views = all_views(folder)
    if not views:
        raise SettingError("no reference cases", where=str(folder), expected="FAMILY/VARIANT/case.json")
    results: dict[str, dict[str, Any]] = {}
    for view in track(views, "comparing", len(views), json):
        name, digest = view.case.parent.name, ""
        try:
            name = catalog.resolve(view.config()).name
            digest = evidence.family_hash(catalog.load(name))
            row = results.setdefault(name, {"hash": digest, "ok": True, "views": {}})
            measured = measure_view(view)
        except DeviceError as error:
            row["views"][view.id], row["ok"] = f"not run: {str(error).splitlines()[0]}", False
            continue
        except RegistryError as error:
            row = results.setdefault(name, {"hash": digest, "ok": True, "views": {}})
            row["views"][view.id], row["ok"] = str(error).splitlines()[0], False
            continue
        row["views"][view.id] = f"{max(measured.full, measured.decode, measured.split):.0e}"
        row["ok"] = row["ok"] and measured.ok
    if path is not None:
        evidence.record(path, results, versions())
    if json:
        print_json(results)
    else:
        rows = [(n, v, e) for n, r in sorted(results.items()) for v, e in r["views"].items()]
        print_table("largest logit difference to the original", ("family", "view", "difference"), rows)
    bad = sorted(name for name, row in results.items() if not row["ok"] and not _only_not_run(row))
    if bad:
        raise CheckFailed("families that differ from the original", found=", ".join(bad))


def _only_not_run(row: dict[str, Any]) -> bool:
    return all(str(view).startswith("not run") for view in row["views"].values())


def _print(result: Any) -> None:
    print(f"against {result.reference}: logits differ by {result.logits:.1e} of the largest")
    if result.decode is not None:
        print(f"cached decoding differs by {result.decode:.1e}")
    if result.layers:
        kinds = result.kinds or [""] * len(result.layers)
        rows = [(i, f"{e:.1e}", kind) for i, (e, kind) in enumerate(zip(result.layers, kinds, strict=True))]
        print_table("", ("layer", "difference", "kind"), rows)
    if result.first_difference is None and result.tokens:
        print(f"all {result.tokens} greedy tokens are equal")
    elif result.first_difference is not None:
        print(
            f"greedy tokens differ first at step {result.first_difference}; the reference prefers its own by "
            f"{result.logit_gap:.3g} logits"
        )
