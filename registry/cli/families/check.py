"""`registry check`: every family is registered, builds, loads each layout and dispatches fused."""

from __future__ import annotations

import json as to_json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mlx_experts.registry.catalog.catalog import Catalog
from mlx_experts.registry.checks.static_check import FastReport, check_fast
from mlx_experts.registry.cli.common import Families, Json, Plugins, open_catalog, print_json, print_table
from mlx_experts.registry.cli.progress import track
from mlx_experts.registry.errors import CheckFailed, SettingError

if TYPE_CHECKING:
    from mlx_experts.engine.tools.device.report import DeviceReport


def check(
    names: Annotated[
        list[str] | None, typer.Argument(help="Families to check; all when none is named.")
    ] = None,
    fast: Annotated[bool, typer.Option("--fast", help="Stop before anything needs MLX.")] = False,
    device: Annotated[
        bool,
        typer.Option(
            "--device",
            help="Run this device's kernels and say whether to trust them; families where some are named.",
        ),
    ] = False,
    receipt: Annotated[
        Path | None,
        typer.Option(
            "--receipt", help="With --device: write what ran, how right and how fast.", show_default=False
        ),
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option(
            "--jobs",
            min=1,
            help="With --device: processes that compile and compare; as many as cores beside a GPU, else 1.",
            show_default=False,
        ),
    ] = None,
    record: Annotated[
        Path | None, typer.Option("--record", help="Write the results as an evidence file.")
    ] = None,
    json: Json = False,
    families: Families = None,
    plugin: Plugins = None,
) -> None:
    """Prove by running that families are registered, build, load every layout and dispatch fused.

    --device runs this machine's kernels first and says last whether they may be trusted. A receipt of it
    keeps device, versions, each kernel's distance to truth and its time against MLX's, as JSON. Kernels are
    compiled and compared in several processes; times are taken afterwards, one at a time.

    Example: registry check qwen3_moe mixtral
    """
    started = time.perf_counter()
    if receipt is not None:
        _may_write(receipt, device and not fast)
    if jobs is not None and (fast or not device):
        raise SettingError(
            "Only what runs on the device runs in several processes.",
            where="--jobs",
            hint="add --device, without --fast",
        )
    ran = _device(receipt, jobs) if device and not fast else None
    verdict = None if ran is None else ran.verdict()
    if ran is not None and not names:
        _finish_device(ran, json)
        return
    catalog = open_catalog(families)
    report = check_fast(catalog, names)
    rows: list[dict[str, Any]] = []
    if not fast and not report.problems.get("catalogue"):
        rows = _run(catalog, report, json)
    if record is not None and rows:
        _record(record, catalog, rows)
    seconds = time.perf_counter() - started
    if json:
        print_json(
            {
                "families": rows or report.families,
                "problems": report.problems,
                "covered": report.coverage.registered if report.coverage else {},
                "declared": report.coverage.declared if report.coverage else {},
                "device": verdict,
                "seconds": round(seconds, 2),
            }
        )
    else:
        _print(report, rows, verdict, seconds)
    if report.problems:
        failed = ", ".join(sorted(report.problems))
        raise CheckFailed(
            f"the check did not pass: {failed}",
            found="\n".join(f"{n}: {p}" for n, problems in sorted(report.problems.items()) for p in problems),
            hint="each line says what to change; `registry check FAMILY` repeats one family",
        )
    if ran is not None:
        _trusted(ran)


def _run(catalog: Catalog, report: FastReport, quiet: bool) -> list[dict[str, Any]]:
    from mlx_experts.engine.tools.family_check import check_family

    rows = []
    good = [name for name in report.families if name not in report.problems]
    for name in track(good, "checking", len(good), quiet):
        result = check_family(catalog.load(name))
        for step in result.steps:
            if not step.ok:
                report.add(name, f"{step.name}: {step.detail}")
        rows.append(
            {
                "family": name,
                "ok": result.ok,
                "layouts": [s.name.removeprefix("layout ") for s in result.steps if "layout" in s.name],
                "fused": result.fused,
                "moe_layers": result.moe_layers,
                "reason": result.reason,
                "lacks": result.lacks,
                "steps": [{"name": s.name, "ok": s.ok, "detail": s.detail} for s in result.steps],
            }
        )
    return rows


def _record(path: Path, catalog: Catalog, rows: list[dict[str, Any]]) -> None:
    from mlx_experts.registry.checks import evidence
    from mlx_experts.registry.cli.common import versions

    kept = {
        row["family"]: {
            "hash": evidence.family_hash(catalog.load(row["family"])),
            # What a machine cannot run is no evidence.
            "ok": row["ok"] and not row["lacks"],
            "layouts_ok": not row["lacks"]
            and all(s["ok"] for s in row["steps"] if s["name"].startswith("layout")),
            "layouts": row["layouts"],
            "fused": row["fused"],
            "moe_layers": row["moe_layers"],
            "reason": row["reason"],
        }
        for row in rows
    }
    evidence.record(path, kept, versions())


def _may_write(receipt: Path, asked: bool) -> None:
    """Say before anything runs that a receipt cannot be written.

    Raises:
        SettingError: nothing runs on the device, or the file's folder is missing.
    """
    if not asked:
        raise SettingError(
            "A receipt says what ran on the device.", where="--receipt", hint="add --device, without --fast"
        )
    if not receipt.resolve().parent.is_dir():
        raise SettingError(
            "The folder for the receipt does not exist.", where="--receipt", found=str(receipt.parent)
        )


def _device(receipt: Path | None, jobs: int | None) -> DeviceReport:
    """Run the device's kernels, and time them where a receipt is written."""
    from mlx_experts.engine.tools.device.check import run
    from mlx_experts.registry.cli.common import versions

    ran = run(times=receipt is not None, jobs=jobs)
    if receipt is not None:
        text = to_json.dumps(ran.receipt(versions()), indent=1)
        receipt.write_text(text + "\n", encoding="utf-8")
    return ran


def _finish_device(ran: DeviceReport, json: bool) -> None:
    """Print what ran on the device, the verdict last."""
    from mlx_experts.registry.cli.common import versions

    if json:
        print_json(ran.receipt(versions()))
    else:
        if ran.times:
            rows = [
                (
                    t.kernel,
                    t.what,
                    t.dtype,
                    f"{t.ours_us:.1f}",
                    f"{t.mlx_us:.1f}",
                    f"{t.mlx_us / t.ours_us:.1f}x",
                )
                for t in ran.times
            ]
            print_table("", ("kernel", "of", "dtype", "µs", "MLX µs", "ratio"), rows)
        print(ran.verdict())
    _trusted(ran)


def _trusted(ran: DeviceReport) -> None:
    """Raises:
    CheckFailed: a kernel is farther from truth than allowed.
    """
    if ran.wrong:
        raise CheckFailed(
            "kernels of this device compute something else",
            found="\n".join(f"{t.kernel}, {t.words()}" for t in ran.wrong),
            hint="set MLX_EXPERTS_FUSED=0 and report this",
        )


def _print(report: FastReport, rows: list[dict[str, Any]], verdict: str | None, seconds: float) -> None:
    if rows:
        print_table(
            "",
            ("family", "result", "layouts", "fused layers", "not fused because"),
            [
                (
                    r["family"],
                    r["lacks"] or ("ok" if r["ok"] else "FAILED"),
                    ", ".join(r["layouts"]),
                    f"{r['fused']} of {r['moe_layers']}",
                    r["reason"],
                )
                for r in rows
            ],
        )
    covered = report.coverage
    if covered is not None:
        print(
            f"{len(covered.registered)} architectures of installed mlx-lm and transformers are described, "
            f"{len(covered.declared)} are declared unsupported, {len(covered.unknown)} are unknown"
        )
    if verdict:
        print(verdict)
    passed = len(report.families) - len([n for n in report.problems if n in report.families])
    print(f"{passed} of {len(report.families)} families passed in {seconds:.1f} s")
