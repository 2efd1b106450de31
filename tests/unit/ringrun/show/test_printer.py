"""What becomes of the ranks' output: prefixes, files, delayed tracebacks, states of progress bars."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Collection, Dict, List, Sequence, Tuple

from ringrun.job.launch import prepare
from ringrun.plan.options import Options
from ringrun.show.console import Console
from ringrun.show.printer import STATE_INTERVAL_S, Printer

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
