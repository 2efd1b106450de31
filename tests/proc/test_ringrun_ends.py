"""However a job ends, that counts, and nothing of it is left: kills of every process, signals, restarts."""

from __future__ import annotations

import json
import os
import random
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.proc.test_ringrun_support import LIMIT_S, SOURCES, Launched, ringrun, wait_for_files

STUBBORN = """
import os, signal, subprocess, sys, time
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
subprocess.Popen(["sleep", "1001"], start_new_session=True)  # leaves the group
if os.fork() == 0:  # a daemon, which even wipes its environment
    os.setsid()
    if os.fork() == 0:
        os.execve("/bin/sleep", ["sleep", "1002"], {"RINGRUN_TEST_MARK": os.environ["RINGRUN_TEST_MARK"]})
    os._exit(0)
open("ready." + os.environ["RINGCOMM_SLOT"], "w").close()
print("ready", flush=True)
time.sleep(1003)
"""
WITHIN_S = 30.0
"""No test takes so long. What is not ended sleeps for a quarter of an hour."""


@pytest.fixture
def stubborn(tmp_path: Path) -> Launched:
    """Two ranks that ignore every polite signal, each with two runaway children."""
    (tmp_path / "stubborn.txt").write_text(STUBBORN)
    program = [sys.executable, "-c", "exec(open('stubborn.txt').read())"]
    launched = Launched("-np", "2", "--grace", "1.5", *program, cwd=tmp_path)
    wait_for_files([tmp_path / "ready.0:0", tmp_path / "ready.0:1"])
    launched.find("sleep 1002", 2)
    return launched


def agents(launched: Launched) -> list[int]:
    """The guard and the agent, in this order."""
    return launched.find("os.fdopen(0", 2)


def test_launcher_killed(stubborn: Launched) -> None:
    stubborn.process.kill()
    assert not stubborn.wait_for_all_to_end(WITHIN_S)
    stubborn.finish()


@pytest.mark.parametrize(
    "which", [pytest.param(0, id="guard", marks=pytest.mark.release), pytest.param(1, id="agent")]
)
def test_agent_killed(stubborn: Launched, which: int) -> None:
    os.kill(agents(stubborn)[which], signal.SIGKILL)
    assert stubborn.finish(WITHIN_S) == 255
    assert "localhost" in stubborn.err and "lost" in stubborn.err


def test_ctrl_c_twice(stubborn: Launched) -> None:
    """That it does not wait is shown in ``tests/integration/ringrun/job/test_supervisor.py``."""
    stubborn.process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    stubborn.process.send_signal(signal.SIGINT)
    assert stubborn.finish(WITHIN_S) == 130


@pytest.mark.release
def test_launcher_whose_terminal_is_closed(stubborn: Launched) -> None:
    stubborn.process.send_signal(signal.SIGHUP)
    assert stubborn.finish(WITHIN_S) == 128 + signal.SIGHUP


def test_ctrl_c_lets_programs_clean_up(tmp_path: Path) -> None:
    (tmp_path / "polite.py").write_text(
        "import os, time\n"
        "try:\n    open('ready.' + os.environ['RINGCOMM_SLOT'], 'w').close()\n    time.sleep(100)\n"
        "except KeyboardInterrupt:\n    print('saved', flush=True)\n"
    )
    launched = Launched("-np", "2", "--threads", "none", "polite.py", cwd=tmp_path)
    wait_for_files([tmp_path / "ready.0:0", tmp_path / "ready.0:1"])
    launched.process.send_signal(signal.SIGINT)
    assert launched.finish() == 130
    assert sorted(launched.out.splitlines()) == ["[localhost:0] saved", "[localhost:1] saved"]
    assert launched.err == "ringrun: SIGINT: ending all ranks on all hosts (once more: at once)\n"


def test_what_a_rank_leaves_behind_is_ended() -> None:
    launched = Launched("-np", "2", "sh", "-c", "sleep 1001 & setsid sleep 1002 & exit 0")
    assert launched.finish(WITHIN_S) == 0


def test_a_rank_that_ended_leaves_nothing_while_others_go_on(tmp_path: Path) -> None:
    waits = "touch waits && until [ -e enough ]; do sleep 0.1; done && exit 0"
    program = f"[ ${{RINGCOMM_SLOT#*:}} = 1 ] && {waits}; sleep 1001 & touch ends; exit 0"
    launched = Launched("-np", "2", "sh", "-c", program, cwd=tmp_path)
    wait_for_files([tmp_path / "waits", tmp_path / "ends"])
    # What is left is rank 1's shell, whose command line has the number, too (as that of a forked shell has).
    until = time.monotonic() + WITHIN_S
    while sum("1001" in line for line in launched.others().values()) > 1:
        assert time.monotonic() < until, launched.others()
        time.sleep(0.02)
    assert launched.process.poll() is None
    (tmp_path / "enough").touch()
    assert launched.finish() == 0


def test_standard_descriptors_that_are_closed_at_the_start(tmp_path: Path) -> None:
    """Otherwise the next files get their numbers, and what is printed."""
    words = ["--output-dir", "out", "-np", "2", "sh", "-c", "echo to stdout; echo to stderr >&2"]
    command = shlex.join([sys.executable, "-m", "ringrun", *words])
    done = subprocess.run(
        ["sh", "-c", f"exec <&- >&- 2>&-; {command}"], cwd=tmp_path, check=False, timeout=60,
        env={**os.environ, "PYTHONPATH": SOURCES},
    )  # fmt: skip
    found = {(path.name, path.read_text()) for path in tmp_path.glob("out/rank.*/*")}
    assert done.returncode == 0 and found == {("stdout", "to stdout\n"), ("stderr", "to stderr\n")}


WRITTEN = """
import numpy as np
import ringcomm as rc

rc.init()
for step in range(50):
    rc.allreduce_async_(np.ones(10), name=f"grad{step}").wait()
"""


def test_a_timeline_of_the_whole_job_has_its_end_and_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "written.py").write_text(WRITTEN)
    done = ringrun("-np", "3", "--timeline", "trace.json", "written.py", cwd=tmp_path)
    assert done.process.returncode == 0, done.err
    events = json.loads((tmp_path / "trace.json").read_text())
    ran = Counter(event["tid"] for event in events if event["ph"] == "B" and event["name"] == "ALLREDUCE")
    assert ran == {0: 50, 1: 50, 2: 50}


PROGRAM = "import time, ringcomm as rc; rc.init(); time.sleep(float(__import__('sys').argv[1]))"


def catches(pid: int, signum: int) -> bool:
    """Return whether a process has a handler for a signal."""
    status = Path(f"/proc/{pid}/status").read_text()
    mask = next(line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(mask, 16) >> (signum - 1) & 1)


def started(*arguments: str) -> Launched:
    """ringrun, as soon as its own code runs: what Python does before that is not ringrun's."""
    launched = Launched(*arguments)
    while launched.process.poll() is None and not catches(launched.process.pid, signal.SIGUSR1):
        time.sleep(0.001)
    return launched


@pytest.mark.parametrize("count", [3, pytest.param(40, marks=[pytest.mark.full, pytest.mark.release])])
@pytest.mark.timeout(600)
def test_ctrl_c_at_any_moment_of_the_start_leaves_no_traceback(count: int) -> None:
    chance = random.Random(count)
    for number in range(count):
        launched = started("-np", "2", sys.executable, "-c", PROGRAM, "60")
        delay_s = chance.random() * 2.0 * number / max(1, count - 1)
        time.sleep(delay_s)
        launched.process.send_signal(signal.SIGINT)
        code = launched.finish(LIMIT_S)
        about = f"{delay_s:.3f} s: {code}\n{launched.out}\n{launched.err}"
        assert code in (130, -signal.SIGINT), about
        # The ranks' own programs are interrupted, too; those lines have a rank in front.
        own = [line for line in launched.err.splitlines() if not line.startswith("[localhost:")]
        assert not any("Traceback" in line or "Error" in line for line in own), about


@pytest.mark.full
def test_sigusr1_before_there_is_a_job_does_not_end_it() -> None:
    for delay_s in (0.0, 0.2):
        launched = started("-np", "2", sys.executable, "-c", PROGRAM, "0.5")
        time.sleep(delay_s)
        launched.process.send_signal(signal.SIGUSR1)
        assert launched.finish(LIMIT_S) == 0, launched.err


TRAIN = """
import os, pathlib, sys
import numpy as np
import ringcomm as rc

rc.init()
attempt = int(os.environ["RINGCOMM_RESTART"])
saved = pathlib.Path("checkpoint")
start = int(saved.read_text()) if saved.exists() else 0
for step in range(start, 9):
    assert rc.allreduce(np.ones(3), op=rc.Sum)[0] == rc.size()
    if rc.rank() == 0:
        saved.write_text(str(step + 1))
    rc.barrier()
    if step == 3 * attempt + 2 and attempt < 2 and rc.rank() == 1:
        sys.exit(int(sys.argv[1]))
print("attempt", attempt, "from step", start)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(TRAIN)
    return tmp_path


@pytest.mark.full
def test_it_goes_on_from_the_checkpoint(folder: Path) -> None:
    done = ringrun("-np", "2", "--restarts", "3", "--output-dir", "logs", "train.py", "5", cwd=folder)
    assert done.process.returncode == 0, done.err
    assert done.out.count("attempt 2 from step 6") == 2
    assert done.err.count("rank 1 on localhost failed first: exit code 5") == 2
    assert "ringrun: attempt 1 of 4 has failed; the next one starts in 1 s (--restarts 3)." in done.err
    assert "ringrun: attempt 2 of 4 has failed; the next one starts in 2 s (--restarts 3)." in done.err
    assert (folder / "logs" / "attempt.2" / "rank.0" / "stdout").read_text() == "attempt 2 from step 6\n"


DEAD_AFTER_S = 3.0

FREEZES_TRAIN = """
import os, sys, time
from pathlib import Path
import numpy as np
import ringcomm as rc

phase, until = sys.argv[1], Path("over")
rc.init()
ones = np.ones(1_000_000, np.float32)
Path(f"pid{rc.rank()}").with_suffix(".part").write_text(str(os.getpid()))
Path(f"pid{rc.rank()}").with_suffix(".part").rename(f"pid{rc.rank()}")
going, calls = True, 0
while going:
    if phase == "idle":
        time.sleep(0.5)
    elif phase == "named":
        assert rc.synchronize(rc.allreduce_async(ones, op=rc.Sum, name="ones"))[0] == rc.size()
    else:
        assert rc.allreduce(ones, rc.Sum)[-1] == rc.size()
    calls += 1
    going = bool(rc.broadcast(np.array([not until.exists()]), 0)[0])
print("calls", calls)
"""


@pytest.mark.parametrize(
    ("phase", "links"),
    [("direct", "tcp"), ("named", "auto"), pytest.param("idle", "auto", marks=pytest.mark.release)],
)
@pytest.mark.full
def test_stopped_and_continued_in_time(tmp_path: Path, phase: str, links: str) -> None:
    (tmp_path / "train.py").write_text(FREEZES_TRAIN)
    env = {"RINGCOMM_TRANSPORT": links}
    options = ["--dead-after", str(DEAD_AFTER_S), "-np", "3"]
    job = Launched(*options, "train.py", phase, cwd=tmp_path, env=env)
    files = [tmp_path / f"pid{rank}" for rank in range(3)]
    wait_for_files(files)
    for file in files[:2]:
        pid = int(file.read_text())
        os.kill(pid, signal.SIGSTOP)
        time.sleep(DEAD_AFTER_S * 0.5)
        os.kill(pid, signal.SIGCONT)
        time.sleep(0.2)
    (tmp_path / "over").touch()
    assert job.finish() == 0, job.err
    assert len({line.split("]")[1] for line in job.out.splitlines() if "calls" in line}) == 1, job.out
