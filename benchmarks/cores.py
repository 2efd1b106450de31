"""What it costs one core to write memory that another core has just read, and to read what it has written.

    python benchmarks/cores.py [--repeat 20]

Two processes, each bound to a core of its own, pass 512 KiB of shared memory to and fro. Between cores
that share a cache reading costs as much as a copy, and writing some three times as much. Between cores that
share none (two processors of a virtual machine that the host runs far apart) reading costs twice, and writing
ten to twenty times as much. On a virtual machine the state changes within seconds.
"""

from __future__ import annotations

import argparse
import mmap
import multiprocessing
import os
import sys
import time
from statistics import median
from typing import List, NamedTuple, Optional, Tuple

os.environ["OPENBLAS_NUM_THREADS"] = "1"  # before numpy comes: forking is safe only without threads

import numpy as np

BLOCK_BYTES = 512 * 1024
TIMES = 24
DEAR = 7.0
"""Writing that costs so many times a copy within one core: the cores share no cache."""
SHARED, SEPARATE, UNWATCHED = "a shared cache", "no shared cache", "an unknown state"
LIMIT_S = 20.0
_OFFSET = 4096
MAPPED_BYTES = _OFFSET + BLOCK_BYTES
LOOK_TIMES = 4


class State(NamedTuple):
    """Microseconds for 512 KiB, medians.

    Attributes:
        write_us: writing what the other core has read.
        read_us: reading what the other core has written.
        copy_us: copying within one core's own memory.
    """

    write_us: float
    read_us: float
    copy_us: float

    @property
    def name(self) -> str:
        """SHARED or SEPARATE."""
        return SEPARATE if self.write_us > DEAR * self.copy_us else SHARED


def measure() -> Optional[State]:
    """The state of the first two cores that this process may use; None if it has only one."""
    if not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2:
        return None
    allowed = os.sched_getaffinity(0)
    cores = sorted(allowed)[:2]
    memory = mmap.mmap(-1, MAPPED_BYTES)
    fork = multiprocessing.get_context("fork")
    results, into = fork.Pipe(duplex=False)
    try:
        # The new process begins on its own core: one with a fixed priority would not get another's.
        os.sched_setaffinity(0, {cores[1]})
        reader = fork.Process(target=lambda: into.send(_read(memory)), daemon=True)
        reader.start()
        os.sched_setaffinity(0, {cores[0]})
        writes, copies = _write(memory)
        if not results.poll(LIMIT_S):
            raise RuntimeError("the reading process has not answered")
        return State(*(round(median(times[2:]) * 1e6, 1) for times in (writes, results.recv(), copies)))
    finally:
        os.sched_setaffinity(0, allowed)
        reader.kill()
        reader.join()


def now() -> str:
    """Return SHARED or SEPARATE; empty if this process may use only one core."""
    found = measure()
    return "" if found is None else found.name


class Watch:
    """Looks at the state of two processes' cores again and again, in some hundred microseconds each time.

    Args:
        path: a file for the memory that both map, on a file system in memory.
        is_writer: whether this process writes, and says what it has found; the other one reads.
    """

    def __init__(self, path: str, is_writer: bool) -> None:
        with open(path, "r+b") as file:
            self._memory = mmap.mmap(file.fileno(), MAPPED_BYTES)
        self._is_writer, self._done = is_writer, 0

    def look(self) -> str:
        """SHARED or SEPARATE, for the writer; both processes must call it. For the reader: nothing."""
        first, self._done = self._done, self._done + LOOK_TIMES
        if not self._is_writer:
            _read(self._memory, first, LOOK_TIMES)
            return ""
        writes, copies = _write(self._memory, first, LOOK_TIMES)
        return State(median(writes[1:]), 0.0, median(copies[1:])).name


def _views(memory: mmap.mmap) -> Tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return how many blocks were written and read, and the block."""
    words = np.frombuffer(memory, np.int64, _OFFSET // 8)
    return words[:1], words[64:65], np.frombuffer(memory, np.uint8, BLOCK_BYTES, _OFFSET)


def _write(memory: mmap.mmap, first: int = 0, times: int = TIMES) -> Tuple[List[float], List[float]]:
    written, read, block = _views(memory)
    source, own = np.ones(BLOCK_BYTES, np.uint8), np.zeros(BLOCK_BYTES, np.uint8)
    writes, copies = [], []
    for number in range(first, first + times):
        writes.append(_timed(block, source))
        written[0] = number + 1
        _wait(read, number + 1)
        copies.append(_timed(own, source))
    return writes, copies


def _read(memory: mmap.mmap, first: int = 0, times: int = TIMES) -> List[float]:
    written, read, block = _views(memory)
    own, reads = np.zeros(BLOCK_BYTES, np.uint8), []
    for number in range(first, first + times):
        _wait(written, number + 1)
        reads.append(_timed(own, block))
        read[0] = number + 1
    return reads


def _timed(target: np.ndarray, source: np.ndarray) -> float:
    began_s = time.perf_counter()
    target[:] = source
    return time.perf_counter() - began_s


def _wait(word: np.ndarray, value: int) -> None:
    until_s = time.perf_counter() + LIMIT_S
    while word[0] < value:
        if time.perf_counter() > until_s:
            raise RuntimeError("the other process does not answer")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeat", type=int, default=20)
    for _ in range(parser.parse_args().repeat):
        found = measure()
        if found is None:
            print("this process may use only one core")
            return 1
        print(f"write {found.write_us} us, read {found.read_us} us, copy {found.copy_us} us: {found.name}")
        time.sleep(0.5)
    return 0


if __name__ == "__main__":
    sys.exit(main())
