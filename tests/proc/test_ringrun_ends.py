"""However a job ends, nothing of it is left: kills of every process there is, Ctrl-C, stubborn programs."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.proc.test_ringrun_support import SOURCES, Launched, wait_for_files

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
    """That it does not wait is shown in ``tests/integration/ringrun/job/test_user_ends_job.py``."""
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
