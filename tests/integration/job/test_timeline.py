"""The timeline: complete JSON at any moment, all ranks on one clock, Horovod's names, pairs that match."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import numpy as np
import pytest

from ringcomm.config import Membership, Settings
from ringcomm.errors import Misuse
from ringcomm.job.context import Context
from ringcomm.ops import Sum
from ringcomm.testing.cluster import run_ranks


def test_a_disk_that_fills_up_costs_the_timeline_and_not_the_job(tmp_path):
    """A limit on the size of files stands for the disk; its signal is ignored by Python."""
    program = f"""
import resource
import numpy as np
import ringcomm as rc
rc.init()
rc.start_timeline({str(tmp_path / "trace.json")!r})
limits = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
for number in range(200):
    rc.allreduce_async(np.ones(3), name=f"tensor {{number}}").wait()
rc.stop_timeline()
resource.setrlimit(resource.RLIMIT_FSIZE, limits)  # what measures coverage writes a file at the end
print("done")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True)
    assert (done.returncode, done.stdout.decode().split()) == (0, ["done"]), done.stderr.decode()
    assert done.stderr.decode().count("\n") == 1
    assert b"trace.json is incomplete: File too large." in done.stderr


def meanwhile(path, attempts=3):
    """The events of a file that grows: every write leaves it whole, so a reader may have to read again."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return json.loads(os.read(descriptor, 1 << 20))  # with one call: a second one would add what is new
    except json.JSONDecodeError:
        if attempts == 1:
            raise
    finally:
        os.close(descriptor)
    time.sleep(0.01)
    return meanwhile(path, attempts - 1)


def read(path):
    """The events of a trace, after checking that what begins ends, inner before outer."""
    trace = json.loads(path.read_text())
    processes = {e["pid"]: e["args"]["name"] for e in trace if e.get("name") == "process_name"}
    open_spans = {}
    for event in trace:
        line = (event["pid"], event.get("tid"))
        if event["ph"] == "B":
            open_spans.setdefault(line, []).append(event)
        elif event["ph"] == "E":
            began = open_spans[line].pop()
            assert began["ts"] <= event["ts"]
    assert not any(open_spans.values())
    return trace, processes


def test_of_three_ranks(tmp_path):
    path = tmp_path / "trace.json"
    moments = {}

    def work(context):
        context.start_timeline(str(path))
        if context.rank == 0:
            with pytest.raises(Misuse, match="already"):
                context.start_timeline(str(path))
        time.sleep(0.05 * context.rank)  # rank 2 is late
        handles = [context.engine.allreduce([np.ones(9)], Sum, f"g{n}") for n in range(3)]
        for handle in handles:
            handle.wait(20)
        context.engine.allgather([np.ones(2)], [(2,)]).wait(20)
        moments[context.rank] = meanwhile(path)  # in the middle of it
        context.stop_timeline()
        context.engine.allreduce([np.ones(1)], Sum, "not seen").wait(20)

    run_ranks(3, work, "tcp")
    trace, processes = read(path)
    labels = {"allreduce.g0", "allreduce.g1", "allreduce.g2", "allgather.noname.1"}
    assert labels <= set(processes.values()) and not any("not seen" in name for name in processes.values())
    of_g1 = [e for e in trace if processes[e["pid"]] == "allreduce.g1" and e["ph"] in "BX"]
    names = {(event["name"], event["tid"]) for event in of_g1}
    assert {("ALLREDUCE", 0), ("ALLREDUCE", 1), ("ALLREDUCE", 2), ("NEGOTIATE_ALLREDUCE", 0)} <= names
    assert {("MEMCPY_IN_FUSION_BUFFER", rank) for rank in range(3)} <= names
    ticks = [(event["name"], event["ts"]) for event in of_g1 if event["ph"] == "X"]
    assert sorted(name for name, _ in ticks) == ["0", "1", "2"]
    # On one clock: no rank can have run it before the last one had announced it.
    last_tick = max(at for _, at in ticks)
    assert all(event["ts"] >= last_tick - 500 for event in of_g1 if event["name"] == "ALLREDUCE")
    ended = [event for event in trace if event["ph"] == "E" and "args" in event]
    assert {event["args"]["dtype"] for event in ended} == {"float64"}
    assert moments[0][0]["args"]["start_time_since_epoch_in_micros"] > 1e15


def test_of_one_rank(tmp_path):
    path = tmp_path / "trace.json"
    with Context.start(Membership(size=1), Settings(timeline=str(path))) as context:
        context.engine.barrier("by a setting").wait(20)
        context.stop_timeline()
        context.engine.barrier("not seen").wait(20)
        context.start_timeline(str(tmp_path / "second.json"))
        for _ in range(2):
            context.engine.allreduce([np.ones(9)], Sum).wait(20)
        context.engine.allreduce([np.ones(9)], Sum, "a").wait(20)
    trace, processes = read(path)
    assert list(processes.values()) == ["ringcomm", "barrier.by a setting"]
    assert [event["name"] for event in trace if event["ph"] == "B"] == ["BARRIER"]
    trace, processes = read(tmp_path / "second.json")  # its context was closed, which ends it
    assert list(processes.values())[1:] == ["allreduce.noname.1", "allreduce.noname.2", "allreduce.a"]
    names = [event["name"] for event in trace if event["ph"] == "B" and event["tid"] == 0]
    assert names == ["ALLREDUCE", "RINGCOMM_ALLREDUCE"] * 3
