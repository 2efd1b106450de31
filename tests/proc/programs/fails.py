"""Fails in one of several ways at one of several moments: fails.py WAY PHASE RANK."""

import os
import re
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

import ringcomm as rc
from ringcomm.collective.execute import Execution
from ringcomm.collective.short import ShortExecution
from ringcomm.rendezvous.links import LinkSetup

way, phase, culprit = sys.argv[1], sys.argv[2], int(sys.argv[3])
own_rank = int(os.environ["RANK"])
freezes = way in ("SIGSTOP", "holds the lock")
IDLE_S = float(os.environ["RINGCOMM_DEAD_AFTER"]) + 1.7 if freezes else 1.7


def eat() -> None:
    """Out of memory, as a limit makes it."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 32), resource.RLIM_INFINITY))
    hoard = []
    while True:
        hoard.append(np.empty(1 << 30, np.uint8))


def fail(*_: Any) -> bool:
    print(f"FAILS {time.time()}", flush=True)
    if way.startswith("SIG"):
        os.kill(os.getpid(), getattr(signal, way))
    if way == "exception":
        raise ValueError("its own fault")
    if way == "sys.exit(0)":
        sys.exit(0)
    if way == "os._exit":
        os._exit(7)
    if way == "holds the lock":
        # In C, without end, and no signal interrupts it: ringrun sends one to get its stacks.
        re.match("(a+)+$", "a" * 60 + "b")
    if way == "out of memory":
        eat()
    return False


def fail_inside() -> None:
    """The next collective gets a little way, and no further."""
    for kind in (Execution, ShortExecution):
        calls = iter(range(100))
        usual = kind.advance

        def advance(self: Any, calls: Any = calls, usual: Any = usual) -> bool:
            return bool(fail() if next(calls) == 1 else usual(self))

        kind.advance = advance  # type: ignore[method-assign]


mine = own_rank == culprit
ones = np.ones((600_000,), np.float32)
CALLS = {
    "reduce-scatter": lambda: rc.reducescatter(ones),
    "all-gather": lambda: rc.allgather(ones),
    "broadcast": lambda: rc.broadcast(ones, (culprit + 1) % 3),
    "barrier": rc.barrier,
}
try:
    if phase == "rendezvous" and mine:
        time.sleep(0.3)  # the others are there
        fail()
    if phase == "connecting" and mine:
        LinkSetup.link = fail  # type: ignore[assignment, method-assign]
    rc.init()
    rc.barrier()
    if phase == "idle":
        if mine:
            fail()
        time.sleep(IDLE_S)
        rc.barrier()
    elif phase == "shutdown":
        if mine:
            time.sleep(0.2)  # the others have left
            fail()
    else:
        CALLS[phase]()
        if mine:
            fail_inside()
        for _ in range(10**9):
            CALLS[phase]()
except rc.RingcommError as error:
    print("SURVIVOR", type(error).__name__, time.time(), str(error).replace("\n", " "), flush=True)
    raise
rc.shutdown()
