"""A process of an elastic job that is lost is replaced by one that reads its data for long after init().

The new process waits until the others have made WANTED more steps. If they waited for it, that would not end.
Arguments: a folder.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import numpy as np

import ringcomm as rc

WANTED = 50
FOLDER = Path(sys.argv[1])
LOST, STEPS = FOLDER / "lost", FOLDER / "steps"


def steps() -> int:
    return int(STEPS.read_text() or 0) if STEPS.exists() else 0


def reads_its_data() -> None:
    until = steps() + WANTED
    end = time.monotonic() + 60
    while steps() < until:
        if time.monotonic() > end:
            raise SystemExit("the others do not go on")
        time.sleep(0.01)


@rc.elastic.run
def train(state: rc.elastic.ObjectState) -> None:
    print(f"rank {rc.rank()} of {rc.size()} from step {state.step}", flush=True)
    while not (LOST.exists() and rc.size() == 3 and state.step > state.joined_at + 5):
        total = rc.allreduce(np.ones(8), op=rc.Sum)
        assert total[0] == rc.size()
        state.step += 1
        if rc.rank() == 0:
            STEPS.with_suffix(".new").write_text(str(state.step))
            STEPS.with_suffix(".new").replace(STEPS)
        if state.step == 20 and rc.rank() == 2 and not LOST.exists():
            LOST.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if not LOST.exists() or rc.size() < 3:
            state.joined_at = state.step
        time.sleep(0.005)
        state.commit()


rc.init()
if LOST.exists():
    print(f"new: rank {rc.rank()} of {rc.size()}", flush=True)
    reads_its_data()
    print("read", flush=True)
train(rc.elastic.ObjectState(step=0, joined_at=0))
print("done", flush=True)
