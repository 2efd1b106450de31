"""The terminal of the rank that is debugged, with real pseudo-terminals."""

from __future__ import annotations

import fcntl
import os
import select
import selectors
import struct
import termios
from typing import Any, Dict, Iterator, List

import pytest

from ringrun.agent.terminal import Terminal

GIVEN = [1, "", "xterm-256color", 100, 30]


class Rank:
    """The descriptors that an agent makes for a rank: ends of pipes for it, and one to read from."""

    def __init__(self) -> None:
        out, out_end = os.pipe()
        err, err_end = os.pipe()
        self.out, self.err = out, err
        self.ends = [os.open(os.devnull, os.O_RDONLY), out_end, err_end]
        self.env: Dict[str, str] = {}

    def close(self) -> None:
        for descriptor in (self.out, self.err, *self.ends):
            os.close(descriptor)


@pytest.fixture
def rank() -> Iterator[Rank]:
    made = Rank()
    yield made
    made.close()


@pytest.fixture
def selector() -> Iterator[selectors.BaseSelector]:
    with selectors.DefaultSelector() as made:
        yield made


def test_other_ranks_keep_their_pipes(rank: Rank, selector: selectors.BaseSelector) -> None:
    for given, number in ((GIVEN, 0), ([], 1)):
        Terminal(given, selector).attach(number, rank.ends, rank.out, rank.env)
        os.write(rank.ends[1], b"x")
        assert os.read(rank.out, 10) == b"x" and rank.env == {}
        assert not any(os.isatty(end) for end in rank.ends)


def test_on_another_host_the_rank_has_a_terminal_of_its_own(
    rank: Rank, selector: selectors.BaseSelector
) -> None:
    terminal = Terminal(GIVEN, selector)
    terminal.type("b 3\n")  # before the rank was started
    terminal.attach(1, rank.ends, rank.out, rank.env)
    assert rank.env == {"TERM": "xterm-256color"}
    assert all(os.isatty(end) for end in rank.ends)
    size = fcntl.ioctl(rank.ends[0], termios.TIOCGWINSZ, b"\0" * 8)
    assert struct.unpack("HHHH", size)[:2] == (30, 100)
    assert os.read(rank.ends[0], 100) == b"b 3\n"
    terminal.type("c\n")
    assert os.read(rank.ends[0], 100) == b"c\n"
    modes: List[Any] = termios.tcgetattr(rank.ends[0])
    assert not modes[1] & termios.OPOST, "line ends come as the rank writes them"


def test_on_this_machine_the_rank_has_the_terminal_of_the_user(
    rank: Rank, selector: selectors.BaseSelector
) -> None:
    controlling, user = os.openpty()
    terminal = Terminal([1, os.ttyname(user), "", 0, 0], selector)
    terminal.attach(1, rank.ends, rank.out, rank.env)
    assert {os.ttyname(end) for end in rank.ends} == {os.ttyname(user)}
    assert rank.env == {} and os.read(rank.out, 10) == b"", "nothing is read from the rank"
    terminal.type("x")  # the user types into the terminal itself
    assert not selector.get_map()
    os.close(controlling)
    os.close(user)


def test_keys_that_the_rank_does_not_read_yet_wait(rank: Rank, selector: selectors.BaseSelector) -> None:
    """The kernel takes some thousand of them; none is lost, and the rest is written when there is room."""
    terminal = Terminal(GIVEN, selector)
    terminal.attach(1, rank.ends, rank.out, rank.env)
    modes: List[Any] = termios.tcgetattr(rank.ends[0])
    modes[3] &= ~(termios.ICANON | termios.ECHO)  # a full canonical line would be cut
    termios.tcsetattr(rank.ends[0], termios.TCSANOW, modes)
    typed = "".join(chr(65 + number % 26) for number in range(100_000))
    terminal.type(typed)
    assert len(selector.get_map()) == 1
    read = b""
    while len(read) < len(typed):
        readable, writable, _ = select.select([rank.ends[0]], list(selector.get_map()), [], 30.0)
        assert readable or writable
        if readable:
            read += os.read(rank.ends[0], 1 << 16)
        for key, _ in selector.select(0) if writable else ():
            key.data()
    assert read.decode() == typed
    assert not selector.get_map()


def test_keys_for_a_rank_that_has_ended_are_dropped(rank: Rank, selector: selectors.BaseSelector) -> None:
    terminal = Terminal(GIVEN, selector)
    terminal.attach(1, rank.ends, rank.out, rank.env)
    os.set_blocking(rank.ends[0], False)
    for _ in range(100):  # until the terminal takes no more
        if not selector.get_map():
            terminal.type("x" * 100_000)
    selector.unregister(terminal._descriptor)
    os.close(terminal._descriptor)  # as far as writing is concerned, it is not there any more
    terminal.type("y")
    assert not terminal._typed and not selector.get_map()
