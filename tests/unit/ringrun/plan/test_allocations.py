from __future__ import annotations

from typing import Dict, List, Optional, Tuple

import pytest

from ringcomm.errors import ConfigError
from ringrun.plan.allocations import Allocation, find_allocation, refuse_many_launchers
from ringrun.plan.hostlist import expand

SLURM = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "jetson[1-2]", "SLURM_TASKS_PER_NODE": "3,1"}


def found(environ: Dict[str, str], files: Optional[Dict[str, str]] = None) -> Optional[Allocation]:
    def read(what: str, path: str) -> str:
        if path not in (files or {}):
            raise ConfigError(f"The {what} {path} cannot be read.")
        return (files or {})[path]

    return find_allocation(environ, read, expand)


@pytest.mark.parametrize(
    ("environ", "content", "hosts", "via"),
    [
        (SLURM, "", [("jetson1", 3), ("jetson2", 1)], "srun"),
        ({**SLURM, "SLURM_TASKS_PER_NODE": ""}, "", [("jetson1", 1), ("jetson2", 1)], "srun"),
        (
            {**SLURM, "SLURM_TASKS_PER_NODE": "2", "SLURM_STEP_NODELIST": "jetson2"},
            "",
            [("jetson2", 2)],
            "srun",
        ),
        (
            {"OMPI_MCA_orte_default_hostfile": "/f"},
            "job-worker-0.job.ns.svc slots=2\njob-worker-1.job.ns.svc slots=2\n",
            [("job-worker-0.job.ns.svc", 2), ("job-worker-1.job.ns.svc", 2)],
            "",
        ),
        ({"HYDRA_HOST_FILE": "/f"}, "w-0:2\nw-1:2\n", [("w-0", 2), ("w-1", 2)], ""),
        ({"I_MPI_HYDRA_HOST_FILE": "/f"}, "w-0:2\n", [("w-0", 2)], ""),
    ],
)
def test_hosts(environ: Dict[str, str], content: str, hosts: List[Tuple[str, int]], via: str) -> None:
    allocation = found(environ, {"/f": content})
    assert allocation is not None
    assert [(host.name, host.slots) for host in allocation.hosts] == hosts
    assert bool(allocation.job) is (via == "srun")
    assert all(f"{name}:{slots}" in allocation.describe() for name, slots in hosts)
    assert allocation.may_appear is (via == "")


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"SLURM_JOB_ID": "7"},  # submitted, not in an allocation
        {"JOB_ID": "7"},  # any program may have such a variable
    ],
)
def test_no_allocation(environ: Dict[str, str]) -> None:
    assert found(environ) is None


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({**SLURM, "SLURM_TASKS_PER_NODE": "1,2,3"}, ["3 numbers", "2 names", "-H"]),
        ({"HYDRA_HOST_FILE": "/gone"}, ["/gone"]),
    ],
)
def test_what_cannot_be_understood_is_named(environ: Dict[str, str], words: List[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        found(environ, {"/f": "\n", "/odd": "a\n"})
    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize(
    ("environ", "launcher"),
    [
        ({"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4"}, "srun"),
        ({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "1"}, "mpirun"),
        ({"PMI_SIZE": "4", "PMI_RANK": "1"}, "mpirun"),
        ({"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1"}, ""),
        ({"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_PTY_PORT": "1"}, ""),
        (SLURM, ""),
    ],
)
def test_a_launcher_that_starts_ringrun_many_times(environ: Dict[str, str], launcher: str) -> None:
    if not launcher:
        refuse_many_launchers(environ)
        return
    with pytest.raises(ConfigError, match=f"without {launcher}"):
        refuse_many_launchers(environ)


@pytest.mark.parametrize("name", ["-oProxyCommand=x", "$(id)", "a;b", "`id`", "a b'", "../x", "a\x1b[2J", ""])
def test_a_name_that_is_no_host_name_is_refused(name: str) -> None:
    """It would reach the command line of ssh, or a shell in a template of --via."""
    environ = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": f"good,{name}"}
    with pytest.raises(ConfigError) as caught:
        found(environ)
    assert str(caught.value).isprintable()
