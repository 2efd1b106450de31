"""The doctor's program of a host, in this process: it listens, dials and measures as a rank of a job does."""

from __future__ import annotations

import io
import json
import os
import socket
import sys
from typing import Any, Dict, Iterator, List

import pytest

from ringcomm.errors import ConfigError
from ringcomm.transport.nics import WIRED, Interface
from ringcomm.transport.reactor import Reactor
from ringrun.doctor import probe as module
from ringrun.doctor.probe import MARKER, Commands
from tests.support.service import turn_until

LISTEN = {
    "do": "listen", "key": "6b" * 32, "job": "doctor", "certificate": "", "iface": "",
}  # fmt: skip
ADDRESSES = ("127.0.0.1", "127.0.0.2")


class Programs:
    """Programs of several hosts, which one reactor drives, and what they have answered."""

    def __init__(self) -> None:
        self.reactor = Reactor()
        self.made: List[Commands] = []
        self.answers: List[Any] = []

    def ask(self, number: int, **command: Any) -> Any:
        """A program's answer."""
        while len(self.made) <= number:
            self.made.append(Commands())
            self.made[-1]._reactor.close()
            self.made[-1]._reactor = self.reactor
        self.made[number]._execute(command)
        turn_until(self.reactor, lambda: bool(self.answers))
        return self.answers.pop()

    def close(self) -> None:
        for item in self.made:
            if item._setup is not None:
                item._setup.close()
        self.reactor.close()


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Programs]:
    made = Programs()
    monkeypatch.setattr(module, "answer", made.answers.append)
    eth = [Interface(f"eth{number}", address, WIRED, 8) for number, address in enumerate(ADDRESSES)]
    monkeypatch.setattr(module, "own_addresses", lambda iface: [x for x in eth if iface in ("", x.name)])
    yield made
    made.close()


def listen(programs: Programs, rank: int, **changes: Any) -> Dict[str, Any]:
    """The target that another program dials."""
    found = programs.ask(rank, **{**LISTEN, "rank": rank, **changes})
    return {"rank": rank, "addresses": found["addresses"], "machine": found["machine"]}


def test_hosts_find_and_measure_each_other(programs: Programs) -> None:
    target = [listen(programs, rank) for rank in range(2)][1]
    attempts = programs.ask(0, do="probe", targets=[target], within_s=30.0)
    assert [(row["target"], row["address"], row["why"]) for row in attempts] == [
        (1, address, "") for address in ADDRESSES
    ]
    pairs = [{"rank": 1, "wires": target["addresses"]}]
    speeds = programs.ask(0, do="measure", pairs=pairs)
    assert [row["address"] for row in speeds] == list(ADDRESSES)
    assert all(min(row["there_mb_per_s"], row["back_mb_per_s"]) == row["mb_per_s"] > 0.0 for row in speeds)


def test_interfaces_are_selected_as_for_a_job(
    programs: Programs, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = [listen(programs, rank, iface="eth1") for rank in range(2)][1]
    assert [item["address"] for item in target["addresses"]] == [ADDRESSES[1]]

    def refuse(iface: str) -> List[Interface]:
        raise ConfigError("--iface 'x' matches none")

    monkeypatch.setattr(module, "own_addresses", refuse)
    assert programs.ask(2, **LISTEN, rank=2) == {"problem": "--iface 'x' matches none"}


def test_commands_are_answered_line_by_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """The program is run in this process, with a pipe as its stdin."""
    reader, writer = os.pipe()
    commands: List[Dict[str, Any]] = [
        {"do": "facts", "cwd": "~"}, {**LISTEN, "rank": 0, "iface": "lo"},
        {"do": "probe", "targets": [], "within_s": 1.0}, {"do": "measure", "pairs": []},
    ]  # fmt: skip
    os.write(writer, b"".join(json.dumps(command).encode() + b"\n" for command in commands))
    os.close(writer)
    out = io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(module, "STDIN", reader)
    module.main()
    os.close(reader)
    first, marker, facts, listening, *answers = out.getvalue().splitlines()
    assert (first, marker) == ("", MARKER)
    assert json.loads(facts)["python"] and answers == ["[]", "[]"]
    ports = [item["port"] for item in json.loads(listening)["addresses"]]
    assert ports
    with pytest.raises(OSError, match="refused"):  # it has ended, and listens no more
        socket.create_connection(("127.0.0.1", ports[0]), 30.0)
