"""The agents of a job's hosts as the supervisor sees them: real ones, which are told to stop or die."""

from __future__ import annotations

import sys
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

import pytest

from ringcomm.clock import Deadline, monotonic
from ringrun.agent.framing import EVENT
from ringrun.job.agents import END, Agents
from ringrun.job.event_loop import Loop
from ringrun.job.launch import prepare
from ringrun.plan.job import HostJob
from ringrun.plan.options import Options
from ringrun.reach.agent_process import AgentLink
from ringrun.reach.incoming import event_facts
from ringrun.reach.protocol import Frame

LIMIT_S = 60.0


class Handler:
    """Keeps the agents' reports: events in order, and the status of each link's process that has ended."""

    def __init__(self) -> None:
        self.events: List[Dict[str, Any]] = []
        self.ended: List[Tuple[str, Optional[int]]] = []

    def received(self, host: HostJob, frame: Frame) -> None:
        if frame.kind == EVENT:
            self.events.append(event_facts(frame.data))

    def chattered(self, host: HostJob, data: bytes) -> None:
        raise AssertionError(data)

    def confused(self, host: HostJob, why: str) -> None:
        raise AssertionError(why)

    def problem(self, host: HostJob, text: str) -> None:
        raise AssertionError(text)

    def hung_up(self, host: HostJob, link: AgentLink, status: Optional[int]) -> bool:
        self.ended.append((host.name, status))
        return False

    @property
    def names(self) -> List[str]:
        return [facts["event"] for facts in self.events]


@pytest.fixture
def started() -> Iterator[Tuple[Agents, Handler, Callable[..., None]]]:
    """The agents of a job of one rank, whose agent is ready; their handler; and a loop until a condition."""
    loop, handler = Loop(monotonic), Handler()
    job = prepare(Options(np=1), [sys.executable, "-c", "import time; time.sleep(1000)"])
    agents = Agents(job, loop, handler)

    def run_until(condition: Callable[[], bool], look: bool = True) -> None:
        deadline = Deadline(LIMIT_S)
        while not condition():
            assert not deadline.expired(), (handler.names, handler.ended)
            agents.go_on(reading=True)
            loop.run_once(0.05)
            if look:
                agents.look()

    run_until(lambda: "ready" in handler.names)
    yield agents, handler, run_until
    agents.force()
    loop.close()


def test_an_agent_that_is_told_to_stop_ends_its_ranks_and_reports_it(started: Any) -> None:
    agents, handler, run_until = started
    agents.send(agents.job.hosts[0], {"do": "go", "env": {}})
    run_until(lambda: "started" in handler.names)
    agents.stop(END)
    run_until(lambda: "done" in handler.names)
    (end,) = [facts for facts in handler.events if facts["event"] == "exit"]
    assert (end["signal"], end["sent"]) == (15, 15)
    agents.dismiss(agents.job.hosts[0])
    run_until(lambda: agents.all_closed)
    assert handler.ended == [("localhost", 0)]


def test_of_an_agent_that_exits_already_the_end_is_reported(started: Any) -> None:
    """Its status says why it has ended; to stop it once more would lose that."""
    agents, handler, run_until = started
    process = agents.links[0].process
    process.kill()
    run_until(lambda: agents.fading, look=False)
    agents.stop(END)
    run_until(lambda: agents.all_closed)
    assert handler.ended == [("localhost", -9)]
