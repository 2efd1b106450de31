"""Elastic training under the real launcher on this machine: losses, joins, removals and failures."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Dict, List

import pytest

from tests.proc.test_ringrun_support import ROOT, Launched, ringrun

PROGRAM = str(ROOT / "tests" / "proc" / "programs" / "elastic_steps.py")
LIMIT_S = 60.0


def environment(folder: Path) -> Dict[str, str]:
    """Variables that keep a job's control socket away from those of other tests."""
    return {"XDG_RUNTIME_DIR": str(folder)}


def script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def starts(out: str) -> Dict[int, List[str]]:
    """By member, its lines at the start of the training function."""
    found: Dict[int, List[str]] = {}
    for member, line in re.findall(r"member (\d+) pid \d+ (epoch .*)", out):
        found.setdefault(int(member), []).append(line)
    return found


def pids(out: str) -> Dict[int, set]:
    """By member, the process ids that it has reported."""
    found: Dict[int, set] = {}
    for member, pid in re.findall(r"member (\d+) pid (\d+)", out):
        found.setdefault(int(member), set()).add(pid)
    return found


def endings(out: str) -> int:
    """How many ranks have ended, all with the same number of steps and the total that belongs to it."""
    found = re.findall(r"ends with (\S+) after (\d+) steps", out)
    assert len(set(found)) == 1 and float(found[0][0]) == int(found[0][1]), found
    return len(found)


@pytest.fixture
def go_on(tmp_path: Path) -> Path:
    """A file without which a job ends."""
    path = tmp_path / "go_on"
    path.touch()
    return path


def wait_for(path: Path, text: str, count: int = 1) -> None:
    """Wait until a file contains a text so many times."""
    until = time.monotonic() + LIMIT_S
    while time.monotonic() < until:
        if path.exists() and path.read_text().count(text) >= count:
            return
        time.sleep(0.02)
    raise AssertionError(f"{text!r} has not appeared {count} times in {path}")


def test_a_killed_rank_is_replaced_and_the_others_go_on_in_their_processes() -> None:
    done = ringrun("-np", "3", "--min-np", "2", PROGRAM, env={"DIE": "1:10:kill", "UNTIL": "3"})
    assert done.process.returncode == 0, done.err
    assert re.search(
        r"^ringrun: rank 1 \(localhost\) lost: killed by SIGKILL; going on with 2 ranks after \d+\.\d s$",
        done.err, re.M,
    )  # fmt: skip
    assert "ringrun: localhost joined again: 3 ranks\n" in done.err
    assert "╭─ ringrun: the ranks changed 2 times" in done.err
    found = starts(done.out)
    assert sorted(found) == [0, 1, 2, 3]
    assert found[0][1] == "epoch 1 rank 0 of 2 from step 10"
    assert found[2][1] == "epoch 1 rank 1 of 2 from step 10"
    assert len(found[3]) == 1
    assert all(len(each) == 1 for each in pids(done.out).values())
    assert endings(done.out) == 3


@pytest.mark.full
def test_hosts_of_the_script_come_and_go(tmp_path: Path, go_on: Path) -> None:
    hosts, out = tmp_path / "hosts", tmp_path / "out"
    hosts.write_text("localhost:2\n")
    path = script(tmp_path / "discover", f"cat {hosts}")
    job = Launched(
        "--min-np", "2", "--max-np", "4", "--host-discovery-script", path, "--output-dir", str(out), PROGRAM,
        env={**environment(tmp_path), "GO_ON": str(go_on)},
    )  # fmt: skip
    wait_for(out / "rank.0" / "stdout", "of 2 from")
    hosts.write_text("localhost:2\n127.0.0.1:2\n")
    wait_for(out / "rank.0" / "stdout", "of 4 from")
    hosts.write_text("127.0.0.1:2\n")
    wait_for(out / "rank.2" / "stdout", "of 2 from")
    go_on.unlink()
    assert job.finish(LIMIT_S) == 0, job.err
    assert re.search(r"^ringrun: 127.0.0.1 (\(2 ranks\) )?joined: 4 ranks$", job.err, re.M)
    assert "localhost (2 ranks) left: 2 ranks\n" in job.err
    assert " lost: " not in job.err
    assert "Traceback" not in job.err
    assert endings(job.out) == 2
    assert len(starts(job.out)[2]) >= 2
