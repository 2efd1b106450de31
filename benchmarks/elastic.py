"""How long an elastic job needs after a loss, and how long a new process delays the others.

    python -m benchmarks.elastic --rounds 20

Four processes on this machine hold 100 MB of state and take short steps. In every round one is killed (rank 0
in every second round), and a new one started. The time of a loss is from SIGKILL until all survivors have
finished a step, that of a join from the moment when the first process leaves the old view until the new
one is connected.
"""

from __future__ import annotations

import argparse
import os
import queue
import secrets
import statistics
import subprocess
import sys
import threading
import time
from typing import Any, Dict, List, NamedTuple

from ringcomm.config import Slot
from ringcomm.configuration.endpoints import format_endpoint
from ringcomm.configuration.limits import Limits
from ringcomm.rendezvous.actions import Notice
from ringcomm.rendezvous.server import RendezvousServer

RANKS = 4
LIMIT_S = 60.0

WORKER = """
import os, time
import numpy as np
import ringcomm as rc

rc.init()

@rc.elastic.run
def train(state):
    first = True
    while True:
        time.sleep(0.005)
        gradient = rc.allreduce(np.full(1000, 1.0, np.float32))
        with state.update():
            state.weights[:1000] += gradient
        if first:
            print(f"{rc.epoch()} {rc.rank()} {state.step}", flush=True)
            first = False

train(rc.elastic.ArrayState(weights=np.zeros(int(os.environ["BYTES"]) // 4, np.float32)))
"""


class Event(NamedTuple):
    """The first step of a process in an epoch."""

    worker: int
    epoch: int
    rank: int
    at_s: float


class Job:
    """The processes and their rendezvous.

    Args:
        state_bytes: how much state each process holds.
    """

    def __init__(self, state_bytes: int) -> None:
        self.key = secrets.token_bytes(32)
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.notices: List[Notice] = []
        self.workers: Dict[int, subprocess.Popen[str]] = {}
        self.ranks: Dict[int, int] = {}
        self._started = 0
        self._state_bytes = state_bytes
        self.server = RendezvousServer(
            key=self.key, job="benchmark", addresses=["127.0.0.1"], start_timeout_s=LIMIT_S,
            notify=self.notices.append, limits=Limits(2, None, 2), launched=True,
        )  # fmt: skip
        self._endpoint = format_endpoint(*self.server.start()[0])

    def start(self) -> int:
        """Start one process; its member number."""
        number, self._started = self._started, self._started + 1
        self.server.expect(number, Slot(0, number), "here")
        worker = self.workers[number] = subprocess.Popen(
            [sys.executable, "-c", WORKER], stdout=subprocess.PIPE, text=True,
            env={
                **os.environ, "RINGCOMM_ELASTIC": "1", "RINGCOMM_MEMBER": str(number), "OMP_NUM_THREADS": "1",
                "RINGCOMM_RENDEZVOUS": self._endpoint, "RINGCOMM_KEY": self.key.hex(),
                "RINGCOMM_JOB": "benchmark", "BYTES": str(self._state_bytes),
            },
        )  # fmt: skip
        threading.Thread(target=self._watch, args=(number, worker), daemon=True).start()
        return number

    def _watch(self, number: int, worker: subprocess.Popen[str]) -> None:
        assert worker.stdout is not None
        for line in worker.stdout:
            epoch, rank, _ = map(int, line.split())
            self.events.put(Event(number, epoch, rank, time.monotonic()))
        code = worker.wait()
        self.server.process_exited(number, f"killed by signal {-code}" if code < 0 else f"code {code}", False)

    def wait_for(self, epoch: int, count: int) -> float:
        """Wait until so many processes have finished a step of this epoch; when the last one has."""
        ends: List[float] = []
        while len(ends) < count:
            event = self.events.get(timeout=LIMIT_S)
            if event.epoch == epoch:
                self.ranks[event.worker] = event.rank
                ends.append(event.at_s)
        return max(ends)

    def pause_s(self, epoch: int) -> float:
        """Return how long the members of the last view waited for this one."""
        views = [item for item in self.notices if item.kind == "view" and item.detail["epoch"] == epoch]
        return float(views[0].detail["pause_s"])


def main() -> None:
    """Run the rounds, and print the times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--megabytes", type=int, default=100)
    arguments = parser.parse_args()
    job = Job(arguments.megabytes * 10**6)
    losses: List[float] = []
    joins: List[float] = []
    try:
        for _ in range(RANKS):
            job.start()
        job.wait_for(0, RANKS)
        for number in range(arguments.rounds):
            by_rank = {rank: worker for worker, rank in job.ranks.items()}
            victim = by_rank[0 if number % 2 == 0 else 1 + number // 2 % (RANKS - 1)]
            began_s = time.monotonic()
            job.workers[victim].kill()
            del job.ranks[victim]
            losses.append(job.wait_for(2 * number + 1, RANKS - 1) - began_s)
            job.start()
            job.wait_for(2 * number + 2, RANKS)
            joins.append(job.pause_s(2 * number + 2))
    finally:
        for worker in job.workers.values():
            worker.kill()
            worker.wait()
        job.server.stop()
    _print("a loss, until all survivors have finished a step", losses)
    _print("a join, until the new view is connected", joins)


def _print(what: str, times_s: List[float]) -> None:
    ordered: Any = sorted(times_s)
    late = ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]
    print(
        f"{what}: {len(ordered)} times, median {statistics.median(ordered):.2f} s, "
        f"95th percentile {late:.2f} s, longest {ordered[-1]:.2f} s"
    )


if __name__ == "__main__":
    main()
