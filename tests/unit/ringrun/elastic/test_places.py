from __future__ import annotations

from typing import List

from ringrun.elastic.limits import HostLimits
from ringrun.elastic.places import Host, Phase, Process, describe_sources
from ringrun.plan.hosts import HostSpec


def host(name: str, limits: HostLimits = HostLimits(1, 1), slots: int = 2) -> Host:  # noqa: B008  it is frozen
    made = Host(HostSpec(name, slots=slots), limits)
    made.listed = True
    return made


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
    for_a_while, gone = host("b"), host("c")
    gone.listed = False
    for item in (for_a_while, gone):
        item.phase = Phase.READY
        item.cooldown.fail(5.0, True)
    assert describe_sources([for_a_while, gone], "", 5.2) == " (b is excluded for 1 s more)"
    assert describe_sources([for_a_while], "", 6.0) == ""


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
