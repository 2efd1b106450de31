"""Examinations: which commands the hosts' programs get, and what becomes of their answers."""

from __future__ import annotations

import ast
import json
import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Dict, List, Optional, Tuple

import pytest

from ringcomm.transport.nics import Attempt
from ringrun.doctor import network as module
from ringrun.doctor.hosts import FORMS
from ringrun.doctor.network import MEASUREMENTS, Examination, examine
from ringrun.job.launch import prepare
from ringrun.plan.job import Job
from ringrun.plan.options import Options
from ringrun.reach import protocol
from ringrun.reach.incoming import decoded


def job_of(names: str, **options: Any) -> Job:
    made = Options(hosts=names, via="env NAME={host}", ship_self=False, **options)
    return prepare(made, ["true"])


def test_one_thread_alone_parses_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before 3.11.8, Python 3.11 reports a SystemError if several do."""
    threads = []

    def parse(*given: Any) -> ast.Module:
        threads.append(threading.current_thread())
        return ast.parse(*given)

    monkeypatch.setattr(protocol, "ast", SimpleNamespace(**{**vars(ast), "parse": parse}))
    protocol.program_source.cache_clear()
    protocol.modules_of.cache_clear()
    job = job_of("a,b,c")
    examine(replace(job, hosts=tuple(replace(host, argv=("sh", "-c", "exit 1")) for host in job.hosts)))
    assert set(threads) == {threading.current_thread()}


class Host:
    """Replaces a host's program. Its interface eth0 is in 10.0.0.0/24, wlan0 in 10.1.0.0/24. `open` are its
    addresses that can be dialled; `speeds` those of the wires that lead to it, in MB/s, by interface.
    """

    def __init__(self, number: int) -> None:
        self.number, self.asked, self.hosts = number, [], []  # type: ignore[var-annotated]
        self.problem, self.noise = "", ""
        self.addresses = {"eth0": f"10.0.0.{number + 1}", "wlan0": f"10.1.0.{number + 1}"}
        self.open = set(self.addresses)
        self.listens = True
        self.speeds: Dict[str, Tuple[float, float]] = {"eth0": (900.0, 800.0), "wlan0": (2.5, 2.0)}
        self.host: Any = None

    def start(self) -> None: ...

    def end(self) -> None: ...

    def ask(self, limit_s: float = 0.0, **command: Any) -> Any:
        self.asked.append(command)
        answer = getattr(self, command["do"])(command)
        if answer is None or command["do"] == "facts":
            return answer
        return decoded(json.dumps(answer).encode(), FORMS[command["do"]](command))

    def facts(self, _: Any) -> Any:
        rows = [{"name": name, "addresses": [[own, 24]]} for name, own in self.addresses.items()]
        return {"interfaces": rows}

    def listen(self, command: Any) -> Any:
        if not self.listens:
            return {"problem": "no interface"}
        kinds = {"eth0": "wired", "wlan0": "wireless"}
        rows = [
            {"iface": name, "address": own, "port": 7, "kind": kinds[name]}
            for name, own in self.addresses.items()
        ]
        return {"addresses": rows, "machine": str(self.number)}

    def probe(self, command: Any) -> Any:
        rows = []
        for target in command["targets"]:
            peer = self.hosts[target["rank"]]
            for offer in target["addresses"]:
                name = offer["iface"]
                works = name in peer.open and name in self.open
                rows.append(
                    Attempt(
                        self.number, peer.number, offer["address"], 7, self.addresses[name] if works else "",
                        name if works else "?", name, offer["kind"], "" if works else "no answer",
                    ).to_json()
                )  # fmt: skip
        return rows

    def measure(self, command: Any) -> Optional[List[Dict[str, Any]]]:
        rows = []
        for pair in command["pairs"]:
            for wire in pair["wires"]:
                there, back = self.hosts[pair["rank"]].speeds[wire["iface"]]
                rows.append(
                    {
                        "rank": pair["rank"], "address": wire["address"], "iface": wire["iface"],
                        "mb_per_s": min(there, back), "there_mb_per_s": there, "back_mb_per_s": back,
                    }
                )  # fmt: skip
        return rows


class Hosts:
    """Some hosts, and their examination."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
        self.all = [Host(number) for number in range(count)]
        for item in self.all:
            item.hosts = self.all
        self._job = job_of(",".join("abcdef"[:count]))
        monkeypatch.setattr(module, "HostProbe", self._made)

    def _made(self, host: Any) -> Host:
        self.all[host.index].host = host
        return self.all[host.index]

    def examine(self) -> Examination:
        return examine(self._job)

    def measured(self) -> List[List[str]]:
        """The interfaces of each measurement."""
        rows = [command for item in self.all for command in item.asked if command["do"] == "measure"]
        return [[wire["iface"] for wire in pair["wires"]] for row in rows for pair in row["pairs"]]


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> Hosts:
    return Hosts(monkeypatch, 2)


def test_the_route_is_chosen_as_a_job_chooses_and_only_that_is_measured(two: Hosts) -> None:
    found = two.examine()
    route = found.routes[0, 1]
    assert route.iface(0) == route.iface(1) == "eth0"
    assert route.speeds == {(0, 1): 900.0, (1, 0): 800.0}
    assert two.measured() == [["eth0", "wlan0"], ["eth0"]]


def test_a_wire_that_is_far_slower_than_the_radio_is_not_chosen(two: Hosts) -> None:
    two.all[1].speeds = {"eth0": (1.0, 1.0), "wlan0": (25.0, 28.0)}
    found = two.examine().routes[0, 1]
    assert found.iface(1) == "wlan0" and found.speeds == {(0, 1): 25.0, (1, 0): 28.0}
    assert two.measured()[-MEASUREMENTS:] == [["wlan0"]] * MEASUREMENTS, "a slow route is measured again"


def test_hosts_that_do_not_reach_each_other_have_no_route(two: Hosts) -> None:
    two.all[1].open = set()
    found = two.examine()
    assert found.routes == {} and {item.why for item in found.tried[0, 1]} == {"no answer"}
    assert found.common_network(0, 1, "10.0.0.2") == "10.0.0.0/24"
    assert found.common_network(0, 1, "172.17.0.1") is None


def test_a_host_that_cannot_listen_and_one_that_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = Hosts(monkeypatch, 4)
    hosts.all[1].listens = False
    monkeypatch.setattr(hosts.all[2], "ask", lambda *_, **__: None)
    found = hosts.examine()
    assert found.unheard == {1: "'no interface'"} and list(found.routes) == [(0, 3)]
    assert found.facts[2] is None
