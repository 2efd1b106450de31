"""Programs with process groups under ringrun, torchrun and alone: how they start, and how they end."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from importlib.metadata import distribution

import pytest

pytest.importorskip("torch")

from ringrun.job.files import entry_point
from tests.proc.test_ringrun_support import Launched
from tests.support.programs import SOURCES, run_python

START = """
import atexit, datetime, os, signal, sys, time
from pathlib import Path
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import ringcomm.torch.distributed as backend

def train(steps, go_wrong=lambda: None, pair=None):
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        if step == 3 and rank == 1:
            go_wrong()
        if pair is not None and rank < 2:
            dist.all_reduce(torch.ones(2), group=pair)
        optimizer.zero_grad()
        model(torch.ones(2, 4) * rank).sum().backward()
        optimizer.step()
        dist.all_reduce(torch.ones(1))

"""
JOIN = """
dist.init_process_group("ringcomm", timeout=datetime.timedelta(seconds=60))
rank = dist.get_rank()
"""
CALL = "dist.all_reduce(torch.ones(4))\n"
SITE = f"train.py:{len((START + JOIN + CALL).splitlines())}"


def written(folder, program):
    path = folder / "train.py"
    path.write_text(START + program)
    return path


def ringrun(folder, ranks, program, *options, ok=False, **variables):
    """The finished launcher of a program that fails, unless it is to be ``ok``."""
    written(folder, program)
    env = {"OMP_NUM_THREADS": "1", "TMPDIR": str(folder), **variables}
    job = Launched("-np", str(ranks), *options, "train.py", cwd=folder, env=env)
    assert (job.finish(250) == 0) is ok, job.out + job.err
    return job


def torchrun(folder, ranks, program, *options, code=0, **variables):
    command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", *options]
    return run_python(*command, written(folder, program), code=code, cwd=folder, limit_s=300.0, **variables)


# ---- starts ----------------------------------------------------------------------------------------------


def test_the_backend_needs_no_import():
    program = """
import sys
import torch
assert not any(name.partition(".")[0] == "ringcomm" for name in sys.modules), "import torch is not cheap"
import torch.distributed as dist
dist.init_process_group("ringcomm", init_method="ringcomm://")
assert dist.get_backend() == dist.Backend.RINGCOMM == "ringcomm"
"""
    run_python("-c", program)
    wanted = {(item.group, item.value) for item in distribution("ringcomm").entry_points}
    text = next(data.decode() for name, data in entry_point() if name.endswith("entry_points.txt"))
    assert ("torch.backends", text.splitlines()[1].partition(" = ")[2]) in wanted, "what ringrun sends has it"


JOINS = """
import warnings
warnings.simplefilter("always")
backend.init()
backend.init()
assert dist.get_backend() == "ringcomm" and "torch._dynamo" not in sys.modules
total = torch.ones(3)
if dist.get_rank() >= 0:
    import torch.distributed._functional_collectives as functional
    total = functional.all_reduce(total, "sum", dist.group.WORLD) + 0
assert "torch._dynamo" in sys.modules, "imported while the backend's thread runs it"
print(f"rank {dist.get_rank()} has {total.tolist()}", flush=True)
dist.destroy_process_group()
dist.init_process_group(init_method="ringcomm://")
assert dist.group.WORLD._get_backend(torch.device("cpu")).name() == "ringcomm"
"""


@pytest.mark.release
@pytest.mark.parametrize("launcher", ["ringrun", "torchrun"])
def test_init_joins(tmp_path, launcher):
    if launcher == "ringrun":
        output = ringrun(tmp_path, 2, JOINS, ok=True).out
    else:
        output = torchrun(tmp_path, 2, JOINS.partition("dist.init_process_group(")[0])
    assert sorted(re.findall(r"rank (\d) has \[2.0, 2.0, 2.0\]", output)) == ["0", "1"]


@pytest.mark.release
@pytest.mark.parametrize(("way", "warned"), [("alone", ["10"]), ("messages", [])])
def test_ranks_that_train_alone_are_reported_once(tmp_path, way, warned):
    """After some steps; not if they have communicated."""
    program = f"""
backend.init()
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(12):
    if {way == "messages"} and step == 5:
        (dist.send if dist.get_rank() else dist.recv)(torch.ones(1), 1 - dist.get_rank())
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
"""
    text = ringrun(tmp_path, 2, program, ok=True).err
    assert re.findall(r"Rank 0 of 2 has made (\d+) optimizer step", text) == warned, text


# ---- what is recorded ------------------------------------------------------------------------------------


@pytest.mark.release
@pytest.mark.parametrize("launcher", ["torchrun", "ringrun"])
def test_the_timeline_and_the_report_show_what_groups_do(tmp_path, launcher):
    trace, program = tmp_path / "trace.json", JOIN + "train(6)"
    if launcher == "torchrun":
        torchrun(tmp_path, 2, program, RINGCOMM_TIMELINE=str(trace))
    else:
        ringrun(tmp_path, 2, program, "--timeline", str(trace), "--report", "run.html", ok=True)
        rows = re.findall(r"<tr[^>]*><td>(\d)</td><td class=.t.>localhost</td><td>(\d+)</td>",
                          (tmp_path / "run.html").read_text())  # fmt: skip
        assert rows == [("0", "6"), ("1", "6")], "the steps of the optimizer"
    events = json.loads(trace.read_text())
    rows = {item["args"]["name"]: item["pid"] for item in events if item.get("name") == "process_name"}
    gradients = next(pid for name, pid in rows.items() if name.endswith("allreduce, 5 x float32"))
    for rank in range(2):
        shown = [event for event in events if event["pid"] == gradients and event.get("tid") == rank]
        phases = [(event["ph"], event.get("name")) for event in shown if event["ph"] in "BE"]
        assert phases == 6 * [("B", "QUEUE"), ("E", None), ("B", "ALLREDUCE"), ("E", None)], phases


# ---- failures --------------------------------------------------------------------------------------------

TOLD = """
import traceback
try:
    train(6, go_wrong)
except RuntimeError:
    Path(f"told.{rank}").write_text(traceback.format_exc())
    raise
Path(f"done.{rank}").write_text("")
"""


@pytest.mark.release
def test_a_frozen_rank_is_named(tmp_path):
    program = """
def go_wrong():
    Path("frozen").write_text(str(os.getpid()))
    os.kill(os.getpid(), signal.SIGSTOP)
"""
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3"]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("RINGCOMM_")}
    environ.update(PYTHONPATH=SOURCES, OMP_NUM_THREADS="1", RINGCOMM_DEAD_AFTER="3")
    command += [str(written(tmp_path, JOIN + program + TOLD))]
    job = subprocess.Popen([sys.executable, *command], cwd=tmp_path, env=environ, start_new_session=True)
    try:
        stop_s = time.monotonic() + 200
        while time.monotonic() < stop_s and len(list(tmp_path.glob("told.*"))) < 2:
            time.sleep(0.1)
        told = [(tmp_path / f"told.{rank}").read_text() for rank in (0, 2)]
    finally:
        if (tmp_path / "frozen").exists():
            os.kill(int((tmp_path / "frozen").read_text()), signal.SIGKILL)
        os.killpg(job.pid, signal.SIGKILL)
        job.wait()
    assert all("PeerStalledError" in text and "rank 1 " in text for text in told), told
    assert all("no heartbeat for 3 s" in text for text in told), told


@pytest.mark.release
def test_a_late_rank_is_named_with_its_stack_and_one_that_waits_elsewhere_is_not(tmp_path):
    program = JOIN + "train(6, lambda: time.sleep(4.0), dist.new_group([0, 1]))"
    output = ringrun(tmp_path, 3, program, "--late-after", "10", ok=True).err
    pair = r"rocess group \S+ \(ranks 0, 1\): allreduce\(shape \(2,\)"
    assert re.search(rf"P{pair}.* on rank 0 .* for rank 1 ", output), output
    assert re.search(r"The default process group: allreduce\(.* on rank 2 .* for ranks 0 .* and 1 ", output)
    assert re.search(rf"Rank 0 .*, for which others wait, is here:\n.*  in p{pair}", output), output
    assert "for which others wait, is here" in output and "time.sleep(4.0)" in output, output


@pytest.mark.release
@pytest.mark.parametrize(
    ("end", "title", "where"),
    [
        (
            "raise ValueError('bad sample')",
            "rank 1 on localhost failed first: exit code 1",
            "ended with an uncaught ValueError: bad sample",
        ),
        (
            "sys.exit(0)",
            "rank 1 has ended while ranks 0, 2 still wait for it",
            "has ended with exit code 0, before the operation in which others wait",
        ),
    ],
)
def test_the_first_failure_is_named_although_others_end_sooner(tmp_path, end, title, where):
    program = f"""
if rank == 1:
    class Heavy:
        def __del__(self, sleep=time.sleep):
            sleep(4.0)  # after it has left

    heavy = Heavy()
    {end}
dist.all_reduce(torch.ones(4))
"""
    text = ringrun(tmp_path, 3, JOIN + CALL + program, "--threads", "none").err
    _, titled, box = text.partition(f"╭─ ringrun: {title}\n")
    # What follows depends on which ranks had ended when all were asked what they were doing.
    causes, stopped, _ = box.partition("│ Ranks 0, 2 stopped because of it.\n")
    assert titled and stopped and "PeerLostError" not in causes, text
    if end == "sys.exit(0)":
        assert "│ rank 1 (localhost) has finished (its program ended) while others were in " in text
    assert f"│ Rank 1 (localhost) {where}; its last operation was allreduce (op 1, {SITE}).\n" in text
