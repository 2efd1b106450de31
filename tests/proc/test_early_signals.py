"""Signals to ringrun at any moment of its start: no traceback, and nothing left behind."""

from __future__ import annotations

import random
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.proc.test_ringrun_support import LIMIT_S, Launched

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
