from __future__ import annotations

from typing import List, Optional

import pytest

from ringcomm.errors import ConfigError
from ringrun.plan.hosts import parse_hostfile, parse_hosts
from ringrun.plan.ranks import make_plan


@pytest.mark.parametrize(
    ("np", "hosts", "used"),
    [
        (None, "", ["localhost:1"]), (3, "", ["localhost:3"]), (None, "a", ["a:1"]), (4, "a", ["a:4"]),
        (None, "a:2,b", ["a:2", "b:1"]), (2, "a:2,b", ["a:2"]), (3, "a:2,b:4", ["a:2", "b:1"]),
        (None, "a,a,b", ["a:2", "b:1"]), (None, "a:2,b,A", ["a:3", "b:1"]),
        (None, "a,me@a", ["a:1", "me@a:1"]),
    ],
)
def test_how_many_each_host_runs(np: Optional[int], hosts: str, used: List[str]) -> None:
    plan = make_plan(np, parse_hosts(hosts) if hosts else [])
    assert [f"{host.spec.target}:{host.used}" for host in plan.hosts] == used
    assert [place.rank for place in plan.places] == list(range(plan.size))
    assert [len(plan.on_host(index)) for index in range(len(plan.hosts))] == [
        host.used for host in plan.hosts
    ]


@pytest.mark.parametrize(
    ("np", "hosts", "words"),
    [
        (0, "a", ["at least one"]),
        (5, "a:2,b", ["5 ranks", "only 3 slots", "a has 2", "b has 1 (not stated)", "-H a:3,b:2"]),
        (2, "me@a:1", ["only 1 slot:", "-H me@a:2"]),
        (3, "[::1]:2", ["-H [::1]:3", "slots=3", "separated by commas"]),
    ],
)
def test_too_many_ranks(np: int, hosts: str, words: List[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        make_plan(np, parse_hosts(hosts))
    for word in words:
        assert word in str(caught.value)


def test_a_host_has_one_interpreter() -> None:
    first, second = parse_hosts("a,a")
    with pytest.raises(ConfigError, match="listed twice with different python="):
        make_plan(2, [first, second._replace(python="/p")])


@pytest.mark.parametrize("hosts", ["", "a"])
def test_so_many_ranks_on_one_host_must_be_meant(hosts: str) -> None:
    specs = parse_hosts(hosts) if hosts else []
    assert make_plan(1024, specs).size == 1024
    with pytest.raises(ConfigError, match="-np 100000 asks for 100000 ranks, but there is only 1 slot"):
        make_plan(100000, specs)
    assert make_plan(2000, parse_hosts("a:2000")).size == 2000


@pytest.mark.parametrize(("np", "used"), [(2, [2]), (3, [2, 1]), (5, [3, 2]), (8, [3, 5]), (9, [3, 6])])
def test_oversubscription_stays_below_max_slots(np: int, used: List[int]) -> None:
    hosts = parse_hostfile("a slots=2 max_slots=3\nb slots=1 max-slots=6\n", "hosts")
    plan = make_plan(np, hosts, oversubscribe=True)
    assert [host.used for host in plan.hosts] == used


def test_more_ranks_than_max_slots() -> None:
    hosts = parse_hostfile("a slots=2 max_slots=3\n", "hosts")
    with pytest.raises(ConfigError, match=r"max_slots= in the hostfile allows 3 \(a 3\)"):
        make_plan(4, hosts, oversubscribe=True)
    with pytest.raises(ConfigError, match="max_slots=1 is less than slots=2"):
        parse_hostfile("a slots=2 max_slots=1", "hosts")
