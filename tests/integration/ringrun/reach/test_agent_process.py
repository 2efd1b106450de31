"""The launcher's end of a process that it has started on a host: here one that is not an agent."""

from __future__ import annotations

import select
import signal
import sys
from typing import Callable, Iterator

import pytest

from ringrun.reach.protocol import AgentLink

READS_ALL = "import sys; data = sys.stdin.buffer.read(); sys.stderr.write(str(len(data)))"
READS_NOTHING = "import time; print('up', flush=True); time.sleep(1000)"


@pytest.fixture
def started() -> Iterator[Callable[..., AgentLink]]:
    """`started(program)`: a link to a Python that runs this program."""
    links = []

    def start(program: str, payload: bytes = b"") -> AgentLink:
        links.append(AgentLink([sys.executable, "-c", program]))
        links[-1].start({"ranks": [0]}, payload or None)
        return links[-1]

    yield start
    for link in links:
        link.kill()
        link.close()


def test_all_that_is_queued_arrives(started: Callable[..., AgentLink]) -> None:
    link = started(READS_ALL, b"x" * 3_000_000)
    queued = sum(view.nbytes for view in link._outgoing)
    while link.has_outgoing:
        select.select([], [link.descriptor("stdin")], [], 10.0)
        link.write()
    link.close_stdin()
    assert link.process is not None and link.process.stderr is not None
    link.process.wait(20.0)
    assert link.process.stderr.read() == str(queued).encode()
    assert queued > 3_000_000


def test_a_process_that_does_not_read_is_killed_with_its_group(started: Callable[..., AgentLink]) -> None:
    link = started(READS_NOTHING, b"x" * 3_000_000)
    assert link.process is not None
    link.write()
    assert link.has_outgoing
    link.kill()
    assert link.process.wait(20.0) == -signal.SIGKILL
    link.kill()  # again, which has no effect
    link.close()
    assert link.at_end and [link.descriptor(name) for name in ("stdin", "stdout", "stderr")] == [-1] * 3


def test_a_process_that_has_ended_takes_nothing(started: Callable[..., AgentLink]) -> None:
    """Its end is reported by reading, so writing is no error."""
    link = started("pass", b"x" * 3_000_000)
    assert link.process is not None
    link.process.wait(20.0)
    assert link.has_outgoing
    link.write()
    assert not link.has_outgoing and link.read() == [] and link.at_end and link.poll() == 0
