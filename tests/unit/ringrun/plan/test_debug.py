"""``--debug RANK``: which terminal the rank gets, with a real pseudo-terminal."""

from __future__ import annotations

import fcntl
import os
import struct
import termios
from typing import Callable, Iterator, List, Tuple

import pytest

from ringcomm.errors import ConfigError
from ringrun.plan.debug import LIMITS, Debugged, terminal_for, without_limits
from ringrun.plan.horovod import SettingValue
from ringrun.plan.hosts import parse_hosts
from ringrun.plan.ranks import make_plan

PLAN = make_plan(2, parse_hosts("here,far"))
ARE_LOCAL = (True, False)


@pytest.fixture
def descriptors() -> Iterator[Callable[..., str]]:
    """`descriptors(*terminals)`: those of 0 to 2 are a terminal of 100 x 30, the others none; its path."""
    controlling, terminal = os.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
    nothing = os.open(os.devnull, os.O_RDWR)
    kept = [os.dup(number) for number in range(3)]

    def choose(*terminals: int) -> str:
        for number in range(3):
            os.dup2(terminal if number in terminals else nothing, number)
        return os.ttyname(terminal)

    yield choose
    for number, descriptor in enumerate(kept):
        os.dup2(descriptor, number)
    for descriptor in (*kept, controlling, terminal, nothing):
        os.close(descriptor)


def test_without_the_option_no_rank_is_debugged() -> None:
    assert terminal_for(None, PLAN, ARE_LOCAL, True, {}) is None


@pytest.mark.parametrize(
    ("rank", "watch", "terminals", "text"),
    [
        (0, True, (0, 1, 2), "--debug and --watch both need the terminal"),
        (2, False, (0, 1, 2), "--debug 2: there are the ranks 0 to 1"),
        (0, False, (1, 2), "--debug 0: stdin is no terminal"),
        (1, False, (0,), "--debug 1: neither stdout nor stderr is a terminal"),
    ],
)
def test_a_rank_that_cannot_get_the_terminal(
    descriptors: Callable[..., str], rank: int, watch: bool, terminals: Tuple[int, ...], text: str
) -> None:
    descriptors(*terminals)
    with pytest.raises(ConfigError, match=text):
        terminal_for(rank, PLAN, ARE_LOCAL, watch, {})


def test_a_rank_of_this_machine_opens_the_terminal_itself(descriptors: Callable[..., str]) -> None:
    """What its stdout is does not matter: the rank does not use it."""
    path = descriptors(0)
    found = terminal_for(0, PLAN, ARE_LOCAL, False, {"TERM": "xterm"})
    assert found == Debugged(0, path, "xterm", 100, 30)


@pytest.mark.parametrize("shown", [1, 2])
def test_a_rank_of_another_host_gets_a_terminal_of_the_same_size(
    descriptors: Callable[..., str], shown: int
) -> None:
    descriptors(0, shown)
    assert terminal_for(1, PLAN, ARE_LOCAL, False, {}) == Debugged(1, "", "dumb", 100, 30)


@pytest.mark.parametrize("given", [[], ["timeout_s"], [*LIMITS, "iface"]])
def test_limits_that_the_user_has_not_set_are_switched_off(given: List[str]) -> None:
    expected = [SettingValue(name, "0", "--debug", "--debug") for name in LIMITS if name not in given]
    assert without_limits(given) == expected
