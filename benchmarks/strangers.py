"""What strangers at the door cost a job that trains: 500 junk connections a second, and 100 slow ones.

    python benchmarks/strangers.py [plain] [encrypted]

Two ranks train (a matrix product and an all-reduce of 4 MB per step) while somebody connects 500 times a
second to the one port that is open then, the rendezvous', with random bytes, half a greeting, the start of
TLS or nothing, and keeps 100 connections open on which a plausible byte comes every second. In turns,
within one run: nobody; the same strangers at a port that has nothing to do with the job; strangers at the
rendezvous. The second shows what sending all this costs on this machine, where the strangers need a part of
the same two cores; the third what receiving it costs beyond that. Real strangers have machines of their
own, so these run only when nobody else wants a core (where the system has that). The processor time of
both, and how many came, are printed, too.

Rounds are short, because a virtual machine's speed changes from second to second. So the limit on strangers
is rarely reached, and this is more than they cost when they go on.
"""

from __future__ import annotations

import multiprocessing
import os
import secrets
import socket
import statistics
import struct
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any, Deque, Dict, List, NamedTuple

import numpy as np
import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import ringcomm as rc
from ringcomm.certificate import make_certificate
from ringcomm.config import Membership, Settings
from ringcomm.context import Context
from ringcomm.rendezvous.server import RendezvousServer
from ringcomm.transport.encryption import encryption_of

ROUND_S, SETTLE_S = 0.5, 0.15
ROUNDS = 80
TICK_S, PER_TICK = 0.05, 25
SLOW, OPEN_NOW = 100, 100
NOBODY, ELSEWHERE, HERE = "nobody", "strangers elsewhere", "strangers at the rendezvous"


def train(membership: Membership, commands: Any) -> None:
    """A rank: rounds of steps; rank 0 is told when to begin one, and says how many steps it did a second."""
    context = Context.start(membership, Settings(encrypt=bool(membership.certificate)))
    gradient, weights = np.ones(1 << 20, np.float32), np.ones((256, 256), np.float32)
    go = np.zeros(1)
    while True:
        if context.rank == 0:
            go[0] = commands.recv()
        context.broadcast_(go, 0)
        if not go[0]:
            break
        steps, began, on = 0, time.perf_counter(), np.ones(1)
        while on[0]:
            weights @ weights
            context.allreduce_(gradient, rc.Max)
            steps += 1
            on[0] = time.perf_counter() - began < ROUND_S
            context.broadcast_(on, 0)
        if context.rank == 0:
            commands.send(steps / (time.perf_counter() - began))
    context.close()


def give_way_to_all() -> None:
    """Run only when no other process wants the core."""
    if hasattr(os, "SCHED_IDLE"):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def sink(ports: Any) -> None:
    """A port that has nothing to do with the job: accepts and hangs up, twenty times a second."""
    give_way_to_all()
    door = socket.create_server(("127.0.0.1", 0), backlog=512)
    door.setblocking(False)
    ports.send(door.getsockname()[1])
    while True:
        time.sleep(0.05)
        try:
            while True:
                door.accept()[0].close()
        except BlockingIOError:
            pass


def call(port: int) -> socket.socket:
    """Ask for a connection, and do not wait for it. Here it is there at once, or refused."""
    sock = socket.socket()
    sock.setblocking(False)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # leave nothing behind
    sock.connect_ex(("127.0.0.1", port))
    return sock


class SlowOne:
    """A connection on which one byte after another comes of what a rank would say, and never enough."""

    def __init__(self, port: int, words: bytes) -> None:
        self._port, self._words = port, words
        self._begin()

    def _begin(self) -> None:
        self.sock, self._said, self._since = call(self._port), 0, time.perf_counter()

    def say(self) -> None:
        """The next byte; after being sent away, from the beginning."""
        try:
            self._said += self.sock.send(self._words[self._said : self._said + 1])
        except BlockingIOError:
            pass
        except OSError:
            self._since = 0.0
        if time.perf_counter() - self._since > 3.0:
            self.sock.close()
            self._begin()


def strangers(ports: Any, encrypted: bool, count: Any) -> None:
    """Connect to the port last told (0: to none), at a steady pace; as cheaply as Python can."""
    import random

    from tests.contract.garbage import HALF_A_PRELUDE, HELLO, some_bytes

    give_way_to_all()
    rng, port = random.Random(1), 0
    words = [some_bytes(rng) for _ in range(997)]
    slow: List[SlowOne] = []
    open_now: Deque[socket.socket] = deque()
    tick, due = 0, time.perf_counter()
    while True:
        if port == 0 or ports.poll():
            port = ports.recv()
            for sock in [*open_now, *(item.sock for item in slow)]:
                sock.close()
            open_now.clear()
            slow = [SlowOne(port, HELLO if encrypted else HALF_A_PRELUDE) for _ in range(SLOW if port else 0)]
            due = time.perf_counter()
            continue
        tick, due = tick + 1, due + TICK_S
        time.sleep(max(0.0, due - time.perf_counter()))
        for number in range(tick * PER_TICK, (tick + 1) * PER_TICK):
            sock = call(port)
            try:
                sock.send(words[number % len(words)])
            except OSError:
                pass  # The system keeps no more of them waiting.
            open_now.append(sock)
            count.value += 1
            if number % 5 == 0:
                slow[number // 5 % SLOW].say()
        while len(open_now) > OPEN_NOW:
            open_now.popleft().close()


class Round(NamedTuple):
    """What was seen in one round, per second: steps; processor time of the strangers (with the sink), and of
    the process that serves the rendezvous; and how many strangers there were."""

    steps: float
    sending: float
    serving: float
    strangers: float


def measure(certificate: str) -> Dict[str, List[Round]]:
    """All rounds, by what happened meanwhile."""
    key = secrets.token_bytes(32)
    server = RendezvousServer(
        key=key, job="b", size=2, addresses=["127.0.0.1"], start_timeout_s=60.0, notify=lambda _: None,
        encryption=encryption_of(certificate),
    )  # fmt: skip
    endpoints = tuple(server.start())
    spawn = multiprocessing.get_context("spawn")
    mine, theirs = spawn.Pipe()
    sink_port, sink_end = spawn.Pipe()
    told, telling = spawn.Pipe(duplex=False)
    members = [Membership(2, endpoints, key, "b", rank=rank, certificate=certificate) for rank in range(2)]
    count = spawn.Value("i", 0, lock=False)
    ranks = [spawn.Process(target=train, args=(member, theirs)) for member in members]
    others = [
        spawn.Process(target=sink, args=(sink_end,), daemon=True),
        spawn.Process(target=strangers, args=(told, bool(certificate), count), daemon=True),
    ]
    for process in ranks + others:
        process.start()
    where = {NOBODY: 0, ELSEWHERE: sink_port.recv(), HERE: endpoints[0][1]}
    rounds: Dict[str, List[Round]] = {name: [] for name in where}
    for turn in range(ROUNDS + 1):
        names = list(where)[turn % 3 :] + list(where)[: turn % 3]
        for name in names:
            telling.send(where[name])
            time.sleep(SETTLE_S)
            before = time.perf_counter(), processor_s(others), time.process_time(), count.value
            mine.send(1.0)
            speed = mine.recv()
            after = time.perf_counter(), processor_s(others), time.process_time(), count.value
            wall_s, *much = (two - one for one, two in zip(before, after))
            if turn:  # the first only warms up
                rounds[name].append(Round(speed, *(item / wall_s for item in much)))
    mine.send(0.0)
    for process in ranks:
        process.join()
    for process in others:
        process.kill()
        process.join()
    server.stop()
    return rounds


def processor_s(processes: List[Any]) -> float:
    """What they have used of the processor so far."""
    times = [psutil.Process(process.pid).cpu_times() for process in processes]
    return float(sum(item.user + item.system for item in times))


def main() -> None:
    """Print what was lost."""
    os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")  # for the ranks: two on two cores
    for name in sys.argv[1:] or ("plain", "encrypted"):
        rounds = measure(make_certificate() if name == "encrypted" else "")
        print(f"{name}: steps per second, medians of {ROUNDS} rounds of {ROUND_S:g} s")
        for what, values in rounds.items():
            steps, sending, serving, came = (statistics.median(item) for item in zip(*values))
            speeds = [item.steps for item in values]
            print(
                f"  {what:<28} {steps:8.1f}  ({min(speeds):.1f} to {max(speeds):.1f})   {came:.0f} a second, "
                f"who took {100 * sending:.1f} % of a core, and the rendezvous {100 * serving:.1f} %"
            )
        for what, versus in ((HERE, NOBODY), (HERE, ELSEWHERE), (ELSEWHERE, NOBODY)):
            ratios = [one.steps / other.steps for one, other in zip(rounds[what], rounds[versus])]
            print(f"  {what}, against {versus}: lost {100 * (1 - statistics.median(ratios)):.1f} %")


if __name__ == "__main__":
    main()
