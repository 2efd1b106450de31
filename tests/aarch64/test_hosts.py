"""Hosts of aarch64 alone and in a job with x86-64: bare ones, one with two ranks, lost ones; the doctor."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ringcomm.version import __version__
from tests.aarch64.jobs import NUMPYS, THREE, finished, launcher_environment
from tests.hosts import netlab_system as system
from tests.hosts.job import EXAMPLES, ROOT, Job
from tests.hosts.netlab import Lab
from tests.proc.test_elastic_launcher_jobs import PROGRAM, endings

pytestmark = pytest.mark.timeout(300)

SUITE = """
cd /mnt && export PYTHONDONTWRITEBYTECODE=1 PYTHONPATH=/mnt/tests/aarch64/programs:/mnt:/mnt/launcher &&
/opt/numpy2/bin/python -m pytest -q -p emulated_reading -p no:cacheprovider --tier quick {tests}
"""
TESTS = {
    "transports": "tests/integration/transport/test_links.py -k 'test_contract and not tls'",
    "numbers": "tests/unit/codec tests/unit/collective/test_reduce.py tests/unit/engine/test_adasum.py",
}


def test_bare_hosts_are_sent_ringcomm_and_numpy(lab: Lab, project: Path) -> None:
    """The headline command. The hosts have Debian's Python and no package, and nothing of an earlier test."""
    for host in ("jetson1", "jetson2"):
        subprocess.run([*lab.ssh_command.split(), host, "rm -rf ~/.cache/ringcomm"], check=True)
    shutil.copy(EXAMPLES / "elastic_numpy.py", project)
    words = ("-np", 3, "-H", THREE, "--python", "jetson1=python3", "--python", "jetson2=python3")
    job = finished(lab, project, *words, "--provision", "elastic_numpy.py")
    for host in ("jetson1", "jetson2"):
        assert f"sending ringcomm {__version__} to {host}" in job.output
        assert job.values(rf"^ringrun: sending (numpy .*) to {host}"), job.output
    errors = job.values(r"\] rank \d: largest error of a weight (\S+)")
    assert len(errors) == 3 and len(set(errors)) == 1 and float(errors[0]) < 0.1, job.output


@pytest.mark.parametrize("transport", ["shm", "memory", "unix", "auto"])
def test_two_ranks_of_one_host(lab: Lab, project: Path, transport: str) -> None:
    """Through shared memory, and with reading of the other's memory (see emulated_reading.py).

    With ``shm`` and ``memory`` a job fails where that is impossible. With ``auto`` the ranks use shared
    memory: QEMU does not have the call that reads memory.
    """
    words = ("-H", "jetson1:2", "--python", "/opt/numpy2/bin/python", "--transport", transport, "one_host.py")
    job = finished(lab, project, *words, *(["read"] if transport == "memory" else []))
    assert job.output.count("done on aarch64") == 2, job.output


@pytest.mark.parametrize("part", TESTS)
def test_what_other_tests_check_on_aarch64(lab: Lab, part: str) -> None:
    """The contract of transports (but TLS: no openssl makes a key); codecs and reductions."""
    tests = TESTS[part]
    repository = lab.directory / "jetson1" / "root" / "mnt"
    lab.run("jetson1", ["mkdir", "-p", str(repository)])
    lab.run("jetson1", ["mount", "--bind", str(ROOT), str(repository)])
    try:
        done = subprocess.run(
            [*lab.ssh_command.split(), "jetson1", SUITE.format(tests=tests)],
            capture_output=True, text=True, check=False, timeout=280, preexec_fn=system.interruptible,
        )  # fmt: skip
    finally:
        lab.run("jetson1", ["umount", str(repository)])
    assert done.returncode == 0 and re.search(r"^\d{2,} passed", done.stdout, re.M), done.stdout + done.stderr


def test_the_doctor_examines_them(lab: Lab) -> None:
    command = [sys.executable, "-m", "ringrun", "doctor", "--json", "-H", THREE, *NUMPYS, "--cwd", "/tmp"]
    done = subprocess.run(
        command, env=launcher_environment(lab), capture_output=True, text=True, timeout=200, check=False,
        preexec_fn=system.interruptible,
    )  # fmt: skip
    assert done.stderr == "" and done.returncode in (0, 1), done.stderr
    found = json.loads(done.stdout)
    assert len(found["links"]) == 6 and all(link["bytes_per_s"] > 0 for link in found["links"])
    assert [row["text"] for row in found["problems"] if row["level"] == "bad"] == []
    assert any("different versions of numpy" in row["text"] for row in found["problems"])


def test_a_lost_rank_comes_back(lab: Lab, project: Path) -> None:
    """An elastic job goes on without the killed rank of aarch64, and takes its successor."""
    shutil.copy(PROGRAM, project)
    go_on = project.parent / "go_on"
    go_on.touch()
    words = ("--ship", "--min-np", 2, "--dead-after", 10, "-x", f"GO_ON={go_on}", "-H", THREE, *NUMPYS)
    with Job(lab, *words, "elastic_steps.py", module_path=False, cwd=project) as job:
        job.wait_for_line(r"\[jetson2:2\] member 2 pid .* of 3 from", 120.0)
        (pid,) = [pid for pid, line in lab.processes("jetson2") if line.endswith("elastic_steps.py")]
        os.kill(pid, signal.SIGKILL)
        job.wait_for_line(r"rank 2 \(jetson2\) lost: killed by SIGKILL; going on with 2 ranks after", 60.0)
        job.wait_for_line(r"ringrun: jetson2 joined again: 3 ranks", 120.0)
        go_on.unlink()
        assert job.finish(120) == 0, job.output
    assert endings(job.output) == 3, job.output
