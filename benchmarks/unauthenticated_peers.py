"""What unauthenticated peers cost a job that trains: 500 invalid connections a second, and 100 slow ones.

    python benchmarks/unauthenticated_peers.py [plain] [encrypted]

Two ranks train (a matrix product and an all-reduce of 4 MB per step) while a process connects 500 times a
second to the one port that is open then, the rendezvous', with random bytes, half a greeting, the start of
TLS or nothing, and keeps 100 connections open on which a plausible byte comes every second. Three cases
alternate within one run: no connections; the same connections to a port that has nothing to do with the job;
the connections to the rendezvous. The second case shows what it costs on this machine to send them, where the
sender needs a part of the same two cores; the third what it costs beyond that to receive them. Real attackers
have machines of their own, so the sender runs only when no other process requires a core (where the system
supports that). The processor time of both, and the number of connections, are printed, too.

Rounds are short, because a virtual machine's speed changes from second to second. So the limit on
unauthenticated peers is rarely reached, and the result is more than they cost when they go on.
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
from ringcomm.config import Membership, Settings
from ringcomm.job.context import Context
from ringcomm.rendezvous.server import RendezvousServer
from ringcomm.storage.certificate import make_certificate
from ringcomm.transport.encryption import encryption_of

ROUND_S, SETTLE_S = 0.5, 0.15
ROUNDS = 80
TICK_S, PER_TICK = 0.05, 25
SLOW, OPEN_NOW = 100, 100
NONE, ELSEWHERE, HERE = "no connections", "connections elsewhere", "connections to the rendezvous"


def train(membership: Membership, commands: Any) -> None:
    """Run rounds of steps on a rank; rank 0 begins one for each command, and returns steps per second."""
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


def set_idle_priority() -> None:
    """Run only when no other process requires the core."""
    if hasattr(os, "SCHED_IDLE"):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def sink(ports: Any) -> None:
    """Serve a port that has nothing to do with the job: accept and close, twenty times a second."""
    set_idle_priority()
    listener = socket.create_server(("127.0.0.1", 0), backlog=512)
    listener.setblocking(False)
    ports.send(listener.getsockname()[1])
    while True:
        time.sleep(0.05)
        try:
            while True:
                listener.accept()[0].close()
        except BlockingIOError:
            pass


def start_connecting(port: int) -> socket.socket:
    """Start to connect without waiting. On the loopback the result is there at once."""
    sock = socket.socket()
    sock.setblocking(False)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # leave nothing behind
    sock.connect_ex(("127.0.0.1", port))
    return sock


class SlowConnection:
    """A connection that sends what a rank would send, byte by byte, and never enough of it."""

    def __init__(self, port: int, greeting: bytes) -> None:
        self._port, self._greeting = port, greeting
        self._begin()

    def _begin(self) -> None:
        self.sock, self._sent_bytes, self._since = start_connecting(self._port), 0, time.perf_counter()

    def send_byte(self) -> None:
        """Send the next byte; after a refusal, connect again and start from the first."""
        try:
            self._sent_bytes += self.sock.send(self._greeting[self._sent_bytes : self._sent_bytes + 1])
        except BlockingIOError:
            pass
        except OSError:
            self._since = 0.0
        if time.perf_counter() - self._since > 3.0:
            self.sock.close()
            self._begin()


def connect_steadily(ports: Any, encrypted: bool, count: Any) -> None:
    """Connect to the port received last (0: to none), at a steady pace, with little processor time."""
    import random

    from tests.support.garbage import HALF_A_PRELUDE, HALF_AN_ADMISSION, some_bytes

    set_idle_priority()
    rng, port = random.Random(1), 0
    payloads = [some_bytes(rng) for _ in range(997)]
    slow: List[SlowConnection] = []
    open_now: Deque[socket.socket] = deque()
    tick, due = 0, time.perf_counter()
    while True:
        if port == 0 or ports.poll():
            port = ports.recv()
            for sock in [*open_now, *(item.sock for item in slow)]:
                sock.close()
            open_now.clear()
            greeting = HALF_AN_ADMISSION if encrypted else HALF_A_PRELUDE
            slow = [SlowConnection(port, greeting) for _ in range(SLOW if port else 0)]
            due = time.perf_counter()
            continue
        tick, due = tick + 1, due + TICK_S
        time.sleep(max(0.0, due - time.perf_counter()))
        for number in range(tick * PER_TICK, (tick + 1) * PER_TICK):
            sock = start_connecting(port)
            try:
                sock.send(payloads[number % len(payloads)])
            except OSError:
                pass  # The queue of the listening socket is full.
            open_now.append(sock)
            count.value += 1
            if number % 5 == 0:
                slow[number // 5 % SLOW].send_byte()
        while len(open_now) > OPEN_NOW:
            open_now.popleft().close()


class Round(NamedTuple):
    """Rates of one round, per second: steps; processor time of the sending process (with the sink), and of
    the process that serves the rendezvous; and connections."""

    steps: float
    sending: float
    serving: float
    connections: float


def measure(certificate: str) -> Dict[str, List[Round]]:
    """Measure all rounds, by case."""
    key = secrets.token_bytes(32)
    server = RendezvousServer(
        key=key, job="b", size=2, addresses=["127.0.0.1"], start_timeout_s=60.0, notify=lambda _: None,
        encryption=encryption_of(certificate),
    )  # fmt: skip
    endpoints = tuple(server.start())
    spawn = multiprocessing.get_context("spawn")
    mine, theirs = spawn.Pipe()
    sink_port, sink_end = spawn.Pipe()
    port_end, port_commands = spawn.Pipe(duplex=False)
    members = [Membership(2, endpoints, key, "b", rank=rank, certificate=certificate) for rank in range(2)]
    count = spawn.Value("i", 0, lock=False)
    ranks = [spawn.Process(target=train, args=(member, theirs)) for member in members]
    others = [
        spawn.Process(target=sink, args=(sink_end,), daemon=True),
        spawn.Process(target=connect_steadily, args=(port_end, bool(certificate), count), daemon=True),
    ]
    for process in ranks + others:
        process.start()
    ports = {NONE: 0, ELSEWHERE: sink_port.recv(), HERE: endpoints[0][1]}
    rounds: Dict[str, List[Round]] = {name: [] for name in ports}
    for number in range(ROUNDS + 1):
        names = list(ports)[number % 3 :] + list(ports)[: number % 3]
        for name in names:
            port_commands.send(ports[name])
            time.sleep(SETTLE_S)
            before = time.perf_counter(), processor_s(others), time.process_time(), count.value
            mine.send(1.0)
            speed = mine.recv()
            after = time.perf_counter(), processor_s(others), time.process_time(), count.value
            wall_s, *differences = (two - one for one, two in zip(before, after))
            if number:  # the first only warms up
                rounds[name].append(Round(speed, *(item / wall_s for item in differences)))
    mine.send(0.0)
    for process in ranks:
        process.join()
    for process in others:
        process.kill()
        process.join()
    server.stop()
    return rounds


def processor_s(processes: List[Any]) -> float:
    """Processor time that these processes have used so far."""
    times = [psutil.Process(process.pid).cpu_times() for process in processes]
    return float(sum(item.user + item.system for item in times))


def main() -> None:
    """Print the rates of each case, and the loss of speed."""
    os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")  # for the ranks: two on two cores
    for name in sys.argv[1:] or ("plain", "encrypted"):
        rounds = measure(make_certificate() if name == "encrypted" else "")
        print(f"{name}: steps per second, medians of {ROUNDS} rounds of {ROUND_S:g} s")
        for what, values in rounds.items():
            steps, sending, serving, arrived = (statistics.median(item) for item in zip(*values))
            speeds = [item.steps for item in values]
            print(
                f"  {what:<28} {steps:8.1f}  ({min(speeds):.1f} to {max(speeds):.1f})   "
                f"{arrived:.0f} connections a second; sending took {100 * sending:.1f} % of a core, "
                f"the rendezvous {100 * serving:.1f} %"
            )
        for what, versus in ((HERE, NONE), (HERE, ELSEWHERE), (ELSEWHERE, NONE)):
            ratios = [one.steps / other.steps for one, other in zip(rounds[what], rounds[versus])]
            print(f"  {what}, against {versus}: lost {100 * (1 - statistics.median(ratios)):.1f} %")


if __name__ == "__main__":
    main()
