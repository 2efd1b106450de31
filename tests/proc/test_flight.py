"""When a job fails, or on SIGUSR1, ringrun reports which rank waits for which, and what each is doing."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from tests.proc.test_ringrun_support import Launched, ringrun, wait_for_files

TRAIN = """
import os, re, signal, sys, time
import numpy as np
import ringcomm as rc

way, channel = sys.argv[1:]

def load():
    open("loading", "w").close()
    while not os.path.exists("loaded"):
        time.sleep(0.01)

def spin():
    re.match("(a+)+$", "a" * 60 + "b")  # for ever, in C, and no other thread may run

rc.init()
x = np.ones(4, np.float32)
for step in range(5):
    rc.allreduce_(x, name="conv1")
if rc.rank() == 0:
    open("coming", "w").close()
else:
    while not os.path.exists("coming"):
        time.sleep(0.01)
    time.sleep(0.3)  # for rank 0 to come to where it waits
    if way == "raise": raise ValueError("bad sample")
    if way == "kill": os.kill(os.getpid(), signal.SIGKILL)
    if way == "stop": os.kill(os.getpid(), signal.SIGSTOP)
    if way == "load": load()
    if way == "spin": spin()
if channel == "calls":
    rc.allreduce_(x, name="conv3.grad")
else:
    rc.allreduce_async_(x, name="conv3.grad").wait()
print("done")
"""
CALLS, ENGINE = 'rc.allreduce_(x, name="conv3', "rc.allreduce_async_("
LIMITS = ["--dead-after", "2", "--late-after", "3"]


def line_of(text: str) -> int:
    return next(number for number, line in enumerate(TRAIN.splitlines(), 1) if line.strip().startswith(text))


AT = {
    "calls": f"op 6, train.py:{line_of(CALLS)}",
    "engine": f"op 1, train.py:{line_of(ENGINE)}",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(TRAIN)
    return tmp_path


STOPPED = "Rank 1 (localhost) did not answer: its process is stopped (SIGSTOP, "


@pytest.mark.parametrize(
    ("way", "channel", "sentence"),
    [
        ("kill", "engine", "Rank 1 (localhost) left nothing behind: killed by SIGKILL."),
        ("load", "calls", "which is done; its main thread is in load (train.py:"),
        pytest.param("stop", "calls", STOPPED, marks=pytest.mark.release),
        pytest.param("stop", "engine", STOPPED, marks=pytest.mark.release),
        pytest.param("spin", "calls", "its main thread is in spin (train.py:", marks=pytest.mark.release),
    ],
)
@pytest.mark.full
def test_the_report_names_the_ranks_that_wait_and_for_which(
    folder: Path, way: str, channel: str, sentence: str
) -> None:
    done = ringrun("-np", "2", *LIMITS, "train.py", way, channel, cwd=folder)
    assert done.process.returncode != 0
    waits = f"│ Rank 0 (localhost) waits in allreduce `conv3.grad` ({AT[channel]})"
    assert waits in done.err, done.err
    assert sentence in done.err and "│ Rank 0 waits for rank 1.\n" in done.err, done.err
    assert f"ringrun diagnose {done.records}" in done.err


MISMATCH = """
import sys
import numpy as np
import ringcomm as rc

rc.init()
x = np.ones(3 if rc.rank() == 1 else 4, np.float32)
if sys.argv[1] == "calls":
    rc.allreduce_(x, name="grad")
else:
    rc.allreduce_async_(x, name="grad").wait()
"""


@pytest.mark.parametrize("channel", ["calls", pytest.param("engine", marks=pytest.mark.release)])
def test_a_mismatch_is_told_once_and_in_full(tmp_path: Path, channel: str) -> None:
    (tmp_path / "train.py").write_text(MISMATCH)
    done = ringrun("-np", "4", "--threads", "none", "train.py", channel, cwd=tmp_path)
    assert done.process.returncode == 1
    assert done.err.startswith("╭─ ringrun: the ranks do not make the same calls\n"), done.err
    assert done.err.count("Traceback") == 1 and done.err.count("│ ringcomm.errors.MismatchError: ") == 1
    assert done.err.count(f"at {tmp_path / 'train.py'}:") == 2, done.err
    assert "failed with the same error.\n" in done.err
    assert "/ringcomm/" not in done.err and "do not make the same call:" not in done.err, done.err


def test_the_files_give_the_same_again(folder: Path) -> None:
    done = ringrun("-np", "2", *LIMITS, "train.py", "raise", "calls", cwd=folder)
    assert done.err.count("Traceback") == 1, "in the report only"
    files = sorted(done.records.iterdir())
    assert [path.name for path in files] == ["flight.0.json", "flight.1.json"]
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}
    content = json.loads(files[0].read_text())
    (channel,) = [item for item in content["lanes"] if item["name"] == "calls"]
    states = [row["state"] for row in channel["operations"]]
    # Rank 1 failed first, and ringrun may have asked this rank before it knew.
    assert states[:-1] == ["done"] * 5 and states[-1] in ("running", "failed")
    assert any(thread["main"] for thread in content["threads"])
    again = ringrun("diagnose", str(done.records), cwd=folder)
    assert again.process.returncode == 0
    shown = [line[2:] for line in done.err.splitlines() if line.startswith("│ Rank")]
    assert again.out.splitlines() == [line for line in shown if not line.endswith("stopped because of it.")]


def ask(launched: Launched, pid: int) -> None:
    """Send SIGUSR1, and wait for the records."""
    os.kill(pid, signal.SIGUSR1)
    wait_for_files([launched.records / "flight.0.json", launched.records / "flight.1.json"])


@pytest.mark.parametrize("target", ["launcher", "rank 1"])
def test_sigusr1_shows_what_every_rank_does_and_the_job_continues(folder: Path, target: str) -> None:
    launched = Launched("-np", "2", "train.py", "load", "calls", cwd=folder)
    wait_for_files([folder / "loading"])
    ranks = launched.find("train.py load", 2)
    places = {
        Path(f"/proc/{pid}/environ").read_bytes().partition(b"RINGCOMM_SLOT=0:")[2][:1].decode(): pid
        for pid in ranks
        if pid != launched.process.pid
    }
    ask(launched, launched.process.pid if target == "launcher" else places[target[-1]])
    (folder / "loaded").touch()
    assert launched.finish() == 0
    assert launched.out.count("done") == 2
    assert "ringrun: Rank 0 (localhost) waits in allreduce `conv3.grad` (op 6, " in launched.err
    # In load, or in what that calls at this very moment.
    assert "which is done; its main thread is in " in launched.err
    assert "ringrun: Rank 0 waits for rank 1.\n" in launched.err
