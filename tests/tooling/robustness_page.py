"""The page on public fault reports: what is done about each kind, and the tests that hold it."""

from __future__ import annotations

import ast
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from mlx_experts.registry.errors import SpecError

SOURCE = Path("tests") / "robustness" / "kinds.yaml"


@dataclass(frozen=True)
class Kind:
    """Reports of one kind of fault.

    Args:
        kind: its name.
        ids: the reports.
        here: what this package does, in a line or two.
    """

    kind: str
    ids: tuple[str, ...]
    here: str


@dataclass(frozen=True)
class Reports:
    """What the source file says.

    Args:
        links: every report and the public issue that it reduces, as `owner/repository#number`; None for what
            was found by trying.
        does_not_apply: reports without a test, with the reason.
        pending: reports that nobody has looked at yet.
    """

    links: dict[str, str | None]
    kinds: tuple[Kind, ...]
    does_not_apply: dict[str, str]
    pending: tuple[str, ...]


@dataclass(frozen=True)
class MarkedTest:
    """A test function that is marked with a report."""

    file: str
    name: str


def read_reports(root: Path) -> Reports:
    """Read the source file of a repository.

    Raises:
        SpecError: the file is absent or not of the form that its head describes.
    """
    path = root / SOURCE
    try:
        data: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
        return Reports(
            dict(data["reports"]),
            tuple(Kind(each["kind"], tuple(each["ids"]), each["here"].strip()) for each in data["kinds"]),
            dict(data["does_not_apply"] or {}),
            tuple(data["pending"] or ()),
        )
    except (OSError, yaml.YAMLError, KeyError, TypeError, AttributeError, ValueError) as error:
        raise SpecError(
            "the list of fault reports cannot be read", where=str(path), found=str(error)
        ) from error


def marked_tests(root: Path) -> dict[str, list[MarkedTest]]:
    """Tests by the reports that they are marked with, found in the sources; nothing is imported."""
    found: dict[str, list[MarkedTest]] = defaultdict(list)
    for path in sorted((root / "tests").rglob("test_*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8"), filename=str(path)).body:
            if not isinstance(node, ast.FunctionDef):
                continue
            for report in _marks(node):
                found[report].append(MarkedTest(path.relative_to(root).as_posix(), node.name))
    return dict(found)


def _marks(function: ast.FunctionDef) -> list[str]:
    calls = [each for each in function.decorator_list if isinstance(each, ast.Call)]
    marks = [call for call in calls if ast.unparse(call.func) == "pytest.mark.report"]
    return [ast.literal_eval(argument) for call in marks for argument in call.args]


def robustness_page(root: Path) -> str:
    """The page, in Markdown.

    Raises:
        SpecError: as :func:`read_reports` does.
    """
    reports, tests = read_reports(root), marked_tests(root)
    public = sum(link is not None for link in reports.links.values())
    parts = [
        "# Robustness\n\n"
        f"{public} public reports of faults in engines of this kind, and {len(reports.links) - public} "
        "faults that were found by trying, each reduced to its smallest input. The kind of fault is closed "
        "for every family and mode that it can touch, and the right behaviour is a test.\n"
    ]
    for kind in reports.kinds:
        links = ", ".join(_link(report, reports.links[report]) for report in kind.ids)
        rows = dict.fromkeys(test for report in kind.ids for test in tests.get(report, []))
        listed = [f"- [{test.name.removeprefix('test_').replace('_', ' ')}](../{test.file})" for test in rows]
        parts.append(f"## {kind.kind}\n\nReports: {links}.\n\n{kind.here}\n\n" + "\n".join(listed) + "\n")
    if reports.does_not_apply:
        rest = [f"- {_link(r, reports.links[r])}: {why}" for r, why in reports.does_not_apply.items()]
        parts.append("## Does not apply\n\n" + "\n".join(rest) + "\n")
    if reports.pending:
        parts.append(f"## Pending\n\n{', '.join(_link(r, reports.links[r]) for r in reports.pending)}.\n")
    return "\n".join(parts)


def _link(report: str, address: str | None) -> str:
    if address is None:
        return report
    repository, _, number = address.partition("#")
    return f"{report} ([{address}](https://github.com/{repository}/issues/{number}))"
