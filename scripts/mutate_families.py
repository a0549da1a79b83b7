"""Change each literal of each family file, one at a time, and see what notices.

    python scripts/mutate_families.py mixtral gpt_oss --show
    python scripts/mutate_families.py --changed
    python scripts/mutate_families.py --seconds 250 --nice
    python scripts/mutate_families.py --again
    python scripts/mutate_families.py --table
    python scripts/mutate_families.py --as-they-are

Without names, all families whose recorded row is not of their present text are run, in one process; with
--seconds the run stops once the time is up and the next one goes on there.
--again tries what survived and is recorded, after tests were added. --changed runs those whose file git says
changed since the branch left main, and fails below the bar. The rows stand in tests/evidence/mutations.json;
--table prints them, and docs/families.md shows them. Changes that no checkpoint could show are listed with
their reason in scripts/equivalent_mutations.yaml.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from mutations import Mutation, mutations
from noticing import ROOT, Bench, read_results, scratch_folder

from mlx_experts.registry.catalog.catalog import Catalog
from mlx_experts.registry.catalog.yaml_reader import read_yaml
from mlx_experts.registry.checks.evidence import family_hash

RESULTS = ROOT / "tests" / "evidence" / "mutations.json"
EQUIVALENT = ROOT / "scripts" / "equivalent_mutations.yaml"
BAR = 0.95


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("families", nargs="*", help="families to run, whatever is recorded of them")
    parser.add_argument("--changed", action="store_true", help="those that git says changed")
    parser.add_argument("--since", default="origin/main", help="what --changed compares with")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after this time")
    parser.add_argument("--nice", action="store_true", help="leave the machine to others")
    parser.add_argument("--show", action="store_true", help="print every survivor")
    parser.add_argument("--table", action="store_true", help="print the recorded rows and run nothing")
    parser.add_argument(
        "--as-they-are", action="store_true", help="see that nothing is noticed in the files as they are"
    )
    parser.add_argument("--again", action="store_true", help="try the recorded survivors alone")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="try every N-th mutation, a sample")
    parser.add_argument("--first", type=int, default=0, metavar="I", help="the first of them")
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    rows = read_results(args.results)
    if args.table:
        print(table(rows))
        return 0
    if args.nice:
        os.nice(15)
    warnings.simplefilter("ignore")
    known = Catalog()
    names = args.families or (changed(args.since, known) if args.changed else known.names())
    start, worst = time.monotonic(), 1.0
    with scratch_folder() as scratch:
        for name in names:
            digest = family_hash(known.load(name))
            row = rows.get(name, {})
            recorded = row.get("hash") == digest
            if args.again and recorded and row["survivors"]:
                row.setdefault("left", []).extend(row["survivors"])
                row["survivors"] = []
            elif args.families or args.as_they_are or not recorded:
                row = {"hash": digest, "every": args.every, "noticed": {}, "equivalent": 0, "survivors": []}
                row["left"] = [each.name for each in planted(name, known)][args.first :: args.every]
            elif "left" not in row:
                continue
            if time.monotonic() - start > args.seconds:
                break
            began = time.monotonic()
            bench = Bench(name, known, Path(scratch), as_it_is=row["every"] == 1)
            if args.as_they_are:
                print(name, "; ".join(f"{part}: {what}" for part, what in bench.wrong.items()), flush=True)
                worst = min(worst, 0.0 if bench.wrong else 1.0)
                continue
            rows[name] = row
            run(row, planted(name, known), bench, start + args.seconds)
            worst = min(worst, score(row))
            print(f"{name}: {words(row)}, {time.monotonic() - began:.0f} s", flush=True)
            if args.show or args.changed:
                print(*(f"  {each}" for each in row["survivors"]), sep="\n", flush=True)
            args.results.write_text(json.dumps(rows, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    print(f"all: {words(total(rows))}")
    return int((args.changed or args.as_they_are) and worst < BAR)


def planted(name: str, known: Catalog) -> list[Mutation]:
    """The mistakes of one family's file."""
    return list(mutations(read_yaml(known.path(name))[0]))


def run(row: dict[str, Any], tried: list[Mutation], bench: Bench, until: float) -> None:
    """Try what a row has left, and write what comes of it into the row.

    Args:
        tried: the mistakes of the family's file.
        until: the time at which the rest stays for another run.
    """
    equal, noticed = equivalent(bench.name), Counter[str](row["noticed"])
    row["wrong"] = bench.wrong
    for part, what in bench.wrong.items():
        print(f"  {bench.name} as it is: {part}: {what}", flush=True)
    left = set(row.pop("left"))
    for mutation in tried:
        if mutation.name not in left:
            continue
        if time.monotonic() > until:
            row["left"] = sorted(left)
            break
        left.remove(mutation.name)
        part = bench.noticed_by(mutation.data, mutation.at)
        if part == "same" or (not part and equal(mutation.key)):
            row["equivalent"] += 1
        elif part:
            noticed[part] += 1
        else:
            row["survivors"].append(mutation.name)
    row["noticed"] = dict(sorted(noticed.items()))


def equivalent(name: str) -> Callable[[str], bool]:
    """Whether a mutation of a family, by its key, is no mistake."""
    data = yaml.safe_load(EQUIVALENT.read_text(encoding="utf-8"))
    listed = {each for group in data["listed"] for each in group["mutations"].get(name, ())}
    patterns = [re.compile(group["pattern"]) for group in data["patterns"]]
    return lambda mutation: mutation in listed or any(p.fullmatch(mutation) for p in patterns)


def changed(since: str, known: Catalog) -> list[str]:
    """Families whose file git says changed since a branch, or that extend one."""
    base = subprocess.run(
        ["git", "merge-base", "HEAD", since], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.strip()
    listed = subprocess.run(
        ["git", "diff", "--name-only", base or "HEAD", "--", "families"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    names = {Path(each).stem for each in listed if each.endswith(".yaml")}
    return [n for n in known.names() if n in names or read_yaml(known.path(n))[0].get("extends") in names]


def total(rows: dict[str, Any]) -> dict[str, Any]:
    """All rows in one."""
    noticed = sum((Counter(row["noticed"]) for row in rows.values()), Counter[str]())
    return {
        "noticed": dict(noticed),
        "equivalent": sum(row["equivalent"] for row in rows.values()),
        "survivors": [each for row in rows.values() for each in row["survivors"]],
    }


def score(row: dict[str, Any]) -> float:
    """The share of the mistakes that were noticed."""
    caught = sum(row["noticed"].values())
    return caught / max(1, caught + len(row["survivors"]))


def words(row: dict[str, Any]) -> str:
    """A row for people."""
    caught = sum(row["noticed"].values())
    parts = ", ".join(f"{part} {count}" for part, count in row["noticed"].items())
    whole = caught + len(row["survivors"])
    left = f", {len(row['left'])} left to try" if row.get("left") else ""
    return f"{caught} of {whole} noticed ({score(row):.1%}; {parts}), {row['equivalent']} equivalent{left}"


def table(rows: dict[str, Any]) -> str:
    """The recorded rows, one line a family."""
    return "\n".join([*(f"{name}: {words(row)}" for name, row in rows.items()), f"all: {words(total(rows))}"])


if __name__ == "__main__":
    sys.exit(main())
