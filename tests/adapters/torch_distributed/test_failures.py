"""Ranks that die, freeze, disagree or leave: every rank gets an error that names the failed rank."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("torch")

pytestmark = pytest.mark.full

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = ROOT / "tests" / "adapters" / "torch_distributed" / "program.py"


def test_what_ranks_are_told(harness):
    outcome = harness.run_checks("checks_failures.py", 3)
    ended = outcome.pop("end", "")
    assert {name: problem for name, problem in outcome.items() if problem} == {}
    assert sorted(outcome) == sorted(harness.names_of("checks_failures.py"))
    assert ended.startswith("rank 2 ended with -9")


def test_ranks_that_disagree_are_told_the_same(harness):
    found = harness.run_checks("checks_disagreements.py", 3)
    assert found == {"check_ranks_that_disagree": ""}, "\n".join(found.values())


def start(command, **variables):
    environ = {name: value for name, value in os.environ.items() if not name.startswith("RINGCOMM_")}
    environ.update(PYTHONPATH=f"{ROOT}:{ROOT / 'launcher'}", OMP_NUM_THREADS="1", **variables)
    return subprocess.Popen(
        [sys.executable, "-m", *command], env=environ, cwd=ROOT,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip


def finished(process, limit_s=300):
    try:
        output, _ = process.communicate(timeout=limit_s)
    finally:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.stdout.close()
        process.wait()
    return output


@pytest.mark.release
def test_torchrun_starts_again_after_a_rank_was_killed(tmp_path):
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node=3", "--max-restarts=1"]
    process = start([*torchrun, str(PROGRAM), "kill", str(tmp_path)])
    output = finished(process)
    assert process.returncode == 0, output
    told = [(tmp_path / f"told.{rank}").read_text() for rank in (0, 2)]
    assert all("PeerLostError" in text and "rank 1 " in text for text in told), told
    assert sorted(path.name for path in tmp_path.glob("done.*")) == ["done.0", "done.1", "done.2"]


@pytest.mark.release
def test_a_frozen_rank_is_named(tmp_path):
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node=3"]
    process = start([*torchrun, str(PROGRAM), "freeze", str(tmp_path)], RINGCOMM_DEAD_AFTER="3")
    stop_s = time.monotonic() + 90
    try:
        while time.monotonic() < stop_s and len(list(tmp_path.glob("told.*"))) < 2:
            time.sleep(0.1)
        told = [(tmp_path / f"told.{rank}").read_text() for rank in (0, 2)]
    finally:
        pid = tmp_path / "frozen"
        if pid.exists():
            os.kill(int(pid.read_text()), signal.SIGKILL)
        output = finished(process)
    assert all("PeerStalledError" in text and "rank 1 " in text for text in told), (told, output)
    assert all("no heartbeat for 3 s" in text for text in told), told


@pytest.mark.release
def test_a_late_rank_is_named_with_its_stack_and_waited_for(tmp_path):
    process = start(["ringrun", "-np", "3", "--late-after", "10", str(PROGRAM), "late", str(tmp_path)])
    output = finished(process)
    assert process.returncode == 0, output
    assert re.search(r"default process group: allreduce\(.* on ranks 0 .* and 2 .* for rank 1 ", output)
    assert "for which others wait, is here" in output and "time.sleep(4.0)" in output, output
    assert sorted(path.name for path in tmp_path.glob("done.*")) == ["done.0", "done.1", "done.2"]


@pytest.mark.release
def test_a_rank_that_waits_in_another_group_is_not_the_one_to_blame(tmp_path):
    program = [str(PROGRAM), "late in a pair", str(tmp_path)]
    process = start(["ringrun", "-np", "3", "--late-after", "10", *program])
    output = finished(process)
    assert process.returncode == 0, output
    pair = r"rocess group \S+ \(ranks 0, 1\): allreduce\(shape \(2,\)"
    assert re.search(rf"P{pair}.* on rank 0 .* for rank 1 ", output), output
    assert re.search(r"The default process group: allreduce\(.* on rank 2 .* for ranks 0 .* and 1 ", output)
    assert re.search(rf"Rank 0 .*, for which others wait, is here:\n.*  in p{pair}", output), output


@pytest.mark.release
@pytest.mark.parametrize("launcher", ["torchrun", "ringrun"])
def test_the_timeline_shows_what_groups_do(tmp_path, launcher):
    trace = tmp_path / "trace.json"
    program = [str(PROGRAM), "train", str(tmp_path)]
    if launcher == "torchrun":
        torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        process = start([*torchrun, *program], RINGCOMM_TIMELINE=str(trace))
    else:
        process = start(["ringrun", "-np", "2", "--timeline", str(trace), *program])
    output = finished(process)
    assert process.returncode == 0, output
    events = json.loads(trace.read_text())
    rows = {item["args"]["name"]: item["pid"] for item in events if item.get("name") == "process_name"}
    gradients = next(pid for name, pid in rows.items() if name.endswith("allreduce, 5 x float32"))
    for rank in range(2):
        shown = [event for event in events if event["pid"] == gradients and event.get("tid") == rank]
        phases = [(event["ph"], event.get("name")) for event in shown if event["ph"] in "BE"]
        assert phases == 6 * [("B", "QUEUE"), ("E", None), ("B", "ALLREDUCE"), ("E", None)], phases


@pytest.mark.release
@pytest.mark.parametrize("method", ["env://", "ringcomm://"])
def test_under_ringrun_nothing_needs_to_be_set(tmp_path, method):
    process = start(["ringrun", "-np", "3", str(PROGRAM), "train", str(tmp_path), method])
    output = finished(process)
    assert process.returncode == 0, output
    assert "one was agreed upon" not in output, "ringrun has given a key"
    assert sorted(path.name for path in tmp_path.glob("done.*")) == ["done.0", "done.1", "done.2"]


def test_an_uncaught_exception_is_told_to_the_others(tmp_path):
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    process = start([*torchrun, str(PROGRAM), "raise", str(tmp_path)])
    finished(process)
    assert process.returncode != 0
    assert "bad sample" in (tmp_path / "told.0").read_text()
