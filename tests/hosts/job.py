"""Run `ringrun` in a lab as a user would, and look for what it left behind."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import weakref
from pathlib import Path
from typing import Any, Dict, List, Set

from tests.hosts import netlab_system as system
from tests.hosts.netlab import Lab

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


class Job:
    """One run of `ringrun`, started in a separate session; its output is collected. With `module_path` the
    ranks find ringcomm where it is here; else ringrun has to send it. `inputs` are for
    :class:`subprocess.Popen`.
    """

    def __init__(
        self, lab: Lab, *arguments: Any, module_path: bool = True, python: str = sys.executable, **inputs: Any
    ) -> None:
        self.lab = lab
        environment = {**os.environ, **lab.environ(), "PYTHONPATH": f"{ROOT}:{ROOT / 'launcher'}"}
        environment.pop("CI", None)
        records = tempfile.mkdtemp(prefix="ringrun-test-")  # of jobs that fail
        weakref.finalize(self, shutil.rmtree, records, ignore_errors=True)
        environment["RINGCOMM_DIAGNOSE_DIR"] = records
        forwarded = ["-x", "PYTHONPATH"] if module_path else []
        self.process = subprocess.Popen(
            [python, "-m", "ringrun", *forwarded, *map(str, arguments)], env=environment,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            start_new_session=True, preexec_fn=system.interruptible, **inputs,
        )  # fmt: skip
        self.output = ""

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        """End what a failed test left running."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()

    def finish(self, timeout_s: float = 60.0) -> int:
        """Wait for the end; the exit code. The output is in :attr:`output`."""
        try:
            self.output += self.process.communicate(timeout=timeout_s)[0]
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.output += self.process.communicate()[0]
            raise AssertionError(
                f"ringrun did not end within {timeout_s} s; it printed:\n{self.output}"
            ) from None
        return self.process.returncode

    def wait_for_line(self, pattern: str, timeout_s: float = 30.0) -> re.Match[str]:
        """Read lines until one matches; its match."""
        assert self.process.stdout is not None
        started = time.monotonic()
        for line in self.process.stdout:
            self.output += line
            found = re.search(pattern, line)
            if found:
                return found
            if time.monotonic() - started > timeout_s:
                break
        raise AssertionError(f"no line matched {pattern!r}; ringrun printed:\n{self.output}")

    def values(self, pattern: str) -> List[str]:
        """Return what the pattern's group matched, in every line of the output."""
        return re.findall(pattern, self.output, re.MULTILINE)


def ringrun(lab: Lab, *arguments: Any, timeout_s: float = 60.0, module_path: bool = True) -> Job:
    """A finished run; see :class:`Job`."""
    with Job(lab, *arguments, module_path=module_path) as job:
        job.finish(timeout_s)
        return job


def job_processes(lab: Lab, marker: str) -> Dict[str, List[str]]:
    """Command lines of processes on any host of the lab, or here, that contain the marker."""
    found: Dict[str, List[str]] = {}
    for host in ("localhost", *(host.name for host in lab.hosts)):
        lines = [line for pid, line in lab.processes(host) if marker in line and pid != os.getpid()]
        if lines:
            found[host] = lines
    return found


def traffic(before: Dict[str, Any], after: Dict[str, Any], ifaces: Set[str]) -> int:
    """Bytes received and sent on these interfaces between two readings of `Lab.counters`."""
    return sum(
        after[name][direction] - before[name][direction]
        for name in ifaces
        if name in before
        for direction in (0, 1)
    )
