"""What strangers at the door cost a job that trains: 1,000 junk connections in 2 s, and slow ones.

    python benchmarks/strangers.py

Two ranks train (a matrix product and an all-reduce of 4 MB per step) while somebody connects 500 times a
second to the one port that is open then, the rendezvous', with random bytes, half a greeting, the start of
TLS or nothing, and keeps 100 connections open on which a byte comes now and then. In turns, within one run:
nobody; the same strangers at a port that has nothing to do with the job; strangers at the rendezvous. The
second shows what sending all this costs on this machine, the third what receiving it costs beyond that.
"""

from __future__ import annotations

import multiprocessing
import os
import secrets
import selectors
import socket
import statistics
import sys
import time
from pathlib import Path
from typing import Any, Dict, List

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import ringcomm as rc
from ringcomm.certificate import make_certificate
from ringcomm.config import Membership, Settings
from ringcomm.context import Context
from ringcomm.rendezvous.server import RendezvousServer
from ringcomm.transport.encryption import encryption_of

ROUND_S = 2.0
ROUNDS = 15
PER_SECOND = 500
SLOW = 100
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


def sink(ports: Any) -> None:
    """A port that has nothing to do with the job: accepts, reads what comes, hangs up."""
    selector, door = selectors.DefaultSelector(), socket.create_server(("127.0.0.1", 0), backlog=512)
    selector.register(door, selectors.EVENT_READ)
    ports.send(door.getsockname()[1])
    while True:
        for key, _ in selector.select():
            if key.fileobj is door:
                sock, _ = door.accept()
                sock.setblocking(False)
                selector.register(sock, selectors.EVENT_READ)
            else:
                try:
                    key.fileobj.recv(4096)  # type: ignore[union-attr]
                except OSError:
                    pass
                selector.unregister(key.fileobj)
                key.fileobj.close()  # type: ignore[union-attr]


def strangers(ports: Any) -> None:
    """Connect to the port last told (0: to none), at a steady pace."""
    import random

    from tests.contract.garbage import some_bytes

    rng, port, slow = random.Random(1), 0, []
    due = time.perf_counter()
    while True:
        if port == 0 or ports.poll():
            port = ports.recv()
            for sock in slow:
                sock.close()
            slow, due = [], time.perf_counter()
            continue
        due += 1 / PER_SECOND
        time.sleep(max(0.0, due - time.perf_counter()))
        sock = socket.socket()
        sock.settimeout(1.0)
        try:
            sock.connect(("127.0.0.1", port))
            if len(slow) < SLOW:
                slow.append(sock)
                continue
            sock.sendall(some_bytes(rng))
            slow[rng.randrange(SLOW)].send(b"r")
        except OSError:
            slow = [item for item in slow if item.fileno() >= 0][1:]
        sock.close()


def measure(certificate: str) -> Dict[str, List[float]]:
    """Steps per second in every round, by what happened meanwhile."""
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
    ranks = [Membership(2, endpoints, key, "b", rank=rank, certificate=certificate) for rank in range(2)]
    processes = [spawn.Process(target=train, args=(membership, theirs)) for membership in ranks]
    processes += [spawn.Process(target=sink, args=(sink_end,), daemon=True),
         spawn.Process(target=strangers, args=(told,), daemon=True)]  # fmt: skip
    for process in processes:
        process.start()
    where = {NOBODY: 0, ELSEWHERE: sink_port.recv(), HERE: endpoints[0][1]}
    speeds: Dict[str, List[float]] = {}
    for turn in range(ROUNDS + 1):
        for name, port in where.items():
            telling.send(port)
            time.sleep(0.3)
            mine.send(1.0)
            speed = mine.recv()
            if turn:  # the first only warms up
                speeds.setdefault(name, []).append(speed)
    telling.send(0)
    mine.send(0.0)
    for process in processes[:2]:
        process.join()
    for process in processes[2:]:
        process.kill()
        process.join()
    server.stop()
    return speeds


def main() -> None:
    """Print what was lost."""
    os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")  # for the ranks: two on two cores
    for name, certificate in (("plain", ""), ("encrypted", make_certificate())):
        speeds = measure(certificate)
        print(f"{name}: steps per second, medians of {ROUNDS} rounds of {ROUND_S:g} s")
        for what, values in speeds.items():
            print(f"  {what:<28} {statistics.median(values):8.1f}  ({min(values):.1f} to {max(values):.1f})")
        for versus in (NOBODY, ELSEWHERE):
            ratios = [here / other for here, other in zip(speeds[HERE], speeds[versus])]
            print(f"  lost against {versus}: {100 * (1 - statistics.median(ratios)):.1f} %")


if __name__ == "__main__":
    main()
