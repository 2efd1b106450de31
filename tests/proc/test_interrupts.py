"""A rank is interrupted in a collective, catches that and continues: the other ranks' errors name it."""

from __future__ import annotations

import pytest

from tests.proc.plain_jobs import run_plain

COMMON = """
import os, signal, sys, threading, time
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
        time.sleep(5.0)  # it continues with other work, and all other ranks must have failed by then
    fails(lambda: rc.barrier())
else:
    if rc.rank() == 0:
        time.sleep(1.0)  # so that rank 1 is interrupted while it waits
    fails(call)
"""
)

GROUP = (
    COMMON
    + """
import torch
import torch.distributed as dist
import ringcomm.torch.distributed as backend
rank = int(os.environ["TEST_NUMBER"])
dist.init_process_group("ringcomm", init_method="file://" + os.environ["TEST_STORE"], rank=rank, world_size=3)
group = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))
call = lambda: dist.all_reduce(torch.ones(100_000))
if rank == 1:
    interrupt_when(lambda: group._ops.runner.progress().doing)
    try:
        call()
    except KeyboardInterrupt:
        time.sleep(5.0)
    fails(dist.barrier)
else:
    if rank == 0:
        time.sleep(1.0)
    fails(call)
sys.stdout.flush()
os._exit(0)  # leaving a group that has failed is not what this is about
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


def test_in_a_process_group(tmp_path) -> None:
    pytest.importorskip("torch")
    store = str(tmp_path / "store")
    check(run_plain(GROUP, 3, RINGCOMM_DEAD_AFTER="2", TEST_STORE=store), "allreduce(shape (100000,)")
