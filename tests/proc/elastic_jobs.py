"""Elastic jobs of real processes, with the rendezvous in a process of its own."""

from __future__ import annotations

import os
import queue
import secrets
import subprocess
import sys
import threading
import time
from typing import Any, Callable, Dict, List, Sequence

from tests.proc.test_ringrun_support import SOURCES
from tests.support.service import free_port

LIMIT_S = 120.0
"""For one event, unless frameworks are imported."""


Launch = Callable[[str, Sequence[str], Dict[str, str]], "subprocess.Popen[str]"]
"""(host, arguments, environment): starts a process there, its output in a pipe."""


def launch_here(host: str, arguments: Sequence[str], env: Dict[str, str]) -> subprocess.Popen[str]:
    """Start a process of this machine."""
    return subprocess.Popen(arguments, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


class Worker:
    """One process of the job; its lines of output are events."""

    def __init__(self, job: ElasticJob, program: str, host: str, **environment: str) -> None:
        self.job = job
        self.lines: List[str] = []
        self.process = job.launch(host, [sys.executable, "-u", "-c", program], {**job.env, **environment})
        self.pid = self.process.pid
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))
            self.job.events.put((self, line.rstrip("\n"), time.monotonic()))
        self.job.events.put((self, None, time.monotonic()))

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def end(self) -> int:
        """Its exit code."""
        return self.process.wait(self.job.limit_s)

    def said(self, start: str) -> List[str]:
        """The lines that start with this word."""
        return [line for line in self.lines if line.startswith(start)]


class ElasticJob:
    """A rendezvous and the processes of an elastic job; `limit_s` is for one event, imports included."""

    def __init__(
        self, *options: str, program: str, launch: Launch = launch_here, address: str = "127.0.0.1",
        limit_s: float = LIMIT_S, **environment: str,
    ) -> None:  # fmt: skip
        port = free_port()
        self.program = program
        self.launch = launch
        self.limit_s = limit_s
        self.env = {
            **{name: value for name, value in os.environ.items() if not name.startswith("RINGCOMM_")},
            "PYTHONPATH": SOURCES, "OMP_NUM_THREADS": "1",
            "RINGCOMM_ELASTIC": "1", "RINGCOMM_RENDEZVOUS": f"{address}:{port}",
            "RINGCOMM_KEY": secrets.token_hex(32), **environment,
        }  # fmt: skip
        self.events: queue.Queue[Any] = queue.Queue()
        self.workers: List[Worker] = []
        self.rendezvous_lines: List[str] = []
        arguments = [sys.executable, "-u", "-m", "ringcomm.rendezvous", *options]
        self.rendezvous = launch("localhost", arguments, self.env)
        assert self.rendezvous.stdout is not None
        self.rendezvous_lines.append(self.rendezvous.stdout.readline())
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        assert self.rendezvous.stdout is not None
        for line in self.rendezvous.stdout:
            self.rendezvous_lines.append(line.rstrip("\n"))
            self.events.put((None, line.rstrip("\n"), time.monotonic()))

    def start(self, count: int = 1, host: str = "localhost", **environment: str) -> List[Worker]:
        """Start so many more processes."""
        new = [Worker(self, self.program, host, **environment) for _ in range(count)]
        self.workers += new
        return new

    def wait_for(self, wanted: Callable[[Worker, str], bool], count: int = 1) -> List[Any]:
        """Read events until so many fit; (process, line, time) of each."""
        found = []
        limit_s = time.monotonic() + self.limit_s
        while len(found) < count:
            try:
                worker, line, at_s = self.events.get(timeout=max(0.0, limit_s - time.monotonic()))
            except queue.Empty:
                raise AssertionError(f"only {len(found)} of {count} came:\n{self.output()}") from None
            if worker is not None and line is not None and wanted(worker, line):
                found.append((worker, line, at_s))
        return found

    def output(self) -> str:
        """Return what all processes have written, for messages."""
        parts = [f"rendezvous: {line}" for line in self.rendezvous_lines]
        for number, worker in enumerate(self.workers):
            parts += [f"worker {number} (pid {worker.pid}): {line}" for line in worker.lines]
        return "\n".join(parts)

    def notices(self, kind: str) -> List[str]:
        """The rendezvous' notices of a kind."""
        return [line for line in self.rendezvous_lines if line.startswith(f"{kind}: ")]

    def __enter__(self) -> ElasticJob:
        return self

    def __exit__(self, *_: Any) -> None:
        for item in [*self.workers, self]:
            process = item.process if isinstance(item, Worker) else item.rendezvous
            process.kill()
            process.wait()
            item.reader.join()
            assert process.stdout is not None
            process.stdout.close()


def fields(line: str) -> Dict[str, str]:
    """``train epoch=1 rank=0`` as {"epoch": "1", "rank": "0"}."""
    return dict(item.split("=", 1) for item in line.split()[1:])
