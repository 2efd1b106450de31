"""Ways to fail x what the others are doing x which rank: everybody else names it, and nothing is left."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

from tests.proc.test_ringrun_support import ringrun

DEAD_AFTER_S = 2

TRAIN = """
import os, re, signal, sys, time
import numpy as np
import ringcomm as rc

way, phase, culprit = sys.argv[1], sys.argv[2], int(sys.argv[3])

def fail():
    if way == "SIGKILL": os.kill(os.getpid(), signal.SIGKILL)
    if way == "SIGSEGV": os.kill(os.getpid(), signal.SIGSEGV)
    if way == "SIGSTOP": os.kill(os.getpid(), signal.SIGSTOP)
    if way == "exception": raise ValueError("its own fault")
    if way == "leaves": sys.exit(0)
    if way == "os._exit": os._exit(7)
    # In C, for ever, and no signal interrupts it: ringrun sends one, to be told where it is.
    if way == "holds the lock": re.match("(a+)+$", "a" * 60 + "b")

rc.init()
try:
    for step in range(10**9):
        if step == 3 and rc.rank() == culprit:
            fail()
        if phase == "engine":
            rc.synchronize(rc.allreduce_async(np.ones(1000), name="grad"))
        elif phase == "large":
            rc.allreduce(np.ones(3_000_000))
        elif phase == "idle":
            if step < 3:
                rc.barrier()
            elif step == 3:
                time.sleep(6)
            else:
                rc.synchronize(rc.allreduce_async(np.ones(1), name="after"))
        else:
            getattr(rc, phase)(*(() if phase == "barrier" else (np.ones((6, 50)),)))
except rc.RingcommError as error:
    print("SURVIVOR", type(error).__name__, str(error).replace(chr(10), " "), flush=True)
    raise
"""

WAYS = ["SIGKILL", "SIGSEGV", "SIGSTOP", "exception", "leaves", "os._exit", "holds the lock"]
PHASES = ["allreduce", "large", "allgather", "broadcast", "barrier", "engine", "idle"]
CASES = [
    (way, phase, (number + number // len(PHASES)) % 3)
    for number, (way, phase) in enumerate(itertools.product(WAYS, PHASES))
]


@pytest.mark.parametrize(("way", "phase", "culprit"), CASES)
def test_everybody_names_the_culprit(tmp_path: Path, way: str, phase: str, culprit: int) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    env = {"RINGCOMM_DEAD_AFTER": str(DEAD_AFTER_S)}
    arguments = ["-np", "3", "--verbose", "train.py", way, phase, str(culprit)]
    done = ringrun(*arguments, cwd=tmp_path, env=env)
    assert done.process.returncode not in (0, None), done.err
    assert f"rank {culprit} on localhost failed first" in done.err, done.err
    if phase != "idle":
        survivors = re.findall(r":(\d)\] SURVIVOR (\w+) (.*)", done.out)
        assert {int(rank) for rank, _, _ in survivors} == {0, 1, 2} - {culprit}, done.out + done.err
        for _, kind, text in survivors:
            assert kind in ("PeerLostError", "PeerStalledError") and f"rank {culprit}" in text
