"""The machine's own limits: what plain sockets, copies and additions reach without any library.

    python benchmarks/limits.py [--quick] [--json]

Rates count the bytes of the destination once: copying 64 MB in 10 ms is 6.4 GB/s, whatever the memory did.
Each limit is the median of several tries. Ends of a connection are two processes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import select
import socket
import sys
import time
from functools import partial
from statistics import median
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple

os.environ["OPENBLAS_NUM_THREADS"] = "1"  # before numpy comes: forking is safe only without threads

import numpy as np

MB = 1_000_000
BLOCK = 1 << 20
SPAN_BYTES = {"1 MB": MB, "64 MB": 64 * MB}
Limit = Dict[str, Any]
Connect = Callable[[], Tuple[socket.socket, socket.socket]]


def together(calls: Sequence[Callable[[], Any]]) -> List[Any]:
    """Run each call in a process of its own at the same time; their results.

    Raises:
        RuntimeError: one of them failed.
    """
    fork = multiprocessing.get_context("fork")
    ends = [fork.Pipe(duplex=False) for _ in calls]
    workers = [
        fork.Process(target=lambda call=call, end=end: end[1].send(call()), daemon=True)
        for call, end in zip(calls, ends)
    ]
    for worker in workers:
        worker.start()
    try:
        results = []
        for worker, (reader, _) in zip(workers, ends):
            while not reader.poll(0.1):
                codes = [each.exitcode for each in workers]
                if any(codes) or (worker.exitcode == 0 and not reader.poll(0)):
                    raise RuntimeError(f"measuring failed; exit codes of its processes: {codes}")
            results.append(reader.recv())
        return results
    finally:
        for worker in workers:
            worker.kill()
            worker.join()


# --- streams ---


def tcp(congestion: str = "", address: str = "127.0.0.1") -> Tuple[socket.socket, socket.socket]:
    """Both ends of a TCP connection, with a congestion control or the system's own choice."""
    with socket.socket() as listener:
        _set_congestion(listener, congestion)
        listener.bind((address, 0))
        listener.listen(1)
        near = socket.socket()
        _set_congestion(near, congestion)
        near.connect(listener.getsockname())
        far, _ = listener.accept()
    for each in (near, far):
        each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return near, far


def _set_congestion(sock: socket.socket, name: str) -> None:
    if name:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name.encode())


def unix() -> Tuple[socket.socket, socket.socket]:
    """Both ends of a Unix stream."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)


def _some(sock: socket.socket, block: memoryview, most: int) -> int:
    got = sock.recv_into(block[: min(most, BLOCK)])
    if not got:
        raise EOFError("the other end is gone")
    return got


def _send(sock: socket.socket, total: int) -> None:
    block = memoryview(bytearray(BLOCK))
    left = total
    while left:
        left -= sock.send(block[: min(left, BLOCK)])
    sock.recv(1)  # that all has arrived


def _receive(sock: socket.socket, total: int) -> float:
    """The rate from the first bytes to the last."""
    block = memoryview(bytearray(BLOCK))
    left, started = total, 0.0
    while left:
        left -= _some(sock, block, left)
        started = started or time.perf_counter()
    rate = total / (time.perf_counter() - started)
    sock.send(b"k")
    return rate


def both_directions(sock: socket.socket, total: int) -> float:
    """Send and receive at once in one thread; the rate of one direction."""
    sock.setblocking(False)
    outgoing, incoming = memoryview(bytearray(BLOCK)), memoryview(bytearray(BLOCK))
    poller = select.poll()
    unsent = unread = total
    started = time.perf_counter()
    while unsent or unread:
        poller.register(sock, (select.POLLOUT if unsent else 0) | (select.POLLIN if unread else 0))
        poller.poll()
        with contextlib.suppress(BlockingIOError):
            while unread:
                unread -= _some(sock, incoming, unread)
        with contextlib.suppress(BlockingIOError):
            if unsent:
                unsent -= sock.send(outgoing[: min(unsent, BLOCK)])
    return total / (time.perf_counter() - started)


def _pair(connect: Connect, first: Callable[..., Any], second: Callable[..., Any], amount: int) -> List[Any]:
    near, far = connect()
    with near, far:
        return together([partial(first, near, amount), partial(second, far, amount)])


def one_way(connect: Connect, total: int) -> float:
    """Bytes per second from one process to another."""
    return float(_pair(connect, _send, _receive, total)[1])


def both_ways(connect: Connect, total: int) -> float:
    """Bytes per second in each of the two directions at once."""
    return float(min(_pair(connect, both_directions, both_directions, total)))


# --- round trips ---


def _ping(sock: socket.socket, times: int, spin: bool) -> float:
    sock.setblocking(not spin)
    word = bytearray(8)
    taken = []
    for _ in range(times):
        started = time.perf_counter()
        sock.send(word)
        _read_word(sock, word)
        taken.append(time.perf_counter() - started)
    return median(taken)


def _pong(sock: socket.socket, times: int, spin: bool) -> None:
    sock.setblocking(not spin)
    word = bytearray(8)
    for _ in range(times):
        _read_word(sock, word)
        sock.send(word)


def _read_word(sock: socket.socket, word: bytearray) -> None:
    while True:
        with contextlib.suppress(BlockingIOError):
            _some(sock, memoryview(word), 8)
            return


def round_trip(connect: Connect, times: int, spin: bool) -> float:
    """Seconds for 8 bytes there and back; the median."""
    return float(_pair(connect, partial(_ping, spin=spin), partial(_pong, spin=spin), times)[0])


# --- memory ---


def _memory(what: str, size_bytes: int, seconds: float, start: Any) -> float:
    target, source = np.ones(size_bytes // 4, np.float32), np.zeros(size_bytes // 4, np.float32)
    times: List[float] = []
    start.wait()
    end = time.perf_counter() + seconds
    while len(times) < 3 or time.perf_counter() < end:
        started = time.perf_counter()
        if what == "copy":
            np.copyto(target, source)
        else:
            np.add(target, source, out=target)
        times.append(time.perf_counter() - started)
    return size_bytes / median(times)


def memory(what: str, size_bytes: int, processes: int, seconds: float) -> float:
    """Bytes per second that so many processes copy, or add in place, all together."""
    start = multiprocessing.get_context("fork").Barrier(processes)
    return float(sum(together([partial(_memory, what, size_bytes, seconds, start)] * processes)))


# --- all of them ---


def process_counts(cores: int) -> List[int]:
    """Return how many processes use the memory at once.

    1, 2, and as many as 4 ranks on so many cores would.
    """
    return sorted({1, 2, min(4, max(2, cores))})


def _congestions() -> Iterator[Tuple[str, str]]:
    yield "tcp (system's congestion control)", ""
    for name in ("reno", "cubic"):
        near = socket.socket()
        with near, contextlib.suppress(OSError):
            _set_congestion(near, name)
            yield f"tcp {name}", name


def measure_all(tries: int = 5, total: int = 512 * MB, seconds: float = 0.3) -> List[Limit]:
    """Every limit with its tries, medians and units."""
    todo: List[Tuple[str, str, Callable[[], float], Optional[Limit]]] = []
    links: List[Tuple[str, Connect]] = [(name, partial(tcp, cc)) for name, cc in _congestions()]
    for name, connect in [*links, ("unix", unix)]:
        todo.append((f"{name} stream, one way", "B/s", partial(one_way, connect, total), None))
        todo.append((f"{name} stream, both ways, each", "B/s", partial(both_ways, connect, total), None))
    for name, connect in (("tcp", tcp), ("unix", unix)):
        for how, spin in (("sleeping", False), ("polling", True)):
            trip = partial(round_trip, connect, 2000, spin)
            todo.append((f"{name} round trip, 8 B, {how}", "s", trip, None))
    for what in ("copy", "add"):
        for label, size in SPAN_BYTES.items():
            for count in process_counts(len(os.sched_getaffinity(0))):
                facts = {"what": what, "bytes": size, "processes": count}
                name = f"numpy {what} float32, {label}, {count} process{'es' * (count > 1)}, sum"
                todo.append((name, "B/s", partial(memory, what, size, count, seconds), facts))
    values: Dict[str, List[float]] = {name: [] for name, *_ in todo}
    for _ in range(tries):
        for name, _, call, _ in todo:
            values[name].append(call())
    return [
        {"name": name, "unit": unit, "median": median(values[name]), "tries": values[name], **(facts or {})}
        for name, unit, _, facts in todo
    ]


def rate(limits: Sequence[Limit], what: str, size_bytes: int, processes: int) -> Optional[float]:
    """The measured rate of copying or adding, at whichever measured size suits; None if there is none."""
    span = SPAN_BYTES["1 MB" if size_bytes <= 8 * MB else "64 MB"]
    for limit in limits:
        if (limit.get("what"), limit.get("bytes"), limit.get("processes")) == (what, span, processes):
            return float(limit["median"])
    return None


def lower_bound(
    limits: Sequence[Limit], collective: str, size_bytes: int, ranks: int, cores: int
) -> Optional[float]:
    """The least time that ranks of one host can need, if they reach each other's memory directly.

    With n bytes in the whole buffer and p ranks, all ranks together must at least

    * allreduce: add (p-1)n and copy (p-1)n
    * reducescatter: add (p-1)n
    * broadcast, allgather, alltoall: copy (p-1)n

    and k = min(p, cores) of them (broadcast: min(p-1, cores)) work at a time, so the bound is
    ``(p-1)n / add_k + (p-1)n / copy_k``, where add_k and copy_k are what k processes together were
    measured to do on buffers of 1 MB (for n up to 8 MB) or 64 MB.
    """
    added = (ranks - 1) * size_bytes if collective in ("allreduce", "reducescatter") else 0
    copied = (ranks - 1) * size_bytes if collective != "reducescatter" else 0
    workers = min(ranks - 1 if collective == "broadcast" else ranks, cores)
    seconds = 0.0
    for what, amount in (("add", added), ("copy", copied)):
        if amount:
            speed = rate(limits, what, size_bytes, workers)
            if speed is None:
                return None
            seconds += amount / speed
    return seconds or None


def show(limit: Limit) -> str:
    """A limit as people read it."""
    if limit["unit"] == "s":
        return f"{limit['median'] * 1e6:.2f} µs"
    return f"{limit['median'] / 1e9:.2f} GB/s"


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure what this machine's sockets and memory can do.")
    parser.add_argument("--quick", action="store_true", help="two short tries each")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args()
    found = measure_all(2, 64 * MB, 0.05) if args.quick else measure_all()
    if args.json:
        json.dump(found, sys.stdout)
        return
    for limit in found:
        print(f"{limit['name']:<55}{show(limit):>14}")


if __name__ == "__main__":
    main()
