"""Processes of a host: bytes for them, the threads of their libraries, and their cores."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Dict, List, Set

import pytest

from ringrun.agent import processes
from ringrun.agent.processes import InheritedBytes


@pytest.mark.parametrize(("length", "in_memory"), [(0, True), (200_000, True), (0, False), (4096, False)])
def test_every_child_reads_all_from_the_start(
    length: int, in_memory: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not in_memory:
        monkeypatch.delattr(os, "memfd_create")
    data = os.urandom(length)
    inherited = InheritedBytes(data)
    for _ in range(2):
        with open(inherited.descriptor(), "rb") as file:
            assert file.read() == data


BLAS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS")


@pytest.mark.parametrize(
    ("wanted", "ranks", "cores", "expected"),
    [
        ("auto", 2, 8.0, 4), ("auto", 3, 8.0, 2), ("auto", 4, 2.0, 1), ("auto", 2, 3.5, 1),
        ("auto", 1, 8.0, 0), ("none", 4, 8.0, 0), ("3", 4, 8.0, 3), ("5", 1, 8.0, 5),
    ],
)  # fmt: skip
def test_share_of_the_cores(wanted: str, ranks: int, cores: float, expected: int) -> None:
    env: Dict[str, str] = {}
    facts = processes.limit_threads(env, wanted, ranks, cores)
    assert facts["threads"] == expected
    assert set(env.values()) == ({str(expected)} if expected else set())
    assert not expected or {*BLAS, "TF_NUM_INTRAOP_THREADS", "PJRT_NPROC"} < set(env)


def test_a_variable_that_is_set_stays_and_those_that_follow_it_are_not_set() -> None:
    env = {"OMP_NUM_THREADS": "6", "MKL_NUM_THREADS": "3", "TF_NUM_INTEROP_THREADS": "2"}
    facts = processes.limit_threads(env, "auto", 2, 4.0)
    assert env["OMP_NUM_THREADS"] == "6" and env["MKL_NUM_THREADS"] == "3"
    assert "OPENBLAS_NUM_THREADS" not in env and "BLIS_NUM_THREADS" not in env
    assert env["TF_NUM_INTRAOP_THREADS"] == "2"
    assert facts["kept"] == {"OMP_NUM_THREADS": "6", "MKL_NUM_THREADS": "3"}


@pytest.mark.parametrize(
    ("lines", "files", "expected"),
    [
        (["0::/a/b"], {"a/b/cpu.max": "max 100000", "a/cpu.max": "150000 100000"}, [1.5]),
        (["0::/gone"], {"cpu.max": "50000 100000"}, [0.5]),
        (["0::/../out"], {"cpu.max": "200000 100000"}, [2.0]),
        (["4:cpu,cpuacct:/d"],
         {"cpu,cpuacct/d/cpu.cfs_quota_us": "300000", "cpu,cpuacct/d/cpu.cfs_period_us": "100000"}, [3.0]),
        (["4:cpu,cpuacct:/d"], {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, []),
        (["2:memory:/d", "nonsense", ""], {"cpu.max": "garbage"}, []),
    ],
)  # fmt: skip
def test_quotas_of_cgroups(
    tmp_path: Path, lines: List[str], files: Dict[str, str], expected: List[float]
) -> None:
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content + "\n")
    assert processes.quotas(lines, str(tmp_path)) == expected

# ---- --bind ---------------------------------------------------------------------------------------


def machine(cores: int, per_core: int = 1, sockets: int = 1, slow: int = 0) -> List[processes.Processor]:
    """Processors numbered as Linux does: first one of each core, then the second ones."""
    return [
        processes.Processor(
            thread * cores + core, core, core * sockets // cores, 400 if core >= cores - slow else 1024
        )
        for thread in range(per_core)
        for core in range(cores)
    ]


@pytest.mark.parametrize(
    ("processors", "ranks", "expected"),
    [
        (machine(4), 2, [{0, 1}, {2, 3}]),
        (machine(4), 3, [{0}, {1}, {2}]),
        (machine(4), 1, [{0, 1, 2, 3}]),
        (machine(4, per_core=2), 2, [{0, 4, 1, 5}, {2, 6, 3, 7}]),
        (machine(4, slow=2), 2, [{0, 2}, {1, 3}]),  # each rank gets a fast one and a slow one
        (machine(2), 3, [set(), set(), set()]),  # too few: no rank is bound
        ([], 2, [set(), set()]),
    ],
)
def test_cores(processors: List[processes.Processor], ranks: int, expected: List[Set[int]]) -> None:
    assert processes.shares("core", processors, ranks) == expected


def test_shares_that_the_system_permits(monkeypatch: pytest.MonkeyPatch) -> None:
    assert processes.usable_shares("none", 2) == ([set(), set()], "")
    found, why = processes.usable_shares("core", 1)
    assert not why and set.union(*found) <= os.sched_getaffinity(0) and all(found)
    found, why = processes.usable_shares("core", 5000)
    assert not any(found) and len(found) == 5000
    assert why == "there are fewer cores than its 5000 ranks"

    def refused(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "sched_setaffinity", refused)
    assert processes.usable_shares("core", 1) == ([set()], "sched_setaffinity: Operation not permitted")
    monkeypatch.setattr(os, "sched_getaffinity", refused)
    assert processes.usable_shares("none", 1) == ([set()], "")
    assert processes.usable_shares("core", 1)[1] == "the system does not report the processors of a process"
