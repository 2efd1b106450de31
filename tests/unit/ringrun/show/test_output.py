"""The ranks' output: lines, progress bars, prefixes, delayed tracebacks, files, and ringrun's messages."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Collection, Dict, List, Sequence, Tuple

import pytest

from ringrun.job.launch import prepare
from ringrun.plan.options import Options
from ringrun.show.console import Console
from ringrun.show.output import (
    HOLD_S,
    MAX_LINE_BYTES,
    STATE_INTERVAL_S,
    LineAssembler,
    Outputs,
    Printer,
    Tail,
    TracebackDelay,
    prefix,
)


def pieces(data: bytes, size: int) -> List[bytes]:
    return [data[start : start + size] for start in range(0, len(data), size)]


@pytest.mark.parametrize("size", [1, 2, 3, 100])
@pytest.mark.parametrize(
    ("data", "lines"),
    [
        (b"a\nb\n", [b"a", b"b"]),
        (b"a\n\nb", [b"a", b"", b"b"]),
        (b"a\r\nb\r\n", [b"a", b"b"]),
        (b"\xff\xfe\n", [b"\xff\xfe"]),
        (b"", []),
        (b"end", [b"end"]),
    ],
)
def test_lines(data: bytes, lines: List[bytes], size: int) -> None:
    assembler = LineAssembler()
    found = [line for piece in pieces(data, size) for line in assembler.feed(piece, 0.0)]
    assert found + assembler.flush() == lines


@pytest.mark.parametrize(
    "data",
    [
        b"\r10%\r20%\r100%\n", b"10%\r20%\r100%\r\n", b"10%\r20%\r100%\r\r\n", b"\r10%\r\x1b[K100%\n",
        b"10%\r100%\r",
    ],
)  # fmt: skip
def test_a_progress_bar_is_shown_once_a_second_and_in_its_final_state(data: bytes) -> None:
    assembler = LineAssembler()
    lines = assembler.feed(data, 0.0) + assembler.flush()
    assert lines[-1] == b"100%"
    assert len(lines) <= 2
    assert assembler.flush() == []


def test_progress_is_throttled() -> None:
    assembler = LineAssembler()
    shown: List[Tuple[float, bytes]] = []
    for step in range(40):
        now_s = step / 10
        shown += [(now_s, line) for line in assembler.feed(b"\r%d%%" % step, now_s)]
        shown += [(now_s, line) for line in assembler.tick(now_s)]
    assert [line for _, line in shown] == [b"0%", b"10%", b"20%", b"30%"]
    assert assembler.is_bar
    assert assembler.tick(10.0) == [b"39%"]
    assert assembler.tick(20.0) == []  # nothing new
    assert assembler.feed(b"\r39%\n", 20.0) == []  # it was shown already
    assert not assembler.is_bar
    assert assembler.feed(b"next\n", 21.0) == [b"next"]


BAR = " \u2501 loss: 0."
KERAS = f"\r\x1b[1m1/2\x1b[0m{BAR}5{chr(8) * 14}\r\x1b[1m2/2\x1b[0m{BAR}4\n".encode()
"""Two states of a progress bar of Keras."""


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
@pytest.mark.parametrize(
    ("data", "last"),
    [
        (KERAS, f"\x1b[1m2/2\x1b[0m{BAR}4".encode()),
        (b" 10%" + b"\x08" * 4 + b" 20%" + b"\x08" * 4 + b"100%\n", b"100%"),
        (b"\xe2\x94\x81 1" + b"\x08" * 3 + b"\xe2\x94\x81 2\n", b"\xe2\x94\x81 2"),
    ],
)
def test_backspaces_redraw_a_line(data: bytes, last: bytes, size: int) -> None:
    assembler = LineAssembler()
    lines = [line for piece in pieces(data, size) for line in assembler.feed(piece, 0.0)]
    assert lines[-1] == last
    assert len(lines) <= 2
    assert not any(b"\x08" in line for line in lines)
    assert not assembler.is_bar


def test_a_very_long_line_comes_in_pieces() -> None:
    assembler = LineAssembler()
    data = b"x" * (2 * MAX_LINE_BYTES + 10)
    found = [line for piece in pieces(data, 65536) for line in assembler.feed(piece, 0.0)] + assembler.flush()
    assert b"".join(found) == data
    assert max(map(len, found)) <= MAX_LINE_BYTES


# ---- streams of all ranks -----------------------------------------------------------------------------


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


def test_tail_is_bounded() -> None:
    tail = Tail(lines=3, limit_bytes=10)
    for number in range(10):
        tail.add(b"%d" % number)
    assert tail.text() == ["7", "8", "9"]
    tail.add(b"x" * 9)
    assert tail.text() == ["9", "x" * 9]
    tail.add(b"\xff" * 100)
    assert tail.text() == ["\ufffd" * 100]


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


def test_a_prefix_has_the_colour_of_its_rank() -> None:
    assert prefix("jetson1", 3, False) == b"[jetson1:3] "
    assert prefix("jetson1", 3, True).endswith(b"\x1b[0m ")


# ---- the printer --------------------------------------------------------------------------------------

TRACEBACK = b"Traceback (most recent call last):\nringcomm.errors.PeerLostError: rank 1 was lost\n"


class Kept(Console):
    """A console that keeps the lines by stream, and the states at the bottom of the terminal."""

    def __init__(self, terminals: Collection[int] = ()) -> None:
        self.written: Dict[int, bytes] = {1: b"", 2: b""}
        self.states: List[Tuple[int, List[bytes]]] = []
        self._terminals = terminals

    @property
    def terminals(self) -> Collection[int]:
        return self._terminals

    def write(self, stream: int, data: bytes) -> None:
        assert data
        self.written[stream] += data

    def show_state(self, stream: int, lines: Sequence[bytes]) -> None:
        self.states.append((stream, list(lines)))


class Time:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def printer_of(console: Console, time: Any = None, **options: Any) -> Printer:
    job = prepare(Options(np=2, **options), ["true"], {"PATH": "/"})
    return Printer(job, console, {1: False, 2: False}, time or Time())


def test_a_traceback_waits_for_the_first_failure() -> None:
    time, console = Time(), Kept()
    printer = printer_of(console, time)
    for rank in range(2):
        printer.printed(rank, 2, TRACEBACK)
    assert printer.waiting and console.written[2] == b""
    printer.ending(0)
    for rank in range(2):
        printer.ended(rank, False)
    time.now_s += 3600.0
    printer.tick()
    assert console.written[2] == b"", "both wait until it is known which rank has failed first"
    printer.settle([1])
    lines = console.written[2].splitlines()
    assert lines == [b"[localhost:1] " + line for line in TRACEBACK.splitlines()]
    assert printer.tails() == {rank: TRACEBACK.decode().splitlines() for rank in range(2)}
    assert not printer.waiting


def test_files_get_the_bytes_as_they_are(tmp_path: Path) -> None:
    console = Kept()
    printer = printer_of(console, output_dir=str(tmp_path))
    printer.printed(0, 1, b"10%\r20%\r")
    printer.add(2, "jetson1")
    printer.printed(2, 2, b"\xff\n")
    printer.remove(2)
    printer.printed(2, 2, b"late\n")
    printer.close()
    assert (tmp_path / "rank.0" / "stdout").read_bytes() == b"10%\r20%\r"
    assert (tmp_path / "rank.2" / "stderr").read_bytes() == b"\xff\n"
    assert console.written[2] == b"[jetson1:2] \xff\n"


def test_a_file_that_cannot_be_written_is_reported_once(tmp_path: Path) -> None:
    console = Kept()
    printer = printer_of(console, output_dir=str(tmp_path))
    assert printer._files is not None
    path, descriptor = printer._files._files[0, 1]
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, descriptor)
    os.close(full)
    for line in (b"one\n", b"two\n"):
        printer.printed(0, 1, line)
    problem = f"ringrun: {path}: No space left on device; further output is not written to it.\n"
    assert console.written == {1: b"[localhost:0] one\n[localhost:0] two\n", 2: problem.encode()}
    printer.close()


def test_messages_of_ringrun() -> None:
    console = Kept()
    printer = printer_of(console)
    printer.show("one\x1b[2J\ntwo")
    lines = console.written[2].decode().splitlines()
    assert len(lines) == 2 and all(line.startswith("ringrun: ") for line in lines)
    assert "\x1b" not in lines[0] and lines[1] == "ringrun: two"


def test_a_progress_bar_is_shown_at_the_bottom_of_a_terminal() -> None:
    time, console = Time(), Kept(terminals=(1, 2))
    printer = printer_of(console, time)
    printer.printed(0, 2, b"\r10%")
    assert console.states == [(2, [b"[localhost:0] 10%"])] and printer.waiting
    printer.printed(0, 2, b"\r20%")
    assert len(console.states) == 1, "not so soon"
    time.now_s += STATE_INTERVAL_S
    printer.tick()
    assert console.states[1:] == [(2, [b"[localhost:0] 20%"])]
    time.now_s += STATE_INTERVAL_S
    printer.tick()
    assert len(console.states) == 2, "it has not changed"
    printer.printed(1, 1, b"a line\n")
    assert console.states[2:] == [(2, [b"[localhost:0] 20%"])], "the line has taken its place"
    time.now_s += STATE_INTERVAL_S
    printer.printed(0, 2, b"\rdone\n")
    assert len(console.states) == 3 and console.written[2] == b"[localhost:0] done\n"
