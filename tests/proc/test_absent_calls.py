"""Jobs where calls that only Linux has are absent or refused: emulators, sandboxes, old kernels."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.proc.test_ringrun_support import SOURCES, Launched, ringrun

FOLDER = Path(__file__).parent / "absent"
SYSTEM = ("net_if_stats", "net_if_addrs", "ioctl", "abstract_names", "/proc", "/sys", "/dev/shm")
CALLS = (
    "memfd_create", "posix_fallocate", "sched_getaffinity", "sched_setaffinity", "TCP_INFO", "TCP_CONGESTION",
    "SO_PEERCRED", "process_vm_readv", "prctl", "madvise", "epoll", "TCP_KEEPIDLE", "TCP_KEEPINTVL",
    "TCP_KEEPCNT",
)  # fmt: skip
DARWIN = "darwin"
ABSENT, REFUSED = ",".join((*SYSTEM, *CALLS)), ",".join((*SYSTEM, *(f"{name}!" for name in CALLS)))


def run(absent: str, *arguments: str, **more: str) -> Launched:
    environment = {"PYTHONPATH": os.pathsep.join([str(FOLDER), SOURCES]), "ABSENT": absent, **more}
    return ringrun(*arguments, env=environment)


def job(absent: str, *arguments: str) -> None:
    done = run(absent, "-np", "2", *arguments, str(FOLDER / "job.py"))
    assert done.process.returncode == 0, done.err
    assert {line.split("] ")[-1] for line in done.out.splitlines()} >= {"done 0", "done 1"}, done.out


@pytest.mark.parametrize(
    ("absent", "transport"), [(ABSENT, "auto"), (REFUSED, "tcp"), (DARWIN, "auto")],
    ids=["absent", "refused", "darwin"],
)  # fmt: skip
def test_a_job_without_any_of_them(absent: str, transport: str) -> None:
    job(absent, "--transport", transport)


@pytest.mark.release
@pytest.mark.parametrize("call", [*SYSTEM, *CALLS, *(f"{name}!" for name in CALLS)])
def test_a_job_without_one_of_them(call: str) -> None:
    job(call, *(["--transport", "tcp"] if call.startswith("TCP_") else []))


@pytest.mark.release
@pytest.mark.parametrize("absent", [ABSENT, REFUSED, DARWIN], ids=["absent", "refused", "darwin"])
def test_the_loss_of_a_rank_is_reported_without_them(absent: str) -> None:
    done = run(absent, "-np", "2", str(FOLDER / "job.py"), "die")
    assert done.process.returncode == 128 + 9, done.err
    assert "rank 1 on localhost failed first: killed by SIGKILL" in done.err


@pytest.mark.release
@pytest.mark.parametrize("absent", [ABSENT, REFUSED, DARWIN], ids=["absent", "refused", "darwin"])
def test_the_doctor_examines_such_a_host(absent: str) -> None:
    done = run(absent, "doctor", "-H", "localhost:2")
    assert "Traceback" not in done.out + done.err
    assert "Examined 1 host" in done.out + done.err, done.out + done.err


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("absent", "why"),
    [
        ("sched_setaffinity", "this system has no sched_setaffinity"),
        ("sched_setaffinity!", "sched_setaffinity: Function not implemented"),
        ("sched_getaffinity", "the system does not report the processors of a process"),
    ],
)
def test_ranks_that_cannot_be_bound_run_unbound_after_one_line(absent: str, why: str) -> None:
    done = run(absent, "-np", "2", "--bind", "core", str(FOLDER / "job.py"))
    assert done.process.returncode == 0, done.err
    lines = [line for line in done.err.splitlines() if "--bind" in line]
    assert lines == [f"ringrun: --bind has no effect on localhost: {why!r}"], done.err
