from __future__ import annotations

import copy
import json
from typing import Any, Callable, Dict, List, Tuple

import pytest

from ringrun.doctor.findings import all_findings
from ringrun.doctor.hosts import STREAMS_S, Dialled, Examination, rounds, stream_s
from ringrun.doctor.report import as_json, as_text

HEALTHY: Dict[str, Any] = {
    "hostname": "a", "own_name": "127.0.1.1", "python": "3.11.7", "executable": "/v/python",
    "packages": {"numpy": "1.26.4", "psutil": "6.0", "torch": "2.3.0"},
    "cpu": {
        "cores": 4, "all_cores": 4, "quota": None, "throttled": 0.0, "governor": "schedutil", "mhz": [2, 2],
        "hottest": 50.0, "load": 0.1, "power_mode": None,
    },
    "memory": {"total": 8 << 30, "available": 4 << 30, "swap": 0, "swap_free": 0},
    "disks": {"/job": 9 << 30, "/tmp": 9 << 30, "/dev/shm": 1 << 30}, "cwd_exists": True,
    "limits": {"nofile": 1024, "ptrace_scope": 0}, "threads": {}, "time_s": 0.0,
}  # fmt: skip


def iface(number: int, **changes: Any) -> Dict[str, Any]:
    return {
        "name": "eth0", "mtu": 1500, "mac": f"00:00:00:00:00:0{number + 1}", "speed_mbit": 1000,
        "duplex": "full", "wireless": False, "virtual": False, "power_save": None,
        "addresses": [[f"10.0.0.{number + 1}", 24]], **changes,
    }  # fmt: skip


def examination() -> Examination:
    """Two healthy hosts."""
    facts: List[Any] = []
    for number in range(2):
        own = copy.deepcopy(HEALTHY)
        facts.append({**own, "machine_id": f"id{number}", "interfaces": [iface(number)]})
    dialled = [
        Dialled(source, 1 - source, f"10.0.0.{2 - source}", "eth0", {
            "answered": 1 - source, "source": f"10.0.0.{source + 1}", "rtt_ms": [0.2] * 30, "skew_s": 0.01,
            "datagrams": [True, True],
        })
        for source in range(2)
    ]  # fmt: skip
    speeds: Dict[Tuple[int, int], Any] = {(0, 1): 117e6, (1, 0): 116e6}
    return Examination(["a", "b"], [1, 1], ["", ""], ["", ""], [0.2, 0.3], facts, dialled, speeds)


def test_healthy_hosts_have_no_problem() -> None:
    found = examination()
    assert all_findings(found) == []
    text = as_text(found, [])
    assert "No problem found." in text and "0.20 ms, 117 MB/s" in text
    assert json.loads(as_json(found, []))["problems"] == []


def change(path: str, value: Any) -> Callable[[Examination], None]:
    """Sets one fact of host b."""

    def apply(found: Examination) -> None:
        facts: Any = found.facts[1]
        *way, last = path.split(".")
        for name in way:
            facts = facts[int(name) if name.isdigit() else name]
        facts[last] = value

    return apply


def dial(row: int, **changes: Any) -> Callable[[Examination], None]:
    return lambda found: found.dialled[row].result.update(changes)


CASES = [
    (change("cwd_exists", False), "bad", "software", "--ship"),
    (change("packages", {"psutil": "6"}), "bad", "software", "--provision"),
    (change("packages", {"numpy": "1.26.0", "psutil": "6"}), "slow", "software", "install torch there"),
    (change("packages", {"numpy": "1.26", "psutil": "6", "torch": "2.1"}), "slow", "software", "b 2.1"),
    (change("machine_id", "id0"), "slow", "addresses", "systemd-machine-id-setup"),
    (change("interfaces", [iface(1, mac="00:00:00:00:00:01")]), "bad", "addresses", "same hardware address"),
    (change("interfaces", [iface(1), iface(5, name="eth1")]), "slow", "addresses", "arp_filter"),
    (change("interfaces", [iface(1), iface(2, wireless=True, power_save=True, name="wlan0", addresses=[])]),
     "slow", "links", "power_save off"),
    (change("cpu.quota", 0.5), "slow", "cpu", "may use 0.5 of 4 cores"),
    (change("cpu.throttled", 0.25), "slow", "cpu", "was throttled in 25% of its periods"),
    (change("cpu.cores", 1), "slow", "cpu", "may use 1 of 4 cores"),
    (change("cpu", {**HEALTHY["cpu"], "cores": 1, "all_cores": 1}), "slow", "cpu", "docs/unequal.md"),
    (change("own_name", "10.9.9.9"), "slow", "addresses", "its /etc/hosts"),
    (change("cpu.power_mode", "MODE_15W"), "slow", "cpu", "sudo nvpmodel -m 0"),
    (change("cpu.hottest", 91.0), "slow", "cpu", "91 °C"),
    (change("cpu.load", 7.0), "slow", "cpu", "load 7.0"),
    (change("threads", {"OMP_NUM_THREADS": "8"}), "slow", "cpu", "OMP_NUM_THREADS=8"),
    (change("memory.available", 1 << 20), "bad", "memory", "1 MB of memory"),
    (change("memory", {"available": 1 << 33, "swap": 1 << 30, "swap_free": 1}), "slow", "memory", "swapped"),
    (change("disks", {"/dev/shm": 1 << 20}), "bad", "memory", "--shm-size"),
    (change("disks", {"/tmp": 0}), "bad", "memory", "/tmp has 0 MB"),
    (change("limits.nofile", 64), "bad", "limits", "ulimit -n"),
    (dial(0, skew_s=-61.0), "slow", "software", "61 s behind that of a"),
    (dial(0, datagrams=[True, False]), "bad", "network", "MTU differs"),
    (lambda found: found.problems.__setitem__(1, "b: no key"), "bad", "login", "no key"),
    (lambda found: found.noises.__setitem__(1, "Welcome\n"), "slow", "login", ".bashrc"),
    (lambda found: found.starts_s.__setitem__(1, 4.2), "slow", "login", "took 4.2 s"),
    (lambda found: found.slots.__setitem__(1, 5), "slow", "cpu", "-H b:4"),
    (lambda found: found.speeds.update({(0, 1): None}), "bad", "links", "a stream does not"),
    (lambda found: found.speeds.update({(0, 1): 11e6}), "slow", "links", "the other direction"),
    (lambda found: found.speeds.update({(0, 1): 55e6}), "slow", "links", "claim 1000 Mbit/s"),
    (lambda found: found.speeds.update({(0, 1): 12e6, (1, 0): 12e6}), "slow", "links", "12.0 MB/s"),
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
    assert level in marks


def test_ptrace_matters_with_several_ranks_only() -> None:
    found = examination()
    change("limits", {"nofile": 1024, "ptrace_scope": 1})(found)
    assert all_findings(found) == []
    found.slots[1] = 2
    assert [row.check for row in all_findings(found)] == ["limits"]


@pytest.mark.parametrize(
    ("error", "words"), [("timeout", "no answer"), ("ECONNREFUSED", "refused"), ("EHOSTUNREACH", "no route")]
)
def test_one_direction_that_is_closed(error: str, words: str) -> None:
    found = examination()
    found.dialled[0] = found.dialled[0]._replace(result={"error": error})
    del found.speeds[0, 1]
    (row,) = all_findings(found)
    assert row.text == f"a does not reach b: 10.0.0.2 (eth0): {words}; b reaches a"
    assert row.remedy.endswith("sudo ufw allow from 10.0.0.0/24")
    assert "no connection" in as_text(found, [row])


def test_an_address_that_leads_elsewhere() -> None:
    found = examination()
    result = {"answered": 0, "rtt_ms": [1]}
    wrong = found.dialled[0]._replace(address="172.17.0.1", iface="br0", result=result)
    found.dialled.append(wrong)
    (row,) = all_findings(found)
    assert "172.17.0.1 of b (br0) leads a to a" in row.text and "--iface b='!br0'" in row.remedy


@pytest.mark.parametrize("count", range(1, 9))
def test_rounds_measure_every_ordered_pair_once_and_no_host_twice_at_a_time(count: int) -> None:
    some = list(rounds(count))
    pairs = [pair for each in some for pair in each]
    assert sorted(pairs) == [(a, b) for a in range(count) for b in range(count) if a != b]
    assert all(len({host for pair in each for host in pair}) == 2 * len(each) for each in some)


@pytest.mark.parametrize("count", [1, 2, 3, 8, 16])
def test_streams_between_all_hosts_take_a_bounded_time(count: int) -> None:
    number = len(list(rounds(count)))
    assert 0.1 <= stream_s(number) <= 0.35 and number * stream_s(number) <= STREAMS_S + 1e-9


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


def test_a_wifi_that_sometimes_answers_late() -> None:
    trips = [2.0] * 29 + [300.0]
    for changes, count in (({"wireless": True}, 1), ({"wireless": True, "power_save": True}, 0), ({}, 0)):
        found = examination()
        change("interfaces", [iface(1, **changes)])(found)
        dial(0, rtt_ms=trips)(found)
        rows = [row for row in all_findings(found) if "sometimes 300" in row.text]
        assert len(rows) == count
        if rows:
            assert rows[0].remedy.startswith("switch off the power saving of Wi-Fi")


@pytest.mark.parametrize(("error", "words"), [("ENETUNREACH", "no network"), ("EHOSTDOWN", "EHOSTDOWN")])
def test_a_network_that_is_missing(error: str, words: str) -> None:
    found = examination()
    for number in range(2):
        found.dialled[number] = found.dialled[number]._replace(result={"error": error})
    found.speeds.clear()
    rows = all_findings(found)
    assert rows and all(words in row.text for row in rows)
    assert all(row.remedy.startswith("connect both to one network") for row in rows)


def test_a_rate_is_compared_with_the_one_that_both_interfaces_claim() -> None:
    found = examination()
    change("interfaces", [iface(1, speed_mbit=None)])(found)
    found.speeds.update({(0, 1): 55e6, (1, 0): 55e6})
    assert not [row for row in all_findings(found) if "claim" in row.text]
    found = examination()
    found.dialled.clear()
    found.speeds.update({(0, 1): 55e6, (1, 0): 55e6})
    assert not [row for row in all_findings(found) if "claim" in row.text]
