from __future__ import annotations

import copy
import json
from typing import Any, Callable, Dict, List

import pytest

from ringcomm.transport.routes import Attempt
from ringrun.doctor.findings import all_findings
from ringrun.doctor.network import Examination, Route
from ringrun.doctor.report import as_json, as_text

HEALTHY: Dict[str, Any] = {
    "hostname": "a", "own_name": "127.0.1.1", "python": "3.11.7", "executable": "/v/python",
    "packages": {"numpy": "1.26.4", "psutil": "6.0", "torch": "2.3.0"},
    "cpu": {
        "cores": 4, "all_cores": 4, "quota": None, "throttled": 0.0, "governor": "schedutil", "mhz": [2, 2],
        "hottest": 50.0, "load": 0.1, "waited": 0.0, "power_mode": None,
    },
    "memory": {"total": 8 << 30, "available": 4 << 30, "swap": 0, "swap_free": 0},
    "disks": {"/job": 9 << 30, "/tmp": 9 << 30, "/dev/shm": 1 << 30}, "cwd_exists": True,
    "limits": {"nofile": 1024, "ptrace_scope": 0}, "threads": {}, "time_s": 0.0,
}  # fmt: skip


def iface(number: int, **changes: Any) -> Dict[str, Any]:
    return {
        "name": "eth0", "mac": f"00:00:00:00:00:0{number + 1}", "speed_mbit": 1000,
        "wireless": False, "virtual": False, "power_save": None,
        "addresses": [[f"10.0.0.{number + 1}", 24]], **changes,
    }  # fmt: skip


def attempt(source: int, **changes: Any) -> Attempt:
    """A host has dialled the other one."""
    made = Attempt(
        source, 1 - source, f"10.0.0.{2 - source}", 7, f"10.0.0.{source + 1}", "eth0", "eth0", "wired", ""
    )
    return made._replace(**changes)


def examination() -> Examination:
    """Two healthy hosts."""
    facts: List[Any] = []
    for number in range(2):
        own = copy.deepcopy(HEALTHY)
        facts.append({**own, "machine_id": f"id{number}", "interfaces": [iface(number)]})
    tried = {(0, 1): [attempt(0), attempt(1)]}
    routes = {(0, 1): Route(attempt(0), {(0, 1): 117e6, (1, 0): 116e6})}
    return Examination(
        ["a", "b"], [1, 1], ["", ""], ["", ""], [0.2, 0.3], facts, 0, {}, {0: (0.0, 0.01), 1: (0.01, 0.01)},
        tried, routes,
    )  # fmt: skip


@pytest.mark.parametrize("torch", ["2.3.1", "?"])
def test_healthy_hosts_have_no_problem(torch: str) -> None:
    found = examination()
    change("packages.torch", torch)(found)
    assert all_findings(found) == []
    lines = [line.split() for line in as_text(found, []).splitlines()]
    route = "a - b eth0 - eth0 117 MB/s 116 MB/s"
    assert route.split() in lines and ["No", "problem", "found."] in lines
    data = json.loads(as_json(found, []))
    assert data["problems"] == data["notes"] == []
    assert data["links"][1] == {
        "from": "b", "to": "a", "from_iface": "eth0", "to_iface": "eth0", "bytes_per_s": 116e6,
    }  # fmt: skip


def change(path: str, value: Any) -> Callable[[Examination], None]:
    """Sets one fact of host b."""

    def apply(found: Examination) -> None:
        facts: Any = found.facts[1]
        *way, last = path.split(".")
        for name in way:
            facts = facts[int(name) if name.isdigit() else name]
        facts[last] = value

    return apply


def at_speed(there: Any, back: Any = 116e6) -> Callable[[Examination], None]:
    """The two speeds of the route."""
    return lambda found: found.routes[0, 1].speeds.update({(0, 1): there, (1, 0): back})


def test_what_the_options_of_the_job_solve_is_no_problem() -> None:
    found = examination()
    change("cwd_exists", False)(found)
    change("packages", {"torch": "2.3.0"})(found)
    assert len(all_findings(found)) == 2
    assert all_findings(found._replace(shipped=frozenset({1}), provision=True)) == []
    change("packages", {"numpy": "1.26.4", "torch": "2.3.0"})(found)
    assert all_findings(found._replace(shipped=frozenset({1}))) == [], "Linux needs no psutil"


CASES = [
    (change("cwd_exists", False), "bad", "software", "--ship"),
    (change("packages", {"psutil": "6"}), "bad", "software", "--provision"),
    (change("packages", {"numpy": "1.26.0", "psutil": "6"}), "slow", "software", "install torch there"),
    (change("packages", {"numpy": "1.26", "psutil": "6", "torch": "2.1"}), "slow", "software", "b 2.1"),
    (change("machine_id", "id0"), "slow", "addresses", "systemd-machine-id-setup"),
    (change("interfaces", [iface(1, mac="00:00:00:00:00:01")]), "bad", "addresses", "same hardware address"),
    (change("interfaces", [iface(1), iface(5, name="eth1")]), "slow", "addresses", "arp_filter"),
    (change("interfaces", [iface(1, wireless=True, power_save=True)]), "slow", "links", "power_save off"),
    (change("interfaces", [iface(1), iface(2, wireless=True, power_save=True, name="wlan0", addresses=[])]),
     "note", "links", "power_save off"),
    (change("cpu.quota", 0.5), "slow", "cpu", "may use 0.5 of 4 cores"),
    (change("cpu.throttled", 0.25), "slow", "cpu", "was throttled in 25% of its periods"),
    (change("cpu.cores", 1), "slow", "cpu", "may use 1 of 4 cores"),
    (change("cpu", {**HEALTHY["cpu"], "cores": 1, "all_cores": 1}), "slow", "cpu", "docs/unequal.md"),
    (change("own_name", "10.9.9.9"), "slow", "addresses", "its /etc/hosts"),
    (change("cpu.power_mode", "MODE_15W"), "slow", "cpu", "sudo nvpmodel -m 0"),
    (change("cpu.hottest", 91.0), "slow", "cpu", "91 °C"),
    (change("cpu.load", 7.0), "note", "cpu", "load 7.0"),
    (change("threads", {"OMP_NUM_THREADS": "8"}), "slow", "cpu", "OMP_NUM_THREADS=8"),
    (change("memory.available", 1 << 20), "bad", "memory", "1 MB of memory"),
    (change("memory", {"available": 1 << 33, "swap": 1 << 30, "swap_free": 1}), "slow", "memory", "swapped"),
    (change("disks", {"/dev/shm": 1 << 20}), "bad", "memory", "--shm-size"),
    (change("disks", {"/tmp": 0}), "bad", "memory", "/tmp has 0 MB"),
    (change("limits.nofile", 64), "bad", "limits", "ulimit -n"),
    (lambda found: found.ahead_s.update({1: (-61.0, 0.1)}), "slow", "software", "61 s behind that of a"),
    (lambda found: found.unheard.update({1: "--iface 'x' matches none"}), "bad", "addresses", "matches none"),
    (lambda found: found.problems.__setitem__(1, "b: no key"), "bad", "login", "no key"),
    (lambda found: found.noises.__setitem__(1, "Welcome\n"), "slow", "login", ".bashrc"),
    (lambda found: found.noises.__setitem__(1, "\n"), "slow", "login", ".bashrc"),
    (lambda found: found.starts_s.__setitem__(1, 4.2), "slow", "login", "took 4.2 s"),
    (lambda found: found.slots.__setitem__(1, 5), "slow", "cpu", "-H b:4"),
    (at_speed(None), "bad", "links", "a stream does not"),
    (at_speed(11e6), "slow", "links", "the other direction"),
    (at_speed(55e6), "slow", "links", "claim 1000 Mbit/s"),
    (at_speed(12e6, 12e6), "slow", "links", "by eth0 to eth0: 12.0 MB/s"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "level", "check", "words"), CASES, ids=[case[3] for case in CASES])
def test_each_fault_is_named_with_its_remedy(
    make: Callable[[Examination], None], level: str, check: str, words: str
) -> None:
    found = examination()
    make(found)
    rows = [row for row in all_findings(found) if words in f"{row.text} {row.remedy}"]
    assert rows and {(row.level, row.check) for row in rows} == {(level, check)}
    text = " ".join(as_text(found, rows).split())
    assert words in text or words.split()[0] in text
    marks = as_text(found, rows).splitlines()[2].split()[1:]
    assert level in marks or level == "note" and set(marks) == {"ok"}
    data = json.loads(as_json(found, rows))
    assert bool(data["notes"]) == (level == "note") and bool(data["problems"]) == (level != "note")


def test_a_slow_login_of_a_busy_host_is_no_fault_of_its_login_shell() -> None:
    found = examination()
    found.starts_s[:] = [9.0, 4.2]  # the first is this machine, on which there is no login
    assert [(row.level, row.hosts) for row in all_findings(found)] == [("slow", (1,))]
    change("cpu.waited", 0.6)(found)
    (row,) = all_findings(found)
    assert row.level == "note" and "wait for its processors for 60% of their time" in row.text


def test_ptrace_matters_with_several_ranks_only() -> None:
    found = examination()
    change("limits", {"nofile": 1024, "ptrace_scope": 1})(found)
    assert all_findings(found) == []
    found.slots[1] = 2
    assert [row.check for row in all_findings(found)] == ["limits"]


@pytest.mark.parametrize(("local", "level"), [(1, "bad"), (0, "note"), (-1, "note")])
def test_one_direction_that_is_closed(local: int, level: str) -> None:
    """A job needs one direction between two hosts, and both to this machine: its rendezvous is here."""
    found = examination()._replace(local=local)
    found.tried[0, 1][0] = attempt(0, why="no answer within 3 s", too_slow=True, local="", local_iface="?")
    found.routes[0, 1] = found.routes[0, 1]._replace(chosen=attempt(1))
    (row,) = all_findings(found)
    assert row.text.startswith("a does not reach b: 10.0.0.2 (eth0): 'no answer within 3 s'; ")
    assert row.level == level and ("for its rendezvous" in row.text) == (level == "bad")
    assert ("b reaches a" in row.text) == (level == "note")
    assert row.remedy.endswith("sudo ufw allow from 10.0.0.0/24") == (level == "bad")


def unreached(**changes: Any) -> Examination:
    """Two hosts that do not reach each other."""
    found = examination()
    found.routes.clear()
    found.tried[0, 1][:] = [attempt(number, local="", local_iface="?", **changes) for number in range(2)]
    return found


@pytest.mark.parametrize("changes", [{"why": "connection refused"}, {"why": "x", "too_slow": True}])
def test_a_firewall_between_all(changes: Dict[str, Any]) -> None:
    """Its remedy names the network that the hosts have in common, not that of their containers."""
    found = unreached(**changes)
    docker = attempt(0, address="172.17.0.1", remote_iface="docker0", kind="virtual", **changes)
    found.tried[0, 1].insert(0, docker._replace(local="", local_iface="?"))
    for number in range(2):
        found.facts[number]["interfaces"].insert(  # type: ignore[index]
            0, iface(number, name="docker0", mac=f"2:{number}", addresses=[[f"172.17.0.{1 + number}", 16]])
        )
    rows = all_findings(found)
    assert [row.hosts for row in rows] == [(0, 1), (1, 0)] and {row.level for row in rows} == {"bad"}
    assert rows[0].remedy == "open the firewall of b for the other hosts: sudo ufw allow from 10.0.0.0/24"
    assert "no connection" in as_text(found, rows)


def test_hosts_without_a_network_in_common() -> None:
    found = unreached(why="connection refused")
    change("interfaces", [iface(1, addresses=[["10.0.0.2", 32]])])(found)
    assert all("they have no network in common" in row.remedy for row in all_findings(found))


def test_one_machine_under_two_names() -> None:
    found = examination()
    found.facts[1] = copy.deepcopy(found.facts[0])
    (row,) = all_findings(found)
    assert (row.level, row.check, row.hosts) == ("bad", "addresses", (0, 1))
    assert "a, b are one machine, which calls itself a" in row.text and "getent hosts a b" in row.remedy


def test_an_address_of_two_hosts_and_one_without_hardware_address() -> None:
    found = examination()
    both = iface(1, mac="", addresses=[["10.0.0.1", 24]])
    change("interfaces", [both, iface(3, name="lo", mac="00:00:00:00:00:00", addresses=[])])(found)
    change("machine_id", "")(found)
    (row,) = [row for row in all_findings(found) if row.check == "addresses"]
    assert "10.0.0.1" in row.text and row.hosts == (0, 1)


@pytest.mark.parametrize("why", ["network is unreachable", "no route to host"])
def test_a_network_that_is_missing(why: str) -> None:
    rows = all_findings(unreached(why=why))
    assert rows and all(why in row.text for row in rows)
    assert all(row.remedy.startswith("connect both to one network") for row in rows)


@pytest.mark.parametrize("changes", [{"speed_mbit": None}, {"virtual": True}, {"name": "eth7"}])
def test_a_rate_is_compared_with_the_one_that_both_interfaces_claim(changes: Dict[str, Any]) -> None:
    found = examination()
    change("interfaces", [iface(1, **changes)])(found)
    at_speed(55e6, 55e6)(found)
    assert all_findings(found) == []


def test_more_than_enough_is_not_compared() -> None:
    found = examination()
    at_speed(130e6, 9e9)(found)
    assert all_findings(found) == []
