"""The live view: a line for each rank, and the slowest one marked."""

from __future__ import annotations

from ringrun.show.visible import columns
from ringrun.watch import table
from ringrun.watch.history import History
from tests.unit.ringrun.watch.samples import EQUAL, HOSTS, SLOW_2, report


def test_a_line_for_each_rank_and_the_slowest_marked():
    lines = table.table(SLOW_2, HOSTS, 20.0, False, False, 24)
    assert lines[0].split() == ["rank", "host", "step", "steps/s", "sent", "MB/s", "waits", "in"]
    assert [line[0] for line in lines[1:4]] == [" ", " ", ">"]
    assert lines[3].split() == [">", "2", "jetson2", "40", "2", "2", "10", "%", "its", "own", "code"]
    assert lines[4:] == ["rank 2 (jetson2) is the slowest: the others wait for it 70 % of the time"]


def test_a_low_terminal_leaves_ranks_out():
    lines = table.table(SLOW_2, HOSTS, 20.0, False, True, 6)
    assert len(lines) == 6 and lines[3] == "  and 1 more ranks"


def test_where_ranks_are():
    history = History(0.0)
    history.take(0, report(0, 1.0, doing="allreduce(x)", inside=True, waits_for=[1, 2]), 1.0)
    history.take(1, report(1, 1.0, doing="allreduce(x)", inside=True), 1.0)
    history.take(2, report(2, 1.0, doing="bad\x1b[2J\n"), -9.0)
    lines = table.table(history, {}, 2.0, False, False, 24)
    assert lines[1].endswith("waits for 1, 2 in allreduce(x)") and lines[2].endswith("  allreduce(x)")
    assert lines[3].endswith("no answer for 11 s")


def test_names_cannot_control_the_terminal_or_break_the_table():
    history = History(0.0)
    history.take(0, report(0, 1.0, doing="日本\t\n\u202e", inside=True), 1.0)
    history.take(1, report(1, 1.0, doing="x", inside=True), 1.0)
    lines = table.table(history, {0: "\x1b[2J\n日本", 1: "a"}, 1.0, False, False, 24)
    assert len(lines) == 3 and not set("\x1b\n\t\u202e") & set("".join(lines))
    assert columns(lines[1].split("  日本\\t")[0]) == len(lines[2]) - len("  x")
    assert "\x1b" not in table.slowest_text(SLOW_2.slowest_now(HOSTS), SLOW_2, {2: "\x1b[2J"})


def test_one_line_for_a_file():
    text = table.line(SLOW_2, HOSTS)
    assert text.startswith("step 40, 2 steps/s, 6 MB/s sent by all ranks, waiting 10 to 80 % of the time; ")
    assert "rank 2 (jetson2) is the slowest" in text
    assert table.line(History(0.0), HOSTS) == ""
    assert "slowest" not in table.line(EQUAL, HOSTS)
