"""Elastic jobs of the real launcher on this machine: what does not depend on the ranks' collectives."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Dict

import pytest

from tests.proc.test_ringrun_support import LIMIT_S, SOURCES, Launched, ringrun


def environment(folder: Path) -> Dict[str, str]:
    """Variables that keep a job's control socket away from those of other tests."""
    return {"XDG_RUNTIME_DIR": str(folder)}


def command(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """``ringrun add`` or ``ringrun drop``."""
    env = {**os.environ, "PYTHONPATH": SOURCES, **environment(folder)}
    return subprocess.run(
        [sys.executable, "-m", "ringrun", *words], env=env, capture_output=True, text=True, timeout=LIMIT_S
    )


def script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(("flags", "name"), [((), "ringrun"), (("--horovod",), "Horovod")])
def test_all_ranks_failing_ends_the_job_with_horovods_text(flags: tuple, name: str) -> None:
    done = ringrun(*flags, "-np", "2", "--min-np", "1", "sh", "-c", "sleep 0.2; exit 3")
    assert done.process.returncode == 3
    assert (
        f"{name} detected that one or more processes exited with non-zero status, thus causing the job to be "
        "terminated. The first process to do so was:" in done.err
    )
    assert "Process name: localhost[" in done.err and "Exit code: 3" in done.err


def test_a_program_that_does_not_use_ringcomm_ends_well() -> None:
    done = ringrun("--min-np", "2", "sh", "-c", "echo $RINGCOMM_MEMBER of $RINGCOMM_SIZE: $RINGCOMM_ELASTIC")
    assert done.process.returncode == 0
    assert sorted(done.out.splitlines()) == ["[localhost:0] 0 of 2: 1", "[localhost:1] 1 of 2: 1"]
    assert done.err.count("╭") == 0


@pytest.mark.full
def test_the_start_timeout_does_not_end_a_job_that_has_started() -> None:
    done = ringrun("--min-np", "1", "--start-timeout", "3", "sh", "-c", "sleep 5; echo done")
    assert (done.process.returncode, done.out) == (0, "[localhost:0] done\n"), done.err


def test_a_first_failure_of_the_script_ends_the_job(tmp_path: Path) -> None:
    path = script(tmp_path / "hosts", "echo it is broken >&2; exit 5")
    done = ringrun("--min-np", "2", "--host-discovery-script", path, "sleep", "60")
    assert done.process.returncode == 1
    assert "The host discovery script failed at its first run" in done.err
    assert "exit code 5: it is broken" in done.err


def test_output_that_is_no_list_of_hosts_is_refused(tmp_path: Path) -> None:
    path = script(tmp_path / "hosts", "echo localhost; echo 'a b; rm -rf'")
    done = ringrun("--min-np", "2", "--host-discovery-script", path, "sleep", "60")
    assert done.process.returncode == 1
    assert "line 2 of the discovery script's output" in done.err


@pytest.mark.full
def test_later_failures_of_the_script_do_not_end_the_job(tmp_path: Path) -> None:
    count = tmp_path / "count"
    path = script(
        tmp_path / "hosts",
        f"echo run >> {count}; [ $(wc -l < {count}) = 1 ] && echo localhost:2 && exit 0; exit 6",
    )
    wait = f"until [ $(wc -l < {count}) -ge 4 ]; do sleep 0.1; done; echo done"
    done = ringrun("--min-np", "2", "--host-discovery-script", path, "sh", "-c", wait)
    assert done.process.returncode == 0
    assert done.out.count("done") == 2
    assert done.err.count("the discovery script failed; its last hosts remain") == 1


def test_too_few_slots_end_the_wait_after_the_elastic_timeout(tmp_path: Path) -> None:
    path = script(tmp_path / "hosts", "echo localhost:1")
    done = ringrun(
        "--horovod", "-np", "2", "--host-discovery-script", path, "--elastic-timeout", "1.5", "sleep", "60"
    )
    assert done.process.returncode == 1
    assert (
        "Timed out waiting for minimum number of slots to become available. Please check that you have "
        "enough resources to run at least 2 Horovod processes. Timeout after 1.5 seconds." in done.err
    )
    assert done.out == ""


def test_hosts_without_enough_slots_are_refused_at_once() -> None:
    done = ringrun("--min-np", "3", "-H", "localhost:2", "sleep", "60")
    assert done.process.returncode == 2
    assert "The hosts have 2 slots, but the job needs 3 to start" in done.err


@pytest.mark.parametrize("flag", ["--max-np", "--reset-limit", "--elastic-timeout"])
def test_options_without_effect_are_refused(flag: str) -> None:
    done = ringrun(flag, "3", "true")
    assert done.process.returncode == 2
    assert f"{flag} needs --min-np or --host-discovery-script" in done.err


def test_ctrl_c_ends_an_elastic_job_and_leaves_nothing() -> None:
    job = Launched("--min-np", "2", "sleep", "60")
    job.find("sleep 60", 2)
    os.kill(job.process.pid, signal.SIGINT)
    assert job.finish() == 130


# ---- the control socket -------------------------------------------------------------------------


@pytest.mark.release
@pytest.mark.full
def test_add_and_drop_reach_the_job_and_others_do_not(tmp_path: Path) -> None:
    job = Launched("--min-np", "1", "-H", "localhost:2", "sleep", "60", env=environment(tmp_path))
    try:
        job.find("sleep 60", 2)
        folder = tmp_path / "ringrun"
        (path,) = folder.iterdir()
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        wrong = command(tmp_path, "drop", "nowhere")
        assert (wrong.returncode, wrong.stderr) == (1, "ringrun: nowhere is no host of this job.\n")
        assert "is not a host" in command(tmp_path, "add", "a b").stderr
        added = command(tmp_path, "add", "127.0.0.1:1")
        assert (added.returncode, added.stdout) == (0, "127.0.0.1 with 1 slot is being added\n")
        with socket.socket(socket.AF_UNIX) as garbage:
            garbage.connect(str(path))
            garbage.sendall(b"[" * 5000)
            assert b'"ok": false' in garbage.recv(1000)
        assert "several" not in command(tmp_path, "drop", "nowhere", "--job", path.stem[:6]).stderr
        assert "begins with 'zz'. 1 job runs" in command(tmp_path, "drop", "nowhere", "--job", "zz").stderr
    finally:
        os.kill(job.process.pid, signal.SIGINT)
        job.finish()
    assert list(folder.iterdir()) == []


def test_without_a_job_there_is_nothing_to_change(tmp_path: Path) -> None:
    done = command(tmp_path, "add", "localhost")
    assert done.returncode == 1
    assert "No elastic job of yours runs on this machine" in done.stderr
    assert command(tmp_path, "add").returncode == 2


def test_a_socket_that_a_killed_job_left_is_removed(tmp_path: Path) -> None:
    job = Launched("--min-np", "1", "sleep", "60", env=environment(tmp_path))
    job.find("sleep 60", 1)
    job.process.kill()
    job.process.communicate()
    until = time.monotonic() + LIMIT_S
    while job.pids() and time.monotonic() < until:
        time.sleep(0.05)
    assert len(list((tmp_path / "ringrun").iterdir())) == 1
    assert "No elastic job" in command(tmp_path, "drop", "localhost").stderr
    assert list((tmp_path / "ringrun").iterdir()) == []
