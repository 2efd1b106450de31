from __future__ import annotations

import copy
import json
from types import SimpleNamespace
from typing import Any, Callable, Dict, List

import pytest

from ringcomm.transport.nics import Attempt
from ringrun.doctor.report import Examination, Route, all_findings, as_json, as_text

HEALTHY: Dict[str, Any] = {
    "hostname": "a", "python": "3.11.7", "executable": "/v/python",
    "packages": {"numpy": "1.26.4", "psutil": "6.0", "torch": "2.3.0"},
    "cpu": {"cores": 4, "all_cores": 4, "quota": None, "power_mode": None}, "memory_bytes": 4 << 30,
    "disks": {"/job": 9 << 30, "/tmp": 9 << 30, "/dev/shm": 1 << 30}, "cwd_exists": True, "files": 1024,
}  # fmt: skip


def iface(number: int, **changes: Any) -> Dict[str, Any]:
    mac, address = f"00:00:00:00:00:0{number + 1}", f"10.0.0.{number + 1}"
    return {"name": "eth0", "mac": mac, "addresses": [[address, 24]], **changes}


def attempt(source: int, **changes: Any) -> Attempt:
    """A host has dialled the other one."""
    made = Attempt(
        source, 1 - source, f"10.0.0.{2 - source}", 7, f"10.0.0.{source + 1}", "eth0", "eth0", "wired", ""
    )
    return made._replace(**changes)


def host(index: int, name: str) -> Any:
    planned = SimpleNamespace(used=1)
    return SimpleNamespace(index=index, name=name, planned=planned, is_local=index == 0, gets_code=False)


def examination() -> Examination:
    """Two healthy hosts."""
    facts: List[Any] = []
    for number in range(2):
        own = copy.deepcopy(HEALTHY)
        facts.append({**own, "machine_id": f"id{number}", "interfaces": [iface(number)]})
    tried = {(0, 1): [attempt(0), attempt(1)]}
    routes = {(0, 1): Route(attempt(0), {(0, 1): 117.0, (1, 0): 116.0})}
    job: Any = SimpleNamespace(hosts=[host(0, "a"), host(1, "b")], tree=None, provision=False)
    return Examination(job, ["", ""], ["", ""], facts, {}, tried, routes)


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
            facts = facts[name]
        facts[last] = value

    return apply


def test_what_the_options_of_the_job_solve_is_no_problem() -> None:
    found = examination()
    change("cwd_exists", False)(found)
    change("packages", {"torch": "2.3.0"})(found)
    assert len(all_findings(found)) == 2
    job: Any = found.job
    job.tree, job.provision, job.hosts[1].gets_code = object(), True, True
    assert all_findings(found) == []


CASES = [
    (change("cwd_exists", False), "bad", "software", "--ship"),
    (change("packages", {"psutil": "6"}), "bad", "software", "--provision"),
    (change("packages", {"numpy": "1.26.0", "psutil": "6"}), "slow", "software", "install torch there"),
    (change("packages", {"numpy": "1.26", "psutil": "6", "torch": "2.1"}), "slow", "software", "b 2.1"),
    (change("machine_id", "id0"), "slow", "addresses", "systemd-machine-id-setup"),
    (change("interfaces", [iface(1, mac="00:00:00:00:00:01")]), "bad", "addresses", "same hardware address"),
    (change("interfaces", [iface(1), iface(5, name="eth1")]), "slow", "addresses", "arp_filter"),
    (change("interfaces", []), "bad", "addresses", "ip address"),
    (change("cpu.quota", 0.5), "slow", "cpu", "may use 0.5 of 4 cores"),
    (change("cpu.cores", 1), "slow", "cpu", "may use 1 of 4 cores"),
    (change("cpu.power_mode", "MODE_15W"), "slow", "cpu", "sudo nvpmodel -m 0"),
    (change("memory_bytes", 1 << 20), "bad", "memory", "1 MB of memory"),
    (change("disks", {"/dev/shm": 1 << 20}), "bad", "memory", "--shm-size"),
    (change("disks", {"/tmp": 0}), "bad", "memory", "/tmp has 0 MB"),
    (change("files", 64), "bad", "limits", "ulimit -n"),
    (lambda found: found.unheard.update({1: "--iface 'x' matches none"}), "bad", "addresses", "matches none"),
    (lambda found: found.problems.__setitem__(1, "b: no key"), "bad", "login", "no key"),
    (lambda found: found.noises.__setitem__(1, "Welcome\n"), "slow", "login", ".bashrc"),
    (lambda found: setattr(found.job.hosts[1].planned, "used", 5), "slow", "cpu", "-H b:4"),
    (lambda found: found.routes[0, 1].speeds.update({(0, 1): 0.0}), "bad", "links", "a stream does not"),
    (lambda found: found.routes[0, 1].speeds.update({(0, 1): 12.0}), "slow", "links", "eth0 to eth0: 12.0"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "level", "check", "words"), CASES, ids=[case[3] for case in CASES])
def test_each_fault_is_named_with_its_remedy(
    make: Callable[[Examination], None], level: str, check: str, words: str
) -> None:
    found = examination()
    make(found)
    rows = [row for row in all_findings(found) if words in f"{row.text} {row.remedy}"]
    assert rows and {(row.level, row.check) for row in rows} == {(level, check)}
    assert words.split()[0] in as_text(found, rows)
    assert level in as_text(found, rows).splitlines()[2].split()[1:]
    assert len(json.loads(as_json(found, rows))["problems"]) == len(rows)


@pytest.mark.parametrize(("local", "level"), [(1, "bad"), (0, "note"), (-1, "note")])
def test_one_direction_that_is_closed(local: int, level: str) -> None:
    """A job needs one direction between two hosts, and both to this machine: its rendezvous is here."""
    found = examination()
    for item in found.job.hosts:
        item.is_local = item.index == local  # type: ignore[misc]
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
    rows = all_findings(unreached(why="network is unreachable"))
    assert rows and all(row.remedy.startswith("connect both to one network") for row in rows)


def test_one_machine_under_two_names() -> None:
    found = examination()
    found.facts[1] = copy.deepcopy(found.facts[0])
    (row,) = all_findings(found)
    assert (row.level, row.check, row.hosts) == ("bad", "addresses", (0, 1))
    assert "a, b are one machine, which calls itself a" in row.text and "getent hosts a b" in row.remedy


def test_an_address_of_two_hosts_and_one_without_hardware_address() -> None:
    found = examination()
    both = iface(1, mac="", addresses=[["10.0.0.1", 24]])
    change("interfaces", [both, iface(3, name="tun0", mac="00:00:00:00:00:00", addresses=[])])(found)
    change("machine_id", "")(found)
    (row,) = [row for row in all_findings(found) if row.check == "addresses"]
    assert "10.0.0.1" in row.text and row.hosts == (0, 1)
