"""What bounds all-reduces over the loopback: two bare processes, ringcomm over TCP and Gloo, in turns.

    python benchmarks/loopback.py [--rounds 40] [--sizes 4M 16M 64M 256M] [--output FILE]

The two processes are the same for all. The bare ones send as many bytes in each direction as an all-reduce
of two ranks does, with ``send`` and ``recv_into`` in one thread, from and to memory of the same size; then
the same with the additions, which is an all-reduce without any library. So the bare times are what the
loopback allows in both directions at once. Calls of the system are counted in a run of their own.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any, Callable, Dict, List

ROOT = Path(__file__).resolve().parents[1]
for _place in (str(ROOT), str(ROOT / "launcher"), str(Path(__file__).resolve().parent)):
    if _place not in sys.path:
        sys.path.insert(0, _place)

import numpy as np  # noqa: E402
from compare import size_argument  # noqa: E402
from report import size_text  # noqa: E402

PIECE = 1 << 20
SEGMENT = 1 << 18
SIZES = [4_000_000, 16_000_000, 64_000_000, 256_000_000]
WAYS = ("bare", "bare, added", "ringcomm", "gloo")


class Bare:
    """One end of a plain TCP connection over the loopback.

    Args:
        sock: the connection.
    """

    def __init__(self, sock: socket.socket) -> None:
        from ringcomm.transport.tcp import choose_congestion

        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setblocking(False)
        choose_congestion(sock, "auto")
        self._sock = sock
        self._poller = select.poll()
        self._segment = np.empty(SEGMENT // 4, np.float32)

    def all_reduce(self, array: Any, own: int, adds: bool) -> None:
        """Exchange halves, add the own half, and exchange the sums; without ``adds`` only the bytes."""
        half = array.size // 2
        chunks = [array[:half], array[half:]]
        outgoing = [memoryview(chunks[1 - own]).cast("B"), memoryview(chunks[own]).cast("B")]
        incoming = memoryview(chunks[1 - own]).cast("B")
        size = outgoing[0].nbytes
        segment = memoryview(self._segment).cast("B")
        sent = received = 0
        while sent < 2 * size or received < 2 * size:
            moved = False
            # The second half of what is sent are sums, which must have been made.
            ready = 2 * size if not adds else min(2 * size, size + received // SEGMENT * SEGMENT)
            ready = 2 * size if received >= size else ready
            if sent < ready:
                view = outgoing[sent >= size]
                start, end = sent % size, min(size, sent % size + PIECE, ready - sent + sent % size)
                with contextlib.suppress(BlockingIOError):
                    sent += self._sock.send(view[start:end])
                    moved = True
            if received < 2 * size:
                moved = self._receive(segment, incoming, chunks[own], received, size, adds, sent) or moved
                received = self._received
            if not moved:
                events = (select.POLLOUT if sent < ready else 0) | select.POLLIN * (received < 2 * size)
                self._poller.register(self._sock, events)
                self._poller.poll()

    _received = 0

    def _receive(
        self, segment: Any, incoming: Any, own: Any, received: int, size: int, adds: bool, sent: int
    ) -> bool:
        """Receive once; a whole segment of the first half is added."""
        self._received = received
        if received < size:
            place = received % SEGMENT
            view = segment[place : min(SEGMENT, place + size - received)]
        else:
            # Results overwrite what has been sent.
            view = incoming[received - size : min(size, sent, received - size + PIECE)]
        with contextlib.suppress(BlockingIOError):
            got = self._sock.recv_into(view) if view.nbytes else 0
            self._received += got
            now = self._received
            if adds and received < size and (now % SEGMENT == 0 or now == size):
                first = (now - 1) // SEGMENT * SEGMENT // 4
                np.add(own[first : now // 4], self._segment[: now // 4 - first], out=own[first : now // 4])
            return got > 0
        return False


def work(sizes: List[int], rounds: int, store: str, result: str) -> None:
    """Be one rank."""
    import torch
    import torch.distributed as dist

    import ringcomm as rc

    rc.init()
    rank = rc.rank()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    listener = socket.create_server(("127.0.0.1", 0)) if rank == 0 else None
    port = rc.broadcast_object(listener.getsockname()[1] if listener else 0)
    sock = listener.accept()[0] if listener else socket.create_connection(("127.0.0.1", port))
    bare = Bare(sock)
    found: Dict[str, Any] = {}
    for size in sizes:
        array = np.ones(size // 4, np.float32)
        tensor = torch.ones(size // 4)
        ways: Dict[str, Callable[[], Any]] = {
            "bare": lambda array=array: bare.all_reduce(array, rank, False),
            "bare, added": lambda array=array: bare.all_reduce(array, rank, True),
            "ringcomm": lambda array=array: rc.allreduce_(array, op=rc.Sum),
            "gloo": lambda tensor=tensor: dist.all_reduce(tensor),
        }
        check(ways, array, tensor)
        times: Dict[str, List[float]] = {name: [] for name in ways}
        for number in range(rounds + 2):
            for name, way in ways.items():
                array.fill(1.0)
                tensor.fill_(1.0)
                rc.barrier()
                started = time.perf_counter()
                way()
                if number >= 2:
                    times[name].append(time.perf_counter() - started)
        found[size_text(size)] = {"seconds": times, "calls": calls_of(ways["ringcomm"])}
    if rank == 0:
        Path(result).write_text(json.dumps(found))
    dist.destroy_process_group()
    rc.shutdown()


def check(ways: Dict[str, Callable[[], Any]], array: Any, tensor: Any) -> None:
    """Each way that adds must give the sum.

    Raises:
        RuntimeError: one does not.
    """
    for name, way in ways.items():
        array.fill(1.0)
        tensor.fill_(1.0)
        way()
        if name != "bare" and not ((tensor if name == "gloo" else array) == 2).all():
            raise RuntimeError(f"{name} gives a wrong sum")


def calls_of(call: Callable[[], Any]) -> Dict[str, float]:
    """Return how often an all-reduce of ringcomm sends, receives and waits, and the bytes of each call."""
    from ringcomm.transport.tcp import SocketFabric, SocketLink

    counts = {"send": [0, 0], "recv": [0, 0], "wait": [0, 0]}

    def counted(owner: Any, name: str) -> Callable[[], None]:
        real = getattr(owner, name)

        def method(*args: Any) -> Any:
            moved = real(*args)
            counts[name][0] += 1
            counts[name][1] += moved or 0
            return moved

        setattr(owner, name, method)
        return lambda: setattr(owner, name, real)

    undo = [counted(SocketLink, "send"), counted(SocketLink, "recv"), counted(SocketFabric, "wait")]
    try:
        call()
    finally:
        for restore in undo:
            restore()
    return {name: count for name, (count, _) in counts.items()} | {
        f"{name}_bytes": total for name, (_, total) in counts.items() if total
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--sizes", nargs="+", type=size_argument, default=SIZES)
    parser.add_argument("--output", type=Path, help="a JSON file")
    parser.add_argument("--work", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        work(args.sizes, args.rounds, *args.work)
        return
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        result = f"{folder}/result"
        words = ["--sizes", *map(str, args.sizes), "--rounds", str(args.rounds)]
        env = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'launcher'}", "OMP_NUM_THREADS": "1"}
        subprocess.run(
            [sys.executable, "-m", "ringrun", "-np", "2", "--transport", "tcp", sys.executable, __file__,
             *words, "--work", f"{folder}/store", result],
            env=env, check=True,
        )  # fmt: skip
        found = json.loads(Path(result).read_text())
    for size, run in found.items():
        print(size, *(f"{name} {median(run['seconds'][name]) * 1e3:.2f} ms" for name in WAYS), run["calls"])
    if args.output:
        facts = {"cores": os.cpu_count(), "load_before": load, "load_after": os.getloadavg()[0]}
        args.output.write_text(json.dumps({**facts, "rounds": args.rounds, "sizes": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
