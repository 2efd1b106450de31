"""What encryption costs: the same all-reduce over plain and over encrypted TCP, in turns, in one run.

    python benchmarks/encryption.py

Two processes on this machine, linked twice. Loopback moves bytes faster than any network that people
have at home, so this is the worst case: on 1 Gbit/s both are limited by the wire.
"""

from __future__ import annotations

import multiprocessing
import secrets
import statistics
import sys
import time
from pathlib import Path
from typing import Any, Dict, List, Tuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import ringcomm as rc
from ringcomm.config import Membership, Settings
from ringcomm.job.context import Context
from ringcomm.rendezvous.server import RendezvousServer
from ringcomm.storage.certificate import make_certificate
from ringcomm.transport.encryption import encryption_of

SIZES = ((8, 2000), (64 * 1024, 400), (1 << 20, 100), (64 << 20, 3))
ROUNDS = 7


def work(rank: int, memberships: List[Membership], results: Any) -> None:
    """One rank: for each size, rounds of plain and encrypted ones in turns."""
    settings = Settings(transport="tcp")
    contexts = [Context.start(item, settings) for item in memberships]
    taken: Dict[Tuple[int, int], List[float]] = {}
    for size, repeat in SIZES:
        data = np.ones(size // 4, np.float32)
        for turn in range(ROUNDS + 1):
            for way, context in enumerate(contexts):
                context.barrier()
                began = time.perf_counter()
                for _ in range(repeat):
                    context.allreduce_(data, rc.Max)
                if turn:  # the first only warms up
                    taken.setdefault((size, way), []).append((time.perf_counter() - began) / repeat)
    for context in contexts:
        context.close()
    if rank == 0:
        results.put(taken)


def main() -> None:
    """Run both ranks and print the table."""
    key, certificate = secrets.token_bytes(32), make_certificate()
    servers = []
    memberships: List[List[Membership]] = [[], []]
    for way in ("", certificate):
        server = RendezvousServer(
            key=key, job="benchmark", size=2, addresses=["127.0.0.1"], start_timeout_s=60.0,
            notify=lambda _: None, encryption=encryption_of(way),
        )  # fmt: skip
        endpoints = tuple(server.start())
        servers.append(server)
        for rank in range(2):
            memberships[rank].append(Membership(2, endpoints, key, "benchmark", rank=rank, certificate=way))
    spawn = multiprocessing.get_context("spawn")
    results = spawn.Queue()
    ranks = [spawn.Process(target=work, args=(rank, memberships[rank], results)) for rank in range(2)]
    for process in ranks:
        process.start()
    taken = results.get()
    for process in ranks:
        process.join()
    for server in servers:
        server.stop()
    print(
        f"{'bytes':>10} {'plain':>12} {'encrypted':>12}   encrypted / plain (each round's, median and range)"
    )
    for size, _ in SIZES:
        plain, encrypted = taken[size, 0], taken[size, 1]
        ratios = sorted(two / one for one, two in zip(plain, encrypted))
        print(
            f"{size:>10} {min(plain) * 1e6:>9.0f} us {min(encrypted) * 1e6:>9.0f} us   "
            f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
        )


if __name__ == "__main__":
    main()
