from __future__ import annotations

import contextlib
import sys
from typing import Dict, List, Tuple

import pytest

from ringcomm import config
from ringcomm.config import Membership
from ringcomm.configuration.membership import DEFAULT_FOLDER, find_launched, is_loopback
from ringcomm.errors import ConfigError
from ringcomm.rendezvous import __main__ as rendezvous

STEP = {
    "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "4",
}  # fmt: skip
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "3", "PMIX_NAMESPACE": "12"}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2"}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (STEP, ("srun", 2, 4)),
        (OPEN_MPI, ("mpirun (Open MPI)", 1, 3)),
        # mpirun has started its helpers with srun, and these the ranks.
        ({**STEP, **OPEN_MPI}, ("mpirun (Open MPI)", 1, 3)),
        # `srun --mpi=pmi2`
        ({**STEP, "PMI_RANK": "2", "PMI_SIZE": "4"}, ("srun", 2, 4)),
    ],
)
def test_rank_and_size(environ: Dict[str, str], expected: Tuple[str, int, int]) -> None:
    launched = find_launched(environ)
    assert launched is not None
    assert (launched.launcher, launched.rank, launched.size) == expected
    assert launched.folder == DEFAULT_FOLDER
    membership = Membership.from_environment(environ)
    assert (membership.rank, membership.size, membership.is_alone) == (*expected[1:], False)


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "7"},  # a batch script is no step
        {**STEP, "SLURM_PTY_PORT": "1"},  # an interactive shell
        {**STEP, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"},
        {**STEP, "SLURM_PROCID": "9"},
        {"OMPI_COMM_WORLD_RANK": "x", "OMPI_COMM_WORLD_SIZE": "3"},
        {"PMI_RANK": "0", "PMI_SIZE": "1"},
    ],
)
def test_a_process_that_is_alone(environ: Dict[str, str]) -> None:
    assert find_launched(environ) is None
    assert Membership.from_environment(environ).is_alone


def test_ringruns_own_variables_come_first() -> None:
    assert Membership.from_environment({**STEP, **OPEN_MPI, "RINGCOMM_SIZE": "1"}).is_alone


@pytest.mark.parametrize("environ", [MPICH, {**STEP, "SLURM_PROCID": "0", **MPICH}])
def test_no_rank_trains_alone_because_the_others_cannot_be_found(environ: Dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="MPICH's mpirun has started this process as one of 2"):
        find_launched(environ)


def test_each_step_and_each_start_is_a_job_of_its_own() -> None:
    changes = {"SLURM_STEP_ID": "1", "SLURM_JOB_ID": "8", "SLURM_RESTART_COUNT": "1"}
    jobs = [STEP, *({**STEP, name: value} for name, value in changes.items())]
    names = {found.job for found in map(find_launched, jobs) if found is not None}
    assert len(names) == len(jobs)


def test_the_shared_directory() -> None:
    launched = Membership.from_environment({**STEP, "RINGCOMM_SHARED_DIR": "/nfs/me"}).launched
    assert launched is not None and launched.folder == "/nfs/me"


def test_a_rendezvous_of_its_own_needs_a_size_and_a_key(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Inside a step of Slurm, too: it would serve without a key."""
    for name, value in STEP.items():
        monkeypatch.setenv(name, value)
    for name in ("RINGCOMM_SIZE", "RINGCOMM_KEY", "RINGCOMM_KEY_FILE", "RINGCOMM_KEY_FD"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "argv", ["rendezvous"])
    served: List[object] = []
    monkeypatch.setattr(rendezvous, "_server", lambda *arguments: served.append(arguments))
    with contextlib.suppress(AttributeError):
        assert rendezvous.main() == 2
    assert served == [] and "RINGCOMM_SIZE" in capsys.readouterr().err


RINGRUN = {
    "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500", "WORLD_SIZE": "4", "RANK": "2", "RINGCOMM_SIZE": "4",
    "RINGCOMM_MASTER": "10.0.0.1,29500,4",
}  # fmt: skip


@pytest.mark.parametrize(
    ("environ", "size", "found"),
    [
        ({"WORLD_SIZE": "x", "MASTER_ADDR": "a"}, 2, (False, "")),
        ({"WORLD_SIZE": "2", "MASTER_ADDR": "a"}, 3, (False, "")),
        ({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "a"}, 4, (False, "a")),
        ({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "a"}, 2, (True, "a")),
    ],
)
def test_torchrun(environ, size, found):
    assert config.torchrun_from_environment(size, environ) == found


@pytest.mark.parametrize(
    ("change", "rank"),
    [
        ({}, 2),
        ({"MASTER_PORT": "29501"}, None),  # the program has set another meeting point
        ({"WORLD_SIZE": "2", "RINGCOMM_MASTER": "10.0.0.1,29500,2"}, None),  # not this job's size
        ({"RANK": "two"}, None),
        ({"WORLD_SIZE": "1", "RINGCOMM_SIZE": "1", "RINGCOMM_MASTER": "10.0.0.1,29500,1"}, None),
    ],
)
def test_the_launchers_rank_counts_while_its_variables_are_unchanged(change, rank):
    assert config.launchers_rank_from_environment({**RINGRUN, **change}) == rank


def test_what_env_rendezvous_lacks():
    assert config.env_rendezvous_from_environment(RINGRUN) == ([], 4)
    assert config.env_rendezvous_from_environment({"WORLD_SIZE": "many", "RANK": ""})[1] == 1


@pytest.mark.parametrize(
    "host, found",
    [
        ("127.0.0.9", True), ("::ffff:127.0.0.1", True), ("localhost", True), ("10.0.0.1", False),
        ("fe80::1%eth0", False), ("desk", False), ("", False),
    ],
)  # fmt: skip
def test_which_hosts_mean_this_machine_only(host, found):
    assert is_loopback(host) is found
