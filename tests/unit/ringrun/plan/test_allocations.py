from __future__ import annotations

from typing import Dict, List, Optional, Tuple

import pytest

from ringcomm.errors import ConfigError
from ringrun.plan.allocations import (
    MAX_HOSTS,
    Allocation,
    expand,
    find_allocation,
    refuse_many_launchers,
    tasks_per_node,
)

SLURM = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "jetson[1-2]", "SLURM_TASKS_PER_NODE": "3,1"}


def found(environ: Dict[str, str], files: Optional[Dict[str, str]] = None) -> Optional[Allocation]:
    def read(what: str, path: str) -> str:
        if path not in (files or {}):
            raise ConfigError(f"The {what} {path} cannot be read.")
        return (files or {})[path]

    return find_allocation(environ, read)


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


# ---- lists of nodes and tasks -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("jetson1", ["jetson1"]),
        ("jetson[1-2]", ["jetson1", "jetson2"]),
        ("node[09-11,7],gpu1", ["node09", "node10", "node11", "node7", "gpu1"]),
        ("a[1-2]-ib[0,3]", ["a1-ib0", "a1-ib3", "a2-ib0", "a2-ib3"]),
        ("n[1-2]x,n3", ["n1x", "n2x", "n3"]),
        ("r[8-10]", ["r8", "r9", "r10"]),
        ("a,a", ["a", "a"]),
        ("node-a.example.org", ["node-a.example.org"]),
    ],
)
def test_lists(text: str, names: List[str]) -> None:
    assert expand(text) == names


@pytest.mark.parametrize(
    "text", ["", "a,", ",a", "a[", "a]", "a[1-2", "a[[1]]", "a[x]", "a[2-1]", "a[]", "a[1-", "n[1-1000000]"]
)
def test_what_is_no_list_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="list of nodes"):
        expand(text)


@pytest.mark.parametrize("text", ["a[1-60000],b[1-60000]", "a[1-300][1-300]"])
def test_a_list_without_end_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=str(MAX_HOSTS)):
        expand(text)


@pytest.mark.parametrize(
    ("text", "counts"), [("3,1", [3, 1]), ("2(x3),1", [2, 2, 2, 1]), ("4", [4]), ("1(x2)", [1, 1])]
)
def test_tasks(text: str, counts: List[int]) -> None:
    assert tasks_per_node(text) == counts


@pytest.mark.parametrize("text", ["", "x", "2(x)", "2x3", "2(x3", "1,,2", "1(x999999)"])
def test_what_is_no_number_of_tasks_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="tasks per node"):
        tasks_per_node(text)
