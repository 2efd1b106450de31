"""The launcher's end of a process that it has started on a host: here one that is not an agent."""

from __future__ import annotations

import select
import signal
import sys
from pathlib import Path
from typing import Callable, Iterator

import pytest

from ringrun.job.launch import prepare
from ringrun.plan.options import Options
from ringrun.reach.agent_process import AgentLink
from ringrun.reach.incoming import event_facts
from ringrun.reach.protocol import BOOT

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


def start_agent() -> int:
    """Start a real agent until it is ready, and end it; the number of bytes that were sent."""
    job = prepare(Options(np=1), [sys.executable, "-c", "pass"])
    link = AgentLink([sys.executable, "-c", BOOT], caches=True)
    link.start(job.agent_config(job.hosts[0]), None)
    sent, events = 0, []
    try:
        while "ready" not in events:
            before = sum(view.nbytes for view in link._outgoing)
            link.write()
            sent += before - sum(view.nbytes for view in link._outgoing)
            if not link.has_outgoing:
                assert select.select([link.descriptor("stdout")], [], [], 30.0)[0], link.stderr_text
                events += [event_facts(frame.data)["event"] for frame in link.read()]
            assert link.alive, link.process and link.process.stderr and link.process.stderr.read()
        assert link.noise == ""
    finally:
        link.close_stdin()
        link.close()
    return sent


def test_the_second_start_of_an_agent_sends_less_than_ten_kilobytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first, second = start_agent(), start_agent()
    assert first > 15_000 and second < 10_000
    (program,) = (tmp_path / "ringcomm-agent").iterdir()
    *kept, last = program.read_bytes()
    program.write_bytes(bytes([*kept, last ^ 1]))
    assert start_agent() == first  # a changed program is not run, but sent again
    assert start_agent() == second
