"""Engines without threads that a test drives, over memory and a clock that is a number."""

from __future__ import annotations

from typing import Any, Dict, List, Optional, Sequence

import numpy as np

from ringcomm.collective.observe import Progress
from ringcomm.collective.runner import Runner
from ringcomm.config import Settings
from ringcomm.engine.bucket_runner import BucketRunner
from ringcomm.engine.coordinator import Coordinator, Tuning
from ringcomm.engine.cycle import EngineState
from ringcomm.engine.peer_channels import PeerChannels, SilenceLimits
from ringcomm.engine.process_sets import ProcessSets
from ringcomm.engine.request import Handle, OperationHistory, Request
from ringcomm.errors import PeerLostError
from ringcomm.group.failures import Reporter
from ringcomm.transport.base import StoppableWatch
from ringcomm.transport.memory import memory_fabrics
from tests.unit.engine.coordinated import sig

NOTHING: Dict[str, Any] = {
    "type": "responses", "fresh": [], "settled": [], "run": [], "failed": [], "joined": -1, "repeats": []
}


class Job:
    """Engines without threads, over memory and a clock that is a number; `closed` has by reporting rank the
    ranks whose links ended.
    """

    def __init__(self, size: int = 2, limits: SilenceLimits = SilenceLimits()) -> None:  # noqa: B008
        self.now_s = 0.0
        self.closed: List[List[int]] = [[] for _ in range(size)]
        hosts = [f"host{rank}" for rank in range(size)]
        self.fabrics, self.background = memory_fabrics(size), memory_fabrics(size)
        self.sets = [ProcessSets(rank, size) for rank in range(size)]
        self.running = [Progress() for _ in range(size)]
        self.states = [self._state(rank, hosts, limits) for rank in range(size)]

    def _state(self, rank: int, hosts: Sequence[str], limits: SilenceLimits) -> EngineState:
        def make_runner(fabric: Any) -> Runner:
            return Runner(fabric, Settings(timeout_s=0.01))

        def lost(peer: int, why: str, kind: str) -> BaseException:
            return PeerLostError(f"{kind}: {why}", rank=peer)

        def calls() -> Any:
            return self.running[rank], Progress()

        closed = self.closed[rank]

        class Reports(Reporter):
            def note_closed(self, peer: int, why: str) -> None:
                closed.append(peer)

        coordinator = None
        if rank == 0:
            tuning = Tuning(1 << 20, 0.0, limits.warning_s, limits.late_after_s)
            coordinator = Coordinator(hosts, self.sets[0].members, tuning)
        peers = PeerChannels(self.fabrics[rank], hosts, limits, lost, calls, lambda: self.now_s)
        buckets = BucketRunner(self.background[rank], make_runner, self.sets[rank])
        watch, history = StoppableWatch(None), OperationHistory(8, lambda _: 0)
        return EngineState(
            self.fabrics[rank], peers, buckets, coordinator, watch, Reports(), lambda: self.now_s, history
        )

    def turn(self, count: int = 4) -> None:
        """Every engine does what it can."""
        for _ in range(count):
            for state in self.states:
                state.wake_up()
                while state.cycle():
                    pass

    def responses(self, **content: Any) -> None:
        """Rank 0 sends responses."""
        self.states[0].peers.messages.send({**NOTHING, **content})

    def submit(self, rank: int, name: str, value: float, urgent: bool = True, **changes: Any) -> Request:
        request = self.request(name, value, **changes)
        request.urgent = urgent
        self.states[rank].pending.add(request)
        return request

    def request(self, name: str, value: float = 0.0, **changes: Any) -> Request:
        array = np.full(2, value)
        signature = sig(name, **{"dtypes": ("float64",), "shapes": ((2,),), **changes})
        return Request(signature, [array], Handle(name))

    def submit_known(self, ranks: int, name: str, **changes: Any) -> List[Request]:
        """Each of the first ranks submits an operation that ran before, whose caller waits: rank + 1."""
        requests = [self.submit(rank, name, rank + 1.0, **changes) for rank in range(ranks)]
        coordinator, signature = self.states[0].coordinator, requests[0].signature
        assert coordinator is not None
        fresh: List[Any] = []
        coordinator._numbers.of(signature, fresh)
        for state in self.states:
            state.pending.learn(fresh)
        return requests


def error_of(handle: Handle) -> Optional[BaseException]:
    try:
        handle.wait(0.0)
    except BaseException as error:  # noqa: BLE001 - looked at by the test
        return error
    return None
