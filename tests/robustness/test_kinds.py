"""Every public report has a test, or a reason why not."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from robustness_page import marked_tests, read_reports

ROOT = Path(__file__).parent.parent.parent


def test_every_report_has_a_marked_test_or_a_reason_why_not() -> None:
    reports, tests = read_reports(ROOT), marked_tests(ROOT)
    assert sum(link is not None for link in reports.links.values()) == 96
    excused = {*reports.does_not_apply, *reports.pending}
    assert [report for report in reports.links if report not in tests and report not in excused] == []
    assert all(len(reason.split()) > 2 for reason in reports.does_not_apply.values())


def test_every_report_is_listed_once() -> None:
    reports = read_reports(ROOT)
    listed = Counter(report for kind in reports.kinds for report in kind.ids)
    listed.update([*reports.does_not_apply, *reports.pending])
    assert listed == Counter(list(reports.links))


def test_no_test_is_marked_with_a_report_that_does_not_exist_or_apply() -> None:
    reports, tests = read_reports(ROOT), marked_tests(ROOT)
    assert set(tests) - set(reports.links) == set()
    assert set(tests) & set(reports.does_not_apply) == set()
