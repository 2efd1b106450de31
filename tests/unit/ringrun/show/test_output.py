"""Lines of ranks, files, and texts that are safe for a terminal."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, Dict, List, Sequence, Tuple

import pytest

from ringcomm.errors import ConfigError
from ringrun.job.launch import prepare
from ringrun.plan.options import Options
from ringrun.show.output import (
    HOLD_S,
    MAX_LINE_BYTES,
    PROGRESS_INTERVAL_S,
    STATE_INTERVAL_S,
    TAIL_BYTES,
    TAIL_LINES,
    Console,
    LineAssembler,
    OutputFiles,
    Printer,
    Tail,
    cut_to_width,
)
from ringrun.show.visible import columns, cut, visible, visible_line

BAR = " \u2501 loss: 0."
KERAS = f"\r\x1b[1m1/2\x1b[0m{BAR}5{chr(8) * 14}\r\x1b[1m2/2\x1b[0m{BAR}4\n".encode()
"""Two states of a progress bar of Keras."""


@pytest.mark.parametrize("size", [1, 2, 3, 100])
@pytest.mark.parametrize(
    ("data", "lines"),
    [
        (b"a\nb\n", [b"a", b"b"]), (b"a\n\nb", [b"a", b"", b"b"]), (b"a\r\nb\r\n", [b"a", b"b"]),
        (b"\xff\xfe\n", [b"\xff\xfe"]), (b"", []), (b"end", [b"end"]),
        # Of a progress bar the last state.
        (b"\r10%\r20%\r100%\nnext\n", [b"100%", b"next"]), (b"10%\r20%\r100%\r\n", [b"100%"]),
        (b"10%\r100%\r\r\n", [b"100%"]), (b"\r10%\r\x1b[K100%\n", [b"100%"]), (b"10%\r100%\r", [b"100%"]),
        (KERAS, [f"\x1b[1m2/2\x1b[0m{BAR}4".encode()]),
        (b" 10%" + b"\x08" * 4 + b" 20%" + b"\x08" * 4 + b"100%\n", [b"100%"]),
    ],
)  # fmt: skip
def test_lines(data: bytes, lines: List[bytes], size: int) -> None:
    assembler = LineAssembler()
    pieces = [data[start : start + size] for start in range(0, len(data), size)]
    assert [line for piece in pieces for line in assembler.feed(piece)] + assembler.flush() == lines
    assert not assembler.is_bar and assembler.flush() == []


def test_a_very_long_line_comes_in_pieces() -> None:
    assembler = LineAssembler()
    found = [line for _ in range(3) for line in assembler.feed(b"x" * 65536)] + assembler.flush()
    assert sum(map(len, found)) == 3 * 65536 and max(map(len, found)) <= 2 * MAX_LINE_BYTES


def test_tail_is_bounded_and_without_pytorchs_own_stack() -> None:
    tail = Tail()
    stack = b"At:", b"  /x/_op.py(101): _main"
    for line in (b"[rank7]: RuntimeError: shapes differ", b"[rank is no prefix", *stack):
        tail.add(line)
    assert tail.text() == ["RuntimeError: shapes differ", "[rank is no prefix"]
    for number in range(1000):
        tail.add(b"%d" % number)
    assert len(tail.text()) == TAIL_LINES and tail.text()[-1] == "999"
    tail.add(b"\xff" * TAIL_BYTES)
    assert tail.text() == ["\ufffd" * TAIL_BYTES]

# ---- the printer --------------------------------------------------------------------------------------


class Kept(Console):
    """A console that keeps the lines by stream, and the states at the bottom of the terminal."""

    def __init__(self, terminals: Sequence[int] = ()) -> None:
        self.written: Dict[int, bytes] = {1: b"", 2: b""}
        self.states: List[Tuple[int, List[bytes]]] = []
        self.terminals = terminals

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
    job = prepare(Options(**{"np": 2, **options}), ["true"], {"PATH": "/"})
    return Printer(job, console, {1: False, 2: False}, time or Time())


LOST = b"Traceback (most recent call last):\n  x\nringcomm.errors.PeerLostError: rank 1 was lost\n"
BUG = b"Traceback (most recent call last):\n  x\nValueError: x\n"


def shown(rank: int, data: bytes) -> bytes:
    return b"".join(b"[localhost:%d] %s\n" % (rank, line) for line in data.splitlines())


@pytest.mark.parametrize("torch", [False, True])
def test_tracebacks_wait_for_the_first_failure(torch: bool) -> None:
    time, console = Time(), Kept()
    printer = printer_of(console, time, np=4)
    other = b"Traceback (most recent call last):\nKeyError\n"
    for rank, data in enumerate((b"hello\n" + LOST, BUG, BUG, other)):
        if torch:
            data = data.replace(b"Trace", b"[rank0]: Trace").replace(b"ringcomm.", b"[rank0]: ringcomm.")
        printer.printed(rank, 2, data)
        assert printer.waiting and console.written[2] == shown(0, b"hello")
        printer.ended(rank, False)
    time.now_s += 3600.0
    printer.tick()
    assert console.written[2] == shown(0, b"hello")
    printer.settle(1)
    assert console.written[2].replace(b"[rank0]: ", b"") == shown(0, b"hello") + shown(3, other)
    assert printer.tails()[1] == BUG.decode().splitlines() and not printer.waiting


@pytest.mark.parametrize("ends", [False, True])
def test_a_traceback_of_a_rank_that_continues_or_ends_well_is_shown(ends: bool) -> None:
    time, console = Time(), Kept()
    printer = printer_of(console, time)
    printer.printed(0, 2, LOST + b"goes on\n")
    assert console.written[2] == b""
    time.now_s += HOLD_S
    if ends:
        printer.ended(0, True)
    else:
        printer.tick()
    assert console.written[2] == shown(0, LOST + b"goes on") and not printer.waiting


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
    printer_of(console).show("one\x1b[2J\ntwo")
    lines = console.written[2].decode().splitlines()
    assert len(lines) == 2 and all(line.startswith("ringrun: ") for line in lines)
    assert "\x1b" not in lines[0] and lines[1] == "ringrun: two"


def test_without_a_terminal_bars_of_all_ranks_share_the_lines() -> None:
    time, console = Time(), Kept()
    printer = printer_of(console, time, np=4)
    for step in range(400):
        for rank in range(4):
            printer.printed(rank, 1, b"\r%d" % step)
        printer.tick()
        time.now_s += 0.1
    assert 36 <= console.written[1].count(b"\n") <= 48  # in 40 seconds
    before = console.written[1]
    time.now_s += 4 * PROGRESS_INTERVAL_S
    printer.tick()
    printer.printed(0, 1, b"\r399\nnext\n")
    assert console.written[1][len(before) :].count(b"[localhost:0] 399\n") <= 1
    assert console.written[1].endswith(b"[localhost:0] next\n")


def test_a_terminal_has_one_line_for_all_bars_below_the_block() -> None:
    time, console = Time(), Kept(terminals=(1, 2))
    printer = printer_of(console, time)

    def tick() -> List[Tuple[int, List[bytes]]]:
        del console.states[:]
        time.now_s += STATE_INTERVAL_S
        printer.tick()
        return list(console.states)

    assert tick() == []
    printer.printed(0, 1, b"\r1/9")
    assert tick() == [(1, [b"[localhost:0] 1/9"])] and printer.waiting
    printer.printed(1, 1, b"\r2/9")
    assert tick() == [(1, [b"[localhost:0] 1/9 (and 1 more)"])] and tick() == []
    printer.printed(1, 2, b"a line\n")
    assert tick() == [(1, [b"[localhost:0] 1/9 (and 1 more)"])], "the line has taken its place"
    printer.block = [b"table"]
    printer.printed(0, 1, b"\r9/9\n")
    assert console.written[1] == b"[localhost:0] 9/9\n"
    assert tick() == [(2, [b"table", b"[localhost:1] 2/9"])]
    printer.block = []
    printer.printed(1, 1, b"\r9/9\n")
    printer.tick()
    assert not printer.waiting


def test_a_state_fits_into_a_row() -> None:
    assert cut_to_width(b"123456789", 5) == b"1234"
    assert cut_to_width(b"\x1b[1m12\x1b[0m3456789", 5) == b"\x1b[1m12\x1b[0m34\x1b[0m"
    red = b"\x1b[38:2::255:0:0m"
    assert cut_to_width(red + b"123456789", 5) == red + b"1234\x1b[0m"
    assert cut_to_width("日本語\tx".encode(), 6) == "日本".encode(), "a row that wraps stays"


def test_colours_are_for_terminals(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Console().coloured({}) == {1: False, 2: False}
    monkeypatch.setattr(Console, "terminals", (2,))
    assert Console().coloured({}) == {1: False, 2: True}
    assert Console().coloured({"NO_COLOR": "1"}) == {1: False, 2: False}


def test_a_link_in_the_place_of_a_ranks_folder_is_not_followed(tmp_path: Path) -> None:
    """The folder is opened once, and what is below it by that descriptor."""
    (tmp_path / "other").mkdir()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "rank.0").symlink_to(tmp_path / "other")
    with pytest.raises(ConfigError, match=re.escape(f"{tmp_path}/out/rank.0 cannot be written")):
        OutputFiles(tmp_path / "out").add(0)
    assert list((tmp_path / "other").iterdir()) == []


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain\ttext\nof two lines, über", "plain\ttext\nof two lines, über"),
        ("\x1b[1;31mred\x1b[0m", "red"),
        ("\x1b]0;title\x07", "\\x1b]0;title\\x07"),
        ("\x1b[2J\x9b2J", "\\x1b[2J\\x9b2J"),
        ("over\rwritten\b", "over\\x0dwritten\\x08"),
        ("a line of ssh\r\n", "a line of ssh\n"),
        ("evil\u202egpj.exe", "evil\\u202egpj.exe"),
        ("no room\u200b\ufeff, a tag\U000e0041", "no room\\u200b\\ufeff, a tag\\U000e0041"),
        ("half \ud800, a byte \udcff", "half \\ud800, a byte \\udcff"),
    ],
)
def test_what_a_terminal_would_execute_is_shown_instead(text: str, shown: str) -> None:
    assert visible(text) == shown
    visible(text).encode()


def test_a_part_of_a_line_stays_in_it() -> None:
    assert visible_line("a\nb\tc\x1b[31m\r\n\x85") == "a\\nb\\tc\\n\\x85"


@pytest.mark.parametrize(
    ("text", "taken"),
    [("abc", 3), ("日本", 4), ("ａ", 2), ("e\u0301", 1), ("\u200d", 0), ("a\tb", 10), ("🙂", 2), ("", 0)],
)
def test_the_columns_that_a_text_takes(text: str, taken: int) -> None:
    assert columns(text) == taken
    assert cut(text, taken) == (text, 0) and cut(text, taken + 3) == (text, 3)


def test_what_does_not_fit_is_cut() -> None:
    assert cut("abcdef", 4) == ("abcd", 0)
    assert cut("日本語", 5) == ("日本", 0), "half a character is none"
    shown, left = cut("a" + "\u0301" * 1000 + "b", 9)
    assert len(shown) < 10 and shown[-1] == "b" and left == 7
