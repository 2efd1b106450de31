"""Elastic training of one number, for tests: what each process does is a line on stdout.

Variables: STEPS (least number of steps), GO_ON (a file: the job does not end before it is gone), UNTIL (a
member number: the job does not end before it takes part), PAUSE (seconds per step), DIE ("member:step:how"
with how = kill, exit, error or stop), SLEEP (seconds that a process sleeps before init(), from member number
SLEEP_FROM on).
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import numpy as np

import ringcomm as rc

MEMBER = int(os.environ["RINGCOMM_MEMBER"])
STEPS, PAUSE_S = int(os.environ.get("STEPS", "40")), float(os.environ.get("PAUSE", "0.05"))
DEATHS = [item.split(":") for item in os.environ.get("DIE", "").split(",") if item]

if "SLEEP" in os.environ and int(os.environ.get("SLEEP_FROM", "0")) <= MEMBER:
    time.sleep(float(os.environ["SLEEP"]))
rc.init()


def say(*words: object) -> None:
    print(f"member {MEMBER}", *words, flush=True)


def die(step: int) -> None:
    for member, at, how in DEATHS:
        if (int(member), int(at)) == (MEMBER, step):
            say("dies at", step)
            if how == "exit":
                sys.exit(3)
            if how == "error":
                raise ValueError(f"member {MEMBER} has a bug at step {step}")
            os.kill(os.getpid(), signal.SIGSTOP if how == "stop" else signal.SIGKILL)


def goes_on(step: int) -> bool:
    """The same on all ranks."""
    if step < STEPS:
        return True
    if "UNTIL" in os.environ:
        return bool(rc.allreduce(np.array([MEMBER]), op=rc.Max)[0] < int(os.environ["UNTIL"]))
    return "GO_ON" in os.environ and bool(rc.broadcast(np.array([Path(os.environ["GO_ON"]).exists()]))[0])


@rc.elastic.run
def train(state: rc.elastic.ObjectState) -> None:
    say(f"pid {os.getpid()} epoch {rc.epoch()} rank {rc.rank()} of {rc.size()} from step {state.step}")
    while goes_on(state.step):
        die(state.step)
        total = rc.allreduce(np.full(8, state.total + 1.0))
        time.sleep(PAUSE_S)
        state.total, state.step = float(total[0]), state.step + 1
        state.commit()
    say("ends with", state.total, "after", state.step, "steps")


train(rc.elastic.ObjectState(step=0, total=0.0))
