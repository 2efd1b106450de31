from __future__ import annotations

import pytest

from ringrun.show.output import (
    HOLD_S,
    Outputs,
    Tail,
    TracebackDelay,
    cut_to_width,
    prefix,
    uses_colour,
)


def test_bars_of_several_ranks_share_the_lines() -> None:
    outputs = Outputs(dict.fromkeys(range(4), "h"), {1: False, 2: False})
    shown = b""
    for step in range(400):
        now_s = step / 10
        for rank in range(4):
            shown += outputs.feed(rank, 1, b"\r%d" % step, now_s)
        shown += b"".join(data for _, data in outputs.tick(now_s))
    assert 36 <= shown.count(b"\n") <= 48  # in 40 seconds


def test_a_terminal_shows_bars_in_one_line() -> None:
    outputs = Outputs({0: "a", 1: "b"}, {1: False, 2: False}, in_place=(1,))
    assert outputs.state() is None
    assert outputs.feed(0, 1, b"\r1/9", 0.0) == outputs.feed(1, 1, b"\r2/9", 5.0) == b""
    assert outputs.feed(1, 2, b"\rnot there\r", 5.0) == b"[b:1] not there\n"
    assert outputs.state() == (1, b"[a:0] 1/9 (and 1 more)")
    assert [data for _, data in outputs.tick(9.0)] == []
    assert outputs.feed(0, 1, b"\r9/9\n", 9.0) == b"[a:0] 9/9\n"
    assert outputs.state() == (1, b"[b:1] 2/9")


def test_a_state_fits_into_a_row() -> None:
    assert cut_to_width(b"123456789", 5) == b"1234"
    assert cut_to_width(b"\x1b[1m12\x1b[0m3456789", 5) == b"\x1b[1m12\x1b[0m34\x1b[0m"
    red = b"\x1b[38:2::255:0:0m"
    assert cut_to_width(red + b"123456789", 5) == red + b"1234\x1b[0m"
    assert cut_to_width("━━━━━━".encode(), 4) == "━━━".encode()
    assert cut_to_width("日本語\tx".encode(), 6) == "日本".encode(), "a row that wraps stays"


def test_tail_is_bounded() -> None:
    tail = Tail(lines=3, limit_bytes=10)
    for number in range(10):
        tail.add(b"%d" % number)
    assert tail.text() == ["7", "8", "9"]
    tail.add(b"x" * 9)
    assert tail.text() == ["9", "x" * 9]
    tail.add(b"\xff" * 100)
    assert tail.text() == ["\ufffd" * 100]


def test_prefix_and_colour() -> None:
    assert prefix("jetson1", 3, False) == b"[jetson1:3] "
    assert prefix("jetson1", 3, True).endswith(b"\x1b[0m ")
    assert uses_colour({"TERM": "xterm"}, True)
    assert not uses_colour({"TERM": "xterm"}, False)
    assert not uses_colour({"NO_COLOR": "1"}, True)
    assert not uses_colour({"TERM": "dumb"}, True)


TRACE = [b"Traceback (most recent call last):", b'  File "x.py", line 1', b"ValueError: x"]


def test_a_traceback_is_held_back_for_a_while() -> None:
    hold = TracebackDelay()
    assert hold.add([b"before", *TRACE], 0.0) == [b"before"]
    assert hold.waiting
    assert hold.due(HOLD_S / 2) == []
    assert hold.add([b"after"], 1.0) == []
    assert hold.due(HOLD_S) == [*TRACE, b"after"]
    assert hold.add([b"later"], 9.0) == [b"later"]


def outputs() -> Outputs:
    return Outputs({0: "a", 1: "b"}, {1: False, 2: False})


def test_consequences_are_folded_and_causes_shown() -> None:
    found = outputs()
    lost = b"\n".join([*TRACE[:2], b"ringcomm.errors.PeerLostError: rank 1 (b) was lost", b""])
    assert found.feed(0, 2, b"hello\n" + lost, 0.0) == b"[a:0] hello\n"
    assert found.feed(1, 2, b"\n".join([*TRACE, b""]), 0.0) == b""
    assert [data for _, data in found.flush(0, False, 0.1) if data] == []
    assert [data for _, data in found.flush(1, False, 0.1) if data] == []
    assert found.tick(100.0) == []
    assert found.settle({1}) == [(2, b"".join(b"[b:1] " + line + b"\n" for line in TRACE))]
    assert found.tails[0].text()[-1] == "ringcomm.errors.PeerLostError: rank 1 (b) was lost"


def test_what_the_report_shows_is_not_shown_twice() -> None:
    text = [line.decode() for line in TRACE]
    for shown, more, count in [((), b"", 0), ((1,), b"", 1), ((), b"ended\n", 1)]:
        found = outputs()
        for rank in (0, 1):
            found.feed(rank, 2, b"\n".join([*TRACE, b""]) + (more if rank else b""), 0.0)
            found.flush(rank, False, 0.1)
        assert len(found.settle(shown, [*text, ""][: len(text)])) == count
        assert found.settle((0, 1)) == []


@pytest.mark.parametrize("first", ["says so", "prints"])
def test_a_rank_that_ends_may_take_its_time(first: str) -> None:
    found = outputs()
    lost = b"\n".join([*TRACE[:2], b"ringcomm.errors.PeerLostError: rank 1 (b) was lost", b""])
    if first == "says so":
        found.ending(0)
    found.feed(0, 2, lost, 0.0)
    found.ending(0)
    assert found.tick(10 * HOLD_S) == []
    found.flush(0, False, 20 * HOLD_S)
    assert found.settle(()) == []


def test_consequences_are_folded_under_pytorchs_prefix_too() -> None:
    found = outputs()
    lines = [*TRACE[:2], b"ringcomm.errors.PeerLostError: rank 1 (b) was lost", b"", b"of no interest"]
    data = b"".join((b"[rank0]: " + line if line else line) + b"\n" for line in lines)
    assert found.feed(0, 2, data, 0.0) == b""
    found.flush(0, False, 0.1)
    assert found.settle(()) == []
    assert found.tails[0].text() == [line.decode() for line in lines]
    assert found.feed(1, 2, b"[rank is no prefix\n[rank7] nor this\n", 0.0).count(b"[rank") == 2
    assert found.tails[1].text() == ["[rank is no prefix", "[rank7] nor this"]


def test_a_rank_that_ends_well_hides_nothing() -> None:
    found = outputs()
    found.feed(0, 2, b"\n".join([*TRACE, b"rest"]), 0.0)
    shown = b"".join(data for _, data in found.flush(0, True, 0.1))
    assert shown.endswith(b"[a:0] ValueError: x\n[a:0] rest\n")


def test_the_stack_of_another_language_does_not_push_the_error_out() -> None:
    tail = Tail(lines=3)
    stack = (b"At:", b"  /x/_operation_queue.py(101): _main", b"  /y/a.py(9): <lambda>")
    for line in (b"RuntimeError: shapes differ", b"", *stack):
        tail.add(line)
    assert tail.text() == ["RuntimeError: shapes differ", ""]
