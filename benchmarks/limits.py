"""The machine's own limits: how fast its cores copy and add, without any library.

    python benchmarks/limits.py [--quick] [--json]

Rates count the bytes of the destination once: copying 64 MB in 10 ms is 6.4 GB/s, whatever the memory did.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from statistics import median
from typing import Any, Dict, List, Optional, Sequence, Tuple

os.environ["OPENBLAS_NUM_THREADS"] = "1"  # before numpy comes: forking is safe only without threads

import numpy as np

MB = 1_000_000
SPAN_BYTES = {"1 MB": MB, "64 MB": 64 * MB}
Limit = Dict[str, Any]
_start: Any = None
"""The barrier of the processes that measure together."""


def _memory(what: str, size_bytes: int, seconds: float) -> float:
    target, source = np.ones(size_bytes // 4, np.float32), np.zeros(size_bytes // 4, np.float32)
    times: List[float] = []
    _start.wait()
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
    global _start
    fork = multiprocessing.get_context("fork")
    _start = fork.Barrier(processes)
    with ProcessPoolExecutor(processes, fork) as pool:
        calls = [pool.submit(_memory, what, size_bytes, seconds) for _ in range(processes)]
        return sum(call.result() for call in calls)


def process_counts(cores: int) -> List[int]:
    """Return how many processes use the memory at once.

    1, 2, and as many as 4 ranks on so many cores would.
    """
    return sorted({1, 2, min(4, max(2, cores))})


def measure_all(tries: int = 5, seconds: float = 0.3) -> List[Limit]:
    """Every limit, in bytes per second."""
    values: Dict[Tuple[str, str, int], List[float]] = {
        (what, label, count): []
        for what in ("copy", "add") for label in SPAN_BYTES
        for count in process_counts(len(os.sched_getaffinity(0)))
    }  # fmt: skip
    for _ in range(tries):
        for (what, label, count), found in values.items():
            found.append(memory(what, SPAN_BYTES[label], count, seconds))
    return [
        {"what": what, "bytes": SPAN_BYTES[label], "processes": count, "median": median(found)}
        for (what, label, count), found in values.items()
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


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure how fast this machine's cores copy and add.")
    parser.add_argument("--quick", action="store_true", help="two short tries each")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args()
    found = measure_all(2, 0.05) if args.quick else measure_all()
    if args.json:
        json.dump(found, sys.stdout)
        return
    for limit in found:
        print(f"{limit['what']} {limit['bytes']} B, {limit['processes']}: {limit['median'] / 1e9:.2f} GB/s")


if __name__ == "__main__":
    main()
