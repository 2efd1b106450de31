"""Consoles whose descriptors are pipes, terminals and full disks of the test; and the files of ranks."""

from __future__ import annotations

import fcntl
import os
import select
import struct
import termios
import threading
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List

import pytest

from ringcomm.errors import ConfigError
from ringrun.show.output import FULL_BYTES, DescriptorConsole, OutputFiles
from tests.support.service import opened, remains

LIMIT_S = 60.0


class Streams:
    """Connects descriptors 1 and 2 of this process to `ends`, from which a test reads."""

    def __init__(self) -> None:
        self._kept = {stream: os.dup(stream) for stream in (1, 2)}
        self._consoles: List[DescriptorConsole] = []
        self.ends: Dict[int, int] = {}

    def _lead(self, stream: int, descriptor: int) -> None:
        os.dup2(descriptor, stream)
        os.close(descriptor)

    def pipe(self, stream: int) -> None:
        self.ends[stream], writer = os.pipe()
        self._lead(stream, writer)

    def terminal(self, stream: int, rows: int = 40, columns: int = 20) -> None:
        self.ends[stream], terminal = os.openpty()
        modes: List[Any] = termios.tcgetattr(terminal)
        modes[1] &= ~termios.OPOST
        termios.tcsetattr(terminal, termios.TCSANOW, modes)
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self._lead(stream, terminal)

    def file(self, stream: int, path: str) -> None:
        self._lead(stream, os.open(path, os.O_WRONLY))

    def console(self) -> DescriptorConsole:
        self._consoles.append(DescriptorConsole())
        return self._consoles[-1]

    def read(self, stream: int, count: int) -> bytes:
        """So many bytes of what was written."""
        data = b""
        while len(data) < count:
            assert select.select([self.ends[stream]], [], [], LIMIT_S)[0], data
            data += os.read(self.ends[stream], count - len(data))
        return data

    def is_silent(self, stream: int) -> bool:
        return not select.select([self.ends[stream]], [], [], 0.0)[0]

    def hang_up(self, stream: int) -> None:
        """The reader of a stream ends."""
        os.close(self.ends.pop(stream))

    def end(self) -> None:
        for stream in list(self.ends):
            self.hang_up(stream)
        for stream, descriptor in self._kept.items():
            os.dup2(descriptor, stream)
            os.close(descriptor)
        for console in self._consoles:
            console.close(LIMIT_S)
            assert not console._thread.is_alive()


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Iterator[Streams]:
    monkeypatch.setenv("TERM", "xterm")
    made = Streams()
    yield made
    made.end()


def test_a_slow_reader_is_waited_for(streams: Streams) -> None:
    """Nothing is lost, the caller is not blocked, and it is woken when there is room again."""
    streams.pipe(1)
    console = streams.console()
    woken = threading.Event()
    console.on_change(woken.set)
    assert not console.full
    pieces = 2 * FULL_BYTES // 65536
    for _ in range(pieces):
        console.write(1, bytes(65536))
    assert console.full and not woken.is_set()
    streams.read(1, (pieces - 4) * 65536)
    assert woken.wait(LIMIT_S)
    streams.read(1, 4 * 65536)
    console.close()
    assert not console.full and not console.broken


def test_a_reader_that_has_ended_ends_both_streams(streams: Streams) -> None:
    streams.pipe(1)
    streams.pipe(2)
    streams.hang_up(1)
    console = streams.console()
    woken = threading.Event()
    console.on_change(woken.set)
    console.write(1, b"a line\n")
    assert woken.wait(LIMIT_S)
    assert console.broken and console.problem == "" and not console.full
    console.write(2, b"a line\n")
    console.close()
    assert streams.is_silent(2)


@pytest.mark.parametrize(("stream", "name"), [(1, "stdout"), (2, "stderr")])
def test_a_full_disk_ends_one_stream(streams: Streams, stream: int, name: str) -> None:
    other = 3 - stream
    streams.pipe(other)
    streams.file(stream, "/dev/full")
    console = streams.console()
    woken = threading.Event()
    console.on_change(woken.set)
    console.write(stream, b"a line\n")
    assert woken.wait(LIMIT_S)
    console.write(stream, b"another\n")
    console.write(other, b"a line\n")
    console.close()
    assert streams.read(other, 7) == b"a line\n"
    assert console.broken
    assert console.problem == f"The output cannot be written to {name}: No space left on device."


def test_the_state_at_the_bottom_of_a_terminal_is_written_over(streams: Streams) -> None:
    streams.pipe(1)
    streams.terminal(2)
    console = streams.console()
    assert list(console.terminals) == [2] and console.rows == 40
    assert console.coloured({"TERM": "xterm"}) == {1: False, 2: True}
    console.show_state(2, [b"loss 0.25", b"x" * 100])
    shown = b"loss 0.25\n" + b"x" * 19
    assert streams.read(2, len(shown)) == shown
    console.write(2, b"a warning\n")
    cleared = b"\r\x1b[K\x1b[A\x1b[K"
    assert streams.read(2, len(cleared) + 10) == cleared + b"a warning\n"
    console.show_state(2, [b"50%"])
    console.show_state(2, [])
    assert streams.read(2, 3 + 4) == b"50%\r\x1b[K"
    console.show_state(2, [b"60%"])
    console.close()
    assert streams.read(2, 3 + 4) == b"60%\r\x1b[K"


# ---- the files of ranks ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "spoil",
    [lambda folder: folder.touch(), lambda folder: (folder.mkdir(), (folder / "rank.1").touch())],
    ids=["folder", "rank"],
)
def test_a_directory_that_cannot_be_made(tmp_path: Path, spoil: Callable[[Path], object]) -> None:
    before = opened()
    spoil(tmp_path / "out")
    files = OutputFiles(tmp_path / "out")
    with pytest.raises(ConfigError, match=f"--output-dir {tmp_path}/out: .*Name a directory"):
        for rank in range(2):
            files.add(rank)
    assert not remains(before), "the files of rank 0 are closed"
