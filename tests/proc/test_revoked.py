"""A rank is interrupted in a collective and overwrites its buffer: no other rank takes that for a result."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.proc.test_ringrun_support import Launched

PROGRAM = """
import os, signal, sys, threading, time
import numpy as np
import ringcomm as rc

def until(condition):
    while not condition():
        time.sleep(0.005)

def call(data):
    if sys.argv[1] == "broadcast":
        rc.broadcast_(data, 0)
    else:
        rc.allreduce_(data, rc.Sum)

rc.init()
data = (rc.empty if sys.argv[2] == "shared" else np.empty)(2_000_000, np.float32)
data.fill(1.0)
if rc.rank() == 0:
    # The other rank comes when this one has been interrupted, so this one has lent its buffer and waits.
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        call(data)
    except BaseException as error:
        data.fill(1000.0)
        open("interrupted." + type(error).__name__, "w").close()
    until(lambda: os.path.exists("done"))
    os._exit(3)
until(lambda: os.path.exists("interrupted.KeyboardInterrupt"))
wrong = 0
threading.Timer(1.5, lambda: open("done", "w").close()).start()
try:
    call(data)
    wrong = int((data != (1.0 if sys.argv[1] == "broadcast" else 2.0)).sum())
except rc.RingcommError as error:
    print("error", type(error).__name__, flush=True)
print("wrong", wrong, flush=True)
"""


@pytest.mark.cases(2)
@pytest.mark.parametrize("transport", ["auto", "shm"])
@pytest.mark.parametrize("kind", ["broadcast", "allreduce"])
@pytest.mark.parametrize("memory", ["ordinary", "shared"])
def test_what_an_interrupted_rank_overwrites_is_no_result(
    tmp_path: Path, memory: str, kind: str, transport: str
) -> None:
    (tmp_path / "interrupted.py").write_text(PROGRAM)
    launched = Launched("-np", "2", "--transport", transport, "interrupted.py", kind, memory, cwd=tmp_path)
    launched.finish()
    assert "wrong 0" in launched.out and "error" in launched.out, launched.out + launched.err
