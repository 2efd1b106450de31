"""Hosts: lists, hostfiles, and those of a scheduler."""

from __future__ import annotations

from typing import Dict, List, Mapping, Optional

import pytest

from ringcomm.errors import ConfigError
from ringrun.plan.hosts import (
    MAX_HOSTS,
    Allocation,
    HostSpec,
    crowding,
    expand,
    find_allocation,
    parse_hostfile,
    parse_hosts,
    refuse_many_launchers,
    tasks_per_node,
)


@pytest.mark.parametrize(
    ("text", "specs"),
    [
        ("a", [HostSpec("a")]), ("a,b:2", [HostSpec("a"), HostSpec("b", slots=2)]),
        (" a , b:2 ", [HostSpec("a"), HostSpec("b", slots=2)]),
        ("me@a.example-1.org:3", [HostSpec("a.example-1.org", "me", 3)]),
        ("192.168.1.7:1", [HostSpec("192.168.1.7", slots=1)]),
        ("[fe80::1]:2", [HostSpec("fe80::1", slots=2)]), ("[fe80::1%eth0]", [HostSpec("fe80::1%eth0")]),
        ("me@[::1]:2,[::1]", [HostSpec("::1", "me", 2), HostSpec("::1")]),
        ("DOMAIN\\me@pc", [HostSpec("pc", "DOMAIN\\me")]),
        ("me@a:2@2222,[::1]:1@22", [HostSpec("a", "me", 2, port=2222), HostSpec("::1", slots=1, port=22)]),
        ("join:2@80,join:desk", [HostSpec("join", slots=2, port=80), HostSpec("join", machine="desk")]),
        ("join:2nd-desk@80", [HostSpec("join", port=80, machine="2nd-desk")]),
    ],
)
def test_hosts(text: str, specs: List[HostSpec]) -> None:
    assert parse_hosts(text) == specs
    assert parse_hosts(",".join(spec.item for spec in specs)) == specs


@pytest.mark.parametrize(
    ("slots", "cores", "odd"),
    [(22, 4, "If 22 is the port of its sshd, write me@a:1@22"), (22, 24, ""), (33, 4, "asks for 33 ranks"),
     (32, 4, ""), (None, 1, "")],
)  # fmt: skip
def test_slots_that_are_probably_no_slots(slots: Optional[int], cores: float, odd: str) -> None:
    text = crowding(HostSpec("a", "me", slots), cores)
    assert odd in text and bool(text) is bool(odd)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["is not a host"]), ("a,,b", ["item 2 of 3", "comma too many"]),
        ("a:", ["'a:' is not a host"]), ("a:0", ["'0'", "whole number from 1 to 65535"]),
        ("a:1@99999", ["'99999'", "whole number from 1 to 65535"]), ("a:²", ["is not a host"]),
        ("join:desk@99999", ["'99999'", "whole number from 1 to 65535"]), ("join:a.b", ["is not a host"]),
        ("a:99999", ["99999"]), ("fe80::1", ["[IPV6]:SLOTS"]), ("[fe80::1", ["is not a host"]),
        ("[jetson1]:2", ["is not a host"]), (":2", ["is not a host"]),
        ("-oProxyCommand=x", ["is not a host"]), ("-x@a", ["is not a host"]), ("a b", ["is not a host"]),
    ],
)
def test_bad_hosts_are_named(text: str, words: List[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_hosts(text)
    for word in ["-H", *words]:
        assert word in str(caught.value)


def test_hostfile() -> None:
    text = """# my machines
    localhost slots=2   # this one

    jetson1
    me@jetson2 slots = 3 python=/opt/py/bin/python cwd="/data/my train" iface=eth0
    [fd00::2]:4
    jetson3 slots=2 max-slots=2
    jetson4 max_slots=3
    """
    assert parse_hostfile(text, "hosts") == [
        HostSpec("localhost", slots=2), HostSpec("jetson1"),
        HostSpec("jetson2", "me", 3, "/opt/py/bin/python", "/data/my train", "eth0"),
        HostSpec("fd00::2", slots=4), HostSpec("jetson3", slots=2, max_slots=2),
        HostSpec("jetson4", max_slots=3),
    ]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("# nothing\n", ["hosts names no host"]), ("a\nb slots=two", ["line 2", "'two'"]),
        ("a:2 slots=3", ["line 1", "'slots=3' is not an option of a host", "each once"]),
        ("a\n\nb max=3", ["line 3", "'max=3' is not an option", "python=…"]),
        ("a cwd=", ["'cwd=' is not an option"]), ("a cwd='x", ["line 1", "quot"]),
        ("a::1", ["line 1", "[IPV6]"]), ("a max-slots=2 max_slots=3", ["each once"]),
        ("a\nb slots=3 max-slots=2", ["line 2", "max_slots=2 is less than slots=3"]),
        ("a\njoin:1", ["line 2", "-H localhost,join:2", "USER@join"]),
    ],
)
def test_bad_hostfiles_are_named(text: str, words: List[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_hostfile(text, "hosts")
    for word in words:
        assert word in str(caught.value)


def test_a_hostfile_of_mlx_launch() -> None:
    one = '{"ssh": "mac1", "ips": ["10.0.0.1", "fe80::1"], "rdma": []}'
    other = '{"ssh": "me@mac2"}'
    expected = [HostSpec("mac1", slots=2, iface="10.0.0.1/32,fe80::1/128"), HostSpec("mac2", "me", slots=1)]
    assert parse_hostfile(f"\n [ {one}, {one}, {other}]", "hosts.json") == expected
    whole = f'{{"backend": "ring", "envs": [], "hosts": [{one}, {one}, {other}]}}'
    assert parse_hostfile(whole, "hosts.json") == expected


SLURM = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "jetson[1-2]", "SLURM_TASKS_PER_NODE": "3,1"}


def found(environ: Dict[str, str], files: Mapping[str, str] = {}) -> Optional[Allocation]:  # noqa: B006
    return find_allocation(environ, lambda what, path: files[path])


@pytest.mark.parametrize(
    ("environ", "content", "hosts"),
    [
        (SLURM, "", "jetson1:3, jetson2:1"),
        ({**SLURM, "SLURM_TASKS_PER_NODE": ""}, "", "jetson1:1, jetson2:1"),
        ({**SLURM, "SLURM_TASKS_PER_NODE": "2", "SLURM_STEP_NODELIST": "jetson2"}, "", "jetson2:2"),
        ({"OMPI_MCA_orte_default_hostfile": "/f"}, "w-0.svc slots=2\nw-1 slots=2\n", "w-0.svc:2, w-1:2"),
        ({"HYDRA_HOST_FILE": "/f"}, "w-0:2\nw-1:2\n", "w-0:2, w-1:2"),
        ({"I_MPI_HYDRA_HOST_FILE": "/f"}, "w-0:2\n", "w-0:2"),
    ],
)
def test_hosts_of_a_scheduler(environ: Dict[str, str], content: str, hosts: str) -> None:
    allocation = found(environ, {"/f": content})
    assert allocation is not None and ", ".join(host.item for host in allocation.hosts) == hosts
    assert allocation.describe().endswith(f": {hosts}")
    assert bool(allocation.job) is (not content) and allocation.may_appear is bool(content)


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


def test_more_numbers_of_tasks_than_nodes() -> None:
    with pytest.raises(ConfigError, match="3 numbers, .* 2 names.* -H"):
        found({**SLURM, "SLURM_TASKS_PER_NODE": "1,2,3"})


@pytest.mark.parametrize(
    ("environ", "launcher"),
    [
        ({"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4"}, "srun"),
        ({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "1"}, "mpirun"),
        ({"PMI_SIZE": "4", "PMI_RANK": "1"}, "mpirun"),
        ({"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1"}, ""),
        ({"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_PTY_PORT": "1"}, ""), (SLURM, ""),
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
        ("jetson1", ["jetson1"]), ("jetson[1-2]", ["jetson1", "jetson2"]),
        ("node[09-11,7],gpu1", ["node09", "node10", "node11", "node7", "gpu1"]),
        ("a[1-2]-ib[0,3]", ["a1-ib0", "a1-ib3", "a2-ib0", "a2-ib3"]), ("n[1-2]x,n3", ["n1x", "n2x", "n3"]),
        ("r[8-10]", ["r8", "r9", "r10"]), ("a,a", ["a", "a"]), ("node-a.example.org", ["node-a.example.org"]),
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
