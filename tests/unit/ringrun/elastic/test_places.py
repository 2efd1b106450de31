from __future__ import annotations

from typing import List

from ringrun.elastic.limits import HostLimits
from ringrun.elastic.places import Host, Phase, Process, describe_sources
from ringrun.plan.hosts import HostSpec


def host(name: str, limits: HostLimits = HostLimits(1, 1), slots: int = 2) -> Host:  # noqa: B008  it is frozen
    made = Host(HostSpec(name, slots=slots), limits, lambda: 0.0)
    made.listed = True
    return made


def test_no_source_is_left() -> None:
    ready = host("a")
    ready.phase = Phase.READY
    assert describe_sources([], "", 0.0) == ""
    assert describe_sources([ready], "", 0.0) == ""


def test_hosts_that_start_and_a_script() -> None:
    opening, with_process, joined, leaving = hosts = [host(name) for name in "abcd"]
    opening.phase = Phase.OPENING
    for number, item in enumerate((with_process, joined, leaving)):
        item.phase = Phase.READY
        item.processes[0] = Process(number, item, 0)
    joined.processes[0].joined = True
    leaving.processes[0].leaving = "the user has removed its host"
    assert describe_sources(hosts, "./hosts.sh", 0.0) == (
        " (a is starting; b is starting; ./hosts.sh may name other hosts)"
    )


def test_hosts_that_are_excluded() -> None:
    for_good = host("a", HostLimits(1, 1, drop="host"))
    for_a_while = host("b", HostLimits(1, 1, cooldown_s=(10, 100), drop="host"))
    gone = host("c", HostLimits(1, 1, drop="host"))
    gone.listed = False
    for item in (for_good, for_a_while, gone):
        item.phase = Phase.READY
        item.cooldown.fail(5.0, True)
    left_s = for_a_while.cooldown.until_s - 6.0
    assert left_s > 0
    assert describe_sources([for_good, for_a_while, gone], "", 6.0) == (
        f" (a is excluded (`ringrun add a` ends that); b is excluded for {left_s:.0f} s more)"
    )
    assert describe_sources([for_a_while], "", for_a_while.cooldown.until_s) == ""


def test_a_host_has_the_capacity_of_its_slots_until_its_agent_has_answered() -> None:
    made = host("a", slots=3)
    made.phase = Phase.OPENING
    assert (made.capacity(0.0), made.free_slots(0.0), made.may_start_soon) == (3, [], True)
    made.phase = Phase.READY
    made.processes[1] = Process(0, made, 1)
    free: List[int] = made.free_slots(0.0)
    assert (free, made.capacity(0.0), made.may_start_soon) == ([0, 2], 3, False)
    for at_s in (0.0, 10.0, 20.0):
        made.slot_cooldown(0).fail(at_s, False)
    assert (made.free_slots(1e9), made.capacity(1e9)) == ([2], 2)
    made.forgive()
    assert made.free_slots(20.0) == [0, 2]
