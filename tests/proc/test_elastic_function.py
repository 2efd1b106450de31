"""Elastic jobs that run a function, and what ``--horovod`` offers programs for them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import List

import pytest

import ringcomm as rc
from ringrun.function import RemoteError
from ringrun.function import run as run_function
from ringrun.show.console import Console
from tests.proc.test_ringrun_support import ringrun


class Kept(Console):
    """A console that keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.text = ""

    def write(self, stream: int, data: bytes) -> None:
        self.text += data.decode()


def train(victim: int, steps: int = 40) -> List[int]:
    """Train; one process dies. The numbers of the process and of the ranks at the end."""
    import signal
    import time

    import numpy as np

    rc.init()
    member = int(os.environ["RINGCOMM_MEMBER"])

    @rc.elastic.run
    def loop(state: rc.elastic.ObjectState) -> None:
        while state.step < steps:
            if member == victim and state.step == 5:
                os.kill(os.getpid(), signal.SIGKILL)
            rc.allreduce(np.ones(3))
            time.sleep(0.05)
            state.step += 1
            state.commit()

    loop(rc.elastic.ObjectState(step=0))
    return [member, rc.size(), rc.rank()]


@pytest.mark.full
def test_results_are_those_of_the_last_ranks() -> None:
    console = Kept()
    results = run_function(train, (1,), np=3, min_np=2, max_np=3, console=console)
    assert [row[0] for row in results][:2] == [0, 2], console.text
    assert [row[2] for row in results] == list(range(len(results)))
    assert "rank 1 (localhost) lost: killed by SIGKILL" in console.text


def test_a_job_that_fails_raises_and_says_why() -> None:
    def fail() -> None:
        raise ValueError("a bug on every rank")

    with pytest.raises(RemoteError, match="a bug on every rank"):
        run_function(fail, np=2, min_np=1, console=Kept())


PROGRAM = """
import warnings
import horovod
from horovod.runner.elastic.discovery import FixedHosts, HostDiscoveryScript


def work(factor):
    import os
    import numpy
    import ringcomm as rc

    rc.init()
    total = rc.allreduce(numpy.ones(2), op=rc.Sum)
    return rc.rank() * factor, total.tolist(), os.environ["HOROVOD_ELASTIC"], os.environ["HOROVOD_HOSTNAME"]


assert HostDiscoveryScript("echo b:2; echo a", 3).find_available_hosts_and_slots() == {"b": 2, "a": 3}
try:
    HostDiscoveryScript("exit 3").find_available_hosts_and_slots()
except RuntimeError as problem:
    assert "exit code 3" in str(problem)
class Listed(HostDiscoveryScript):
    def _execute_discovery_script(self):
        return "c:4\\n"


assert Listed("no such script").find_available_hosts_and_slots() == {"c": 4}
assert FixedHosts({"a": 1}).find_available_hosts_and_slots() == {"a": 1}
assert horovod.run(work, (10,), num_proc=3, min_num_proc=2, slots=1, hosts="localhost:2,127.0.0.1:1") == [
    (0, [3.0, 3.0], "1", "localhost"), (10, [3.0, 3.0], "1", "localhost")
]


def fail():
    import ringcomm as rc

    rc.init()
    if rc.rank() == 1:
        raise ValueError("a bug on rank 1")
    rc.barrier()


try:
    horovod.run(fail, num_proc=2)
except RuntimeError as problem:
    text = str(problem)
    assert text.startswith("Horovod detected that one or more processes exited with non-zero status, "), text
    assert "Process name: 1\\n" in text and "a bug on rank 1" in text, text
    assert type(problem.__cause__).__name__ == "RemoteError"
else:
    raise SystemExit("it did not fail")
print("fine")
"""


@pytest.mark.release
@pytest.mark.full
def test_modules_of_horovods_launcher_exist(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    done = ringrun("--horovod", "-np", "1", "program.py", cwd=tmp_path)
    assert done.process.returncode == 0, done.err
    assert done.out.endswith("[localhost:0] fine\n")
