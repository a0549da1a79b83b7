"""The trace counts exactly, merges for people, and survives threads."""

import sys
import threading

import pytest

from mlx_experts.engine.dispatch.trace import Trace, TraceKey, rows_label


@pytest.mark.parametrize(
    ("rows", "label"),
    [(0, "0"), (1, "1"), (2, "2"), (3, "3-4"), (4, "3-4"), (5, "5-8"), (9, "9-16"), (512, "257-512")],
)
def test_rows_fall_into_powers_of_two(rows, label):
    assert rows_label(rows) == label


def test_calls_are_counted_by_layer_path_rows_and_reason():
    trace = Trace()
    for layer in ("a", "b"):
        trace.tally(TraceKey(layer, "fused", "1", "cpu")).add()
    trace.tally(TraceKey("a", "gather", "5-8", "rows"), "rows: wanted 1, got 5").add()
    trace.tally(TraceKey("a", "fused", "1", "cpu")).add()
    assert trace.total() == 4
    assert trace.total("fused") == 3
    assert trace.total("fused", layer="a") == 2
    assert trace.total(reason="rows") == 1
    assert trace.total("gather", rows="1") == 0
    assert {r.note for r in trace.snapshot() if r.path == "gather"} == {"rows: wanted 1, got 5"}


def test_table_merges_layers():
    trace = Trace()
    for layer in ("a", "b", "c"):
        trace.tally(TraceKey(layer, "fused", "1", "cpu")).add()
    (line,) = trace.table()
    assert (line.layer, line.count) == ("3 layers", 3)
    assert [row.layer for row in trace.snapshot()] == ["a", "b", "c"]


def test_reset_forgets_counts_and_notes():
    trace = Trace()
    trace.tally(TraceKey("a", "gather", "2", "rows"), "note").add()
    trace.reset()
    assert trace.snapshot() == []
    trace.tally(TraceKey("a", "gather", "2", "rows"), "other").add()
    assert trace.snapshot()[0].note == "other"


def test_a_decision_counts_on_after_a_reset():
    trace = Trace()
    tally = trace.tally(TraceKey("a", "fused", "1", "cpu"))
    for calls in (3, 2):
        trace.reset()
        for _ in range(calls):
            tally.add()
        assert trace.total() == calls


def test_the_note_of_the_first_call_stays():
    trace = Trace()
    for rows in (5, 6):
        trace.tally(TraceKey("a", "gather", "5-8", "rows"), f"rows: wanted 1, got {rows}").add()
    assert trace.snapshot()[0].note == "rows: wanted 1, got 5"


def test_no_call_is_lost_between_threads():
    trace = Trace()
    tally = trace.tally(TraceKey("a", "fused", "1", "cpu"))

    def many():
        for _ in range(20_000):
            tally.add()

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # so that threads meet inside `add`
    try:
        threads = [threading.Thread(target=many) for _ in range(4)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    finally:
        sys.setswitchinterval(interval)
    assert trace.total() == 80_000
