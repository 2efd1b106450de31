"""``run_function``: a function as a job, also an elastic one, with its results, errors and output."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, List

import cloudpickle
import pytest

import ringcomm as rc
from ringcomm.errors import RingcommError
from ringrun.function import RemoteError
from ringrun.function import run as run_function
from tests.integration.ringrun.job.supervised import Kept
from tests.proc.test_ringrun_support import ringrun


def describe(*args: Any, **kwargs: Any) -> Any:
    import os

    print("called")
    return os.environ["RINGCOMM_SLOT"], args, kwargs


def test_results_come_in_rank_order() -> None:
    console = Kept()
    results = run_function(describe, (1, "two"), {"three": [3]}, np=3, console=console)
    assert results == [(f"0:{rank}", (1, "two"), {"three": [3]}) for rank in range(3)]
    assert sorted(console.written[1].splitlines()) == [b"[localhost:%d] called" % rank for rank in range(3)]


def fail_on_rank_1() -> None:
    import os
    import time

    if os.environ["RINGCOMM_SLOT"] == "0:1":
        raise KeyError("no such thing")
    time.sleep(60)


def test_an_exception_comes_back_with_rank_host_and_traceback() -> None:
    with pytest.raises(RemoteError, match="rank 1 on localhost: KeyError: 'no such thing'") as caught:
        run_function(fail_on_rank_1, np=2, console=Kept())
    assert isinstance(caught.value, RingcommError)
    assert (caught.value.rank, caught.value.host) == (1, "localhost")
    assert "in fail_on_rank_1" in caught.value.traceback_text
    assert "ringrun/" not in caught.value.traceback_text
    assert isinstance(caught.value.__cause__, KeyError)


def another_python() -> str:
    """An interpreter on this machine of another minor version that ringcomm works with, or ""."""
    places = [shutil.which(f"python3.{minor}") or "" for minor in range(8, 15)]
    places += [str(path) for path in sorted(Path("~/.pyenv/versions").expanduser().glob("3.*/bin/python"))]
    show = "import sys; print('{} {}'.format(*sys.version_info))"
    for place in filter(None, places):
        found = subprocess.run(
            [place, "-c", show], capture_output=True, text=True, check=False
        ).stdout.split()
        if found and int(found[1]) >= 8 and int(found[1]) != sys.version_info[1]:
            return place
    return ""


def test_another_minor_version_of_python_is_refused_before_the_start() -> None:
    other = another_python()
    if not other:
        pytest.skip("there is no other version of Python on this machine")
    console = Kept()
    with pytest.raises(RemoteError) as caught:
        run_function(lambda: 1, np=2, python=other, console=console)
    own = "{}.{}".format(*sys.version_info)
    for words in ("the job did not start", other, f"Python {own} here", "same minor version", "--python"):
        assert words in str(caught.value)
    assert caught.value.rank is None and not console.written[1]


class MakesAFolder:
    """Runs code when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


def write_by_oneself(data: bytes) -> None:
    import os
    import sys

    os.write(int(sys.argv[2]), data)
    os._exit(0)


def test_a_result_without_the_ranks_signature_is_not_unpickled(tmp_path: Path) -> None:
    trap = tmp_path / "run"
    forged = cloudpickle.dumps({"ok": True, "value": MakesAFolder(str(trap))})
    with pytest.raises(RemoteError, match="rank 0 on localhost has no valid signature of that rank"):
        run_function(write_by_oneself, (forged,), np=1, console=Kept())
    assert not trap.exists()


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
    assert b"rank 1 (localhost) lost: killed by SIGKILL" in console.written[2]


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
