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
        ({"LSB_JOBID": "7", "LSB_MCPU_HOSTS": "a 4 b 2 "}, "", [("a", 4), ("b", 2)], "blaunch {host}"),
        ({"LSB_JOBID": "7", "LSB_DJOB_HOSTFILE": "/f"}, "a\na\nb\n", [("a", 2), ("b", 1)], "blaunch {host}"),
        (
            {"JOB_ID": "7", "PE_HOSTFILE": "/f"},
            "a 4 all.q@a UNDEFINED\nb 2 all.q@b UNDEFINED\n",
            [("a", 4), ("b", 2)],
            "qrsh -inherit {host}",
        ),
        ({"OAR_JOB_ID": "7", "OAR_NODEFILE": "/f"}, "a\nb\na\n", [("a", 2), ("b", 1)], "oarsh {host}"),
        ({"PBS_JOBID": "7", "PBS_NODEFILE": "/f"}, "a\n\nb\nb\n", [("a", 1), ("b", 2)], ""),
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
    assert allocation.via == via
    assert all(f"{name}:{slots}" in allocation.describe() for name, slots in hosts)
    assert allocation.may_appear is (via == "" and "PBS_JOBID" not in environ)


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"SLURM_JOB_ID": "7"},  # submitted, not in an allocation
        {"JOB_ID": "7"},  # any program may have such a variable
        {"PBS_NODEFILE": "/f"},
        {"LSB_JOBID": "7"},
    ],
)
def test_no_allocation(environ: Dict[str, str]) -> None:
    assert found(environ) is None


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({**SLURM, "SLURM_TASKS_PER_NODE": "1,2,3"}, ["3 numbers", "2 names", "-H"]),
        ({"PBS_JOBID": "7", "PBS_NODEFILE": "/gone"}, ["/gone"]),
        ({"PBS_JOBID": "7", "PBS_NODEFILE": "/f"}, ["names no host", "-H"]),
        ({"JOB_ID": "7", "PE_HOSTFILE": "/odd"}, ["is not a host with its slots"]),
        ({"LSB_JOBID": "7", "LSB_MCPU_HOSTS": "a b"}, ["LSB_MCPU_HOSTS"]),
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
@pytest.mark.parametrize("scheduler", ["slurm", "lsf", "lsf file", "sge", "oar", "pbs"])
def test_a_name_that_is_no_host_name_is_refused(scheduler: str, name: str) -> None:
    """It would reach the command line of ssh, or a shell in a template of --via."""
    files = {"/f": f"good\n{name}\n", "/sge": f"good 1 q\n{name.replace(' ', '')} 1 q\n"}
    environ = {
        "slurm": {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": f"good,{name}"},
        "lsf": {"LSB_JOBID": "7", "LSB_MCPU_HOSTS": f"good 1 {name.replace(' ', '')} 1"},
        "lsf file": {"LSB_JOBID": "7", "LSB_DJOB_HOSTFILE": "/f"},
        "sge": {"JOB_ID": "7", "PE_HOSTFILE": "/sge"},
        "oar": {"OAR_JOB_ID": "7", "OAR_NODEFILE": "/f"},
        "pbs": {"PBS_JOBID": "7", "PBS_NODEFILE": "/f"},
    }[scheduler]
    if not name and scheduler in ("lsf file", "oar", "pbs"):
        return  # an empty line
    with pytest.raises(ConfigError) as caught:
        found(environ, files)
    assert str(caught.value).isprintable()


def test_addresses_of_a_scheduler_are_valid_hosts() -> None:
    allocation = found({"PBS_JOBID": "7", "PBS_NODEFILE": "/f"}, {"/f": "fd00::7\n10.0.0.7\nn_1.x\n"})
    assert allocation is not None
    assert [host.name for host in allocation.hosts] == ["fd00::7", "10.0.0.7", "n_1.x"]
