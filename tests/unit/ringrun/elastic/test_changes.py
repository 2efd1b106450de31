from __future__ import annotations

import pytest

from ringrun.elastic.changes import ENDS_WITHIN_S, Change, ChangeLog, change_of, describe_history


def test_the_facts_of_a_notice_are_sorted_by_rank() -> None:
    members = [{"rank": 1, "member": 7}, {"rank": 0, "member": 3}]
    detail = {"epoch": 2, "members": members, "lost": [5], "joined": [7], "left": [], "pause_s": 0.25}
    assert change_of(detail) == Change((3, 7), (5,), (7,), (), 0.25)


def log_of_two() -> ChangeLog:
    log = ChangeLog(100.0)
    for member, host in enumerate("ab"):
        log.start(member, host, 0)
    assert log.publish(Change((0, 1), joined=(0, 1)), {0, 1}, 101.0) == []
    return log


def test_a_line_waits_for_the_end_of_the_process() -> None:
    log = log_of_two()
    log.report(1, "no heartbeat for 3.0 s, nor an answer")
    log.report(1, "a later reason")
    assert log.publish(Change((0,), lost=(1,), pause_s=1.25), {0, 1}, 104.0) == []
    (line,) = log.end(1, 105.0)
    assert line == "rank 1 (b) lost: no heartbeat for 3.0 s; going on with 1 rank after 1.2 s"
    assert log.lines == [(5.0, line)]
    assert log.end(0, 106.0) == []


def test_a_line_does_not_wait_for_a_process_whose_host_reports_nothing() -> None:
    log = log_of_two()
    log.report(1, "no heartbeat for 3.0 s, nor an answer")
    assert log.due_s is None
    assert log.publish(Change((0,), lost=(1,), pause_s=1.25), {0, 1}, 104.0) == []
    assert log.due_s == 104.0 + ENDS_WITHIN_S and log.tick(105.0) == []
    (line,) = log.tick(106.0)
    assert line == "rank 1 (b) lost: no heartbeat for 3.0 s; going on with 1 rank after 1.2 s"
    assert (log.due_s, log.tick(107.0), log.end(1, 180.0)) == (None, [], [])


@pytest.mark.parametrize(
    ("report", "how", "cause"),
    [
        ("", "exit code 3", "exit code 3"),
        ("the connection was closed.", "", "the connection was closed"),
        ("", "", "no connection"),
        ("rank 1: uncaught ValueError: x\nmore", "exit code 1", "uncaught ValueError: x"),
        ("no heartbeat for 3.0 s", "signal 9", "signal 9"),
    ],
)
def test_causes(report: str, how: str, cause: str) -> None:
    log = log_of_two()
    if report:
        log.report(1, report)
    if how:
        log.fail(1, how)
    (line,) = log.publish(Change((0,), lost=(1,)), {0}, 104.0)
    assert line.startswith(f"rank 1 (b) lost: {cause};")


@pytest.mark.parametrize(("count", "shown"), [(0, 0), (4, 4), (5, 5), (9, 5)])
def test_of_a_long_history_the_middle_is_left_out(count: int, shown: int) -> None:
    changes = [(3600.0 * number + 61, f"change {number}") for number in range(count)]
    text = describe_history(changes, most=4 if count == 9 else 5)
    lines = text.splitlines()
    assert len(lines) == shown and ("left out" in text) == (count == 9)
    if count:
        assert lines[0] == "0:01:01  change 0"
    if count == 9:
        assert lines[2] == "… 5 changes left out …"
        assert lines[-1] == "8:01:01  change 8"
