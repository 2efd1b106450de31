"""The launcher's end of a process that it has started on a host: here one that is not an agent."""

from __future__ import annotations

import select
import signal
import subprocess
import sys
from typing import Callable, Iterator

import pytest

from ringrun.reach.agent_process import Link

READS_ALL = "import sys; data = sys.stdin.buffer.read(); sys.stderr.write(str(len(data)))"
READS_NOTHING = "import time; print('up', flush=True); time.sleep(1000)"


@pytest.fixture
def started() -> Iterator[Callable[..., Link]]:
    """`started(program)`: a link to a Python that runs this program."""
    links = []

    def start(program: str, payload: bytes = b"") -> Link:
        links.append(Link([sys.executable, "-c", program]))
        links[-1].start({"ranks": [0]}, payload or None)
        return links[-1]

    yield start
    for link in links:
        link.kill()
        link.close()


def test_all_that_is_queued_arrives(started: Callable[..., Link]) -> None:
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


def test_what_is_sent_after_the_end_is_dropped(started: Callable[..., Link]) -> None:
    link = started(READS_ALL)
    link.close_stdin()
    link.send({"do": "stop"})
    assert not link.has_outgoing and link.descriptor("stdin") == -1


def test_a_process_that_does_not_read_is_killed_with_its_group(started: Callable[..., Link]) -> None:
    link = started(READS_NOTHING, b"x" * 3_000_000)
    assert link.process is not None
    link.write()
    assert link.has_outgoing
    link.kill()
    assert link.process.wait(20.0) == -signal.SIGKILL
    link.kill()  # again, which has no effect
    link.close()
    assert link.at_end and [link.descriptor(name) for name in ("stdin", "stdout", "stderr")] == [-1] * 3


def test_a_link_that_was_never_started_can_be_closed() -> None:
    link = Link(["true"])
    link.kill()
    link.close()
    assert link.at_end


def test_what_is_written_to_the_console_is_complete_at_its_end() -> None:
    program = (
        "from ringrun.show.console import DescriptorConsole\n"
        "console = DescriptorConsole()\n"
        "for number in range(200): console.write(1 + number % 2, b'%d\\n' % number)\n"
        "console.close()\n"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == [str(number) for number in range(0, 200, 2)]
    assert done.stderr.split() == [str(number) for number in range(1, 200, 2)]
