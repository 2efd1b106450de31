"""A rank is interrupted in a collective, catches that and continues: the other ranks' errors name it."""

from __future__ import annotations

import pytest

from tests.proc.plain_jobs import run_plain

COMMON = """
import os, signal, sys, threading, time, traceback
import numpy as np
import ringcomm as rc

def interrupt_when(busy):
    def look():
        while not busy():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)
    threading.Thread(target=look, daemon=True).start()

def fails(call):
    try:
        call()
    except rc.PeerLostError as error:
        print("TOLD", type(error).__name__, error.rank, error)
    else:
        print("went on")
"""

DIRECT = (
    COMMON
    + """
rc.init()
context = rc.api.context()
call = lambda: rc.allreduce(np.ones(100_000), name="gradient")
if rc.rank() == 1:
    interrupt_when(lambda: context._runner.progress().doing)
    try:
        call()
    except KeyboardInterrupt:
        time.sleep(2.5)  # it continues with other work, and all other ranks must have failed by then
    fails(lambda: rc.barrier())
else:
    if rc.rank() == 0:
        time.sleep(1.0)  # so that rank 1 is interrupted while it waits
    fails(call)
"""
)

def check(results, doing):
    for code, output in results:
        assert code == 0, output
        (line,) = [line for line in output.splitlines() if line.startswith("TOLD")]
        assert line.startswith("TOLD PeerLostError 1 rank 1"), output
        assert f"was interrupted (KeyboardInterrupt) in {doing}" in line
        assert "do not receive each other's messages" not in line


def test_in_a_direct_call() -> None:
    check(run_plain(DIRECT, 3, RINGCOMM_DEAD_AFTER="2"), "allreduce(shape (100000,)")


BY_NAME = (
    COMMON
    + """
rc.init()
loop = rc.api.context().engine._thread
values = np.ones(100_000)
if rc.rank() == 0:
    interrupt_when(lambda: threading.main_thread().ident in [item[0] for item in loop._state.waiters.waits])
    try:
        WAIT
    except KeyboardInterrupt:
        values[:] = 1000.0  # what the others must not take for this rank's contribution
    print("LEFT")
    time.sleep(3.0)
    fails(lambda: rc.synchronize(rc.allreduce_async(values, name="next")))
else:
    time.sleep(2.0)  # so that rank 0 is interrupted before this rank submits
    def call():
        print("GOT", rc.allreduce_async(values, op=rc.Sum, name="gradient").wait()[0])
    fails(call)
"""
)
START = "rc.allreduce_async_(values, op=rc.Sum, name='gradient')"
WAITS = {
    "driving": f"rc.synchronize({START})",
    "beside a thread that drives": (
        f"handle = {START}; thread = threading.Thread(target=fails, args=(handle.wait,)); thread.start(); "
        "time.sleep(0.5); rc.synchronize(handle)"
    ),
}
"""How the thread that is interrupted waits for the operation."""


@pytest.mark.parametrize("wait", WAITS.values(), ids=WAITS)
@pytest.mark.cases(1)
@pytest.mark.full
def test_in_the_wait_for_an_operation_that_not_all_ranks_have_submitted(wait: str) -> None:
    results = run_plain(BY_NAME.replace("WAIT", wait), 2, RINGCOMM_DEAD_AFTER="2")
    for code, output in results:
        assert code == 0, output
        assert "GOT" not in output
        assert "TOLD PeerLostError 0 rank 0" in output
        assert "was interrupted (KeyboardInterrupt) in allreduce(shape (100000,)" in output
    assert sum("LEFT" in output for _, output in results) == 1
