"""`ringrun doctor` without ssh: its program on this machine, reached by a command for each of two names."""

from __future__ import annotations

import errno
import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, Dict, Iterator, List

import pytest

from ringrun.doctor import probe as program
from ringrun.doctor.hosts import HostProbe, examine
from ringrun.job.launch import Options, prepare
from ringrun.plan.job import HostJob
from tests.proc.test_ringrun_support import LIMIT_S

VIA = "env NAME={host}"
TOKEN = "0123456789abcdef" * 2


def doctor(*words: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "ringrun", "doctor", *words]
    return subprocess.run(argv, capture_output=True, text=True, timeout=2 * LIMIT_S, check=False)


def hosts_of(names: str, via: str) -> List[HostJob]:
    return list(prepare(Options(hosts=names, via=via, ship_self=False), ["true"]).hosts)


@pytest.fixture
def probe() -> Iterator[HostProbe]:
    """The program of one host, which has started."""
    (host,) = hosts_of("a", VIA)
    made = HostProbe(host)
    made.start()
    assert made.problem == "" and made.start_s > 0.0
    yield made
    made.end()


def listen(probe: HostProbe) -> Dict[str, Any]:
    answer: Dict[str, Any] = probe.ask(do="listen", token=TOKEN, index=3)
    return answer


def target(at: Dict[str, Any], address: str = "127.0.0.1", **changes: Any) -> Dict[str, Any]:
    return {"host": 0, "address": address, "port": at["ports"][0], "datagram_port": at["datagram_port"],
            "mtu": 1500, **changes}  # fmt: skip


def test_two_names_of_this_machine_are_found_out() -> None:
    found = doctor("-H", "a,b", "--via", VIA)
    assert found.returncode == 1, found.stderr
    text = " ".join(found.stdout.split())
    assert "a, b are one machine" in text and "Examined 2 hosts in" in text


def test_everything_as_data() -> None:
    found = json.loads(doctor("-H", "a,b", "--via", VIA, "--json").stdout)
    assert [host["name"] for host in found["hosts"]] == ["a", "b"]
    assert "are one machine" in json.dumps(found["problems"])


@pytest.mark.parametrize(
    ("words", "text"),
    [(["-H", "a,,b"], "one comma too many"), (["-H", "a", "--via", "docker"], "{host}"), (["x"], "Usage")],
)
def test_a_command_line_that_cannot_be_used(words: List[str], text: str) -> None:
    found = doctor(*words)
    assert found.returncode == 2 and text in found.stderr and not found.stdout


def test_hosts_that_do_not_answer(tmp_path: Path) -> None:
    script = tmp_path / "reach"
    script.write_text('#!/bin/sh\necho Welcome\ncase "$1" in bad) exit 1;; esac\nshift\nexec "$@"\n')
    script.chmod(0o755)
    found = examine(hosts_of("good,bad", f"{script} {{host}}"))
    assert found.problems[0] == "" and "ended with status 1" in found.problems[1]
    assert found.noises[0] == "Welcome" and found.facts[0] is not None and found.facts[1] is None
    assert {row.target for row in found.dialled} <= {0}
    (lost,) = examine(hosts_of("a", "/no/such/program {host}")).problems
    assert "cannot be started: No such file or directory" in lost


def test_peers_are_dialled_on_every_address(probe: HostProbe) -> None:
    at = listen(probe)
    with socket.create_server(("127.0.0.1", 0)) as silent, socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # and does not listen
        targets = [
            target(at), target(at, "::1") if socket.has_ipv6 else target(at),
            target(at, port=closed.getsockname()[1]), target(at, port=silent.getsockname()[1]),
            target(at, mtu=None),
        ]  # fmt: skip
        for _ in range(10):  # on a busy machine an answer may come too late
            found, other, refused, unanswered, without_mtu = probe.ask(do="dial", targets=targets)
            if found.get("datagrams") == [True, True] and "datagrams" in without_mtu:
                break
    assert (found["answered"], found["source"], found["datagrams"]) == (3, "127.0.0.1", [True, True])
    assert len(found["rtt_ms"]) == 30 and found["rtt_ms"] == sorted(found["rtt_ms"])
    assert abs(found["skew_s"]) < 1.0, "one clock"
    assert other.get("answered", 3) == 3
    assert refused == {"error": "ECONNREFUSED"} and unanswered == {"error": "timeout"}
    assert without_mtu["datagrams"] is None


def test_a_stream_is_measured(probe: HostProbe) -> None:
    at = listen(probe)
    found = probe.ask(do="stream", target=target(at), seconds=0.05)
    assert found["bytes"] > 0 and found["bytes_per_s"] > 0
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        there = target(at, port=closed.getsockname()[1])
        assert probe.ask(do="stream", target=there, seconds=0.05) == {"error": "ECONNREFUSED"}


def test_peers_without_the_token_are_not_served(probe: HostProbe) -> None:
    at = listen(probe)
    for sent in (b"0" * 16, b"short"):
        with socket.create_connection(("127.0.0.1", at["ports"][0]), LIMIT_S) as link:
            link.sendall(sent)
            link.shutdown(socket.SHUT_WR)
            assert link.recv(1) == b""
    with socket.create_connection(("127.0.0.1", at["ports"][0]), LIMIT_S) as link:
        link.sendall(bytes.fromhex(TOKEN) + b"?")  # no command
        assert link.recv(1) == b"\x03" and link.recv(1) == b""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as link:
        link.settimeout(LIMIT_S)
        for data in (b"0" * 40, bytes.fromhex(TOKEN) + b"x" * 40):
            link.sendto(data, ("127.0.0.1", at["datagram_port"]))
        assert link.recv(100) == bytes.fromhex(TOKEN) + b"x" * 16, "the first was not answered"


def test_a_program_that_stops_answering_is_ended(probe: HostProbe) -> None:
    assert probe.ask(do="nothing") is None
    assert probe.problem == "a: it stopped answering (nothing)."
    assert probe.ask(do="facts", cwd=".") is None


def test_without_ipv6_it_listens_on_the_addresses_that_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    made = socket.socket

    def refuse(family: int = -1, *more: int) -> socket.socket:
        if family == socket.AF_INET6:
            raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")
        return made(family, *more)

    with monkeypatch.context() as patched:
        patched.setattr(program.socket, "socket", refuse)
        with program._listener(socket.SOCK_STREAM) as found:
            assert found.family == socket.AF_INET and found.getsockname()[1] > 0
    with monkeypatch.context() as patched:
        patched.setattr(program.socket, "has_ipv6", False)
        with program._listener(socket.SOCK_DGRAM) as found:
            assert found.family == socket.AF_INET


def test_a_datagram_that_does_not_fit_or_comes_back_changed() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as peer:
        peer.bind(("127.0.0.1", 0))
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(peer.getsockname())
            assert not program._comes_back(probe, bytes(1 << 17)), "larger than any datagram"
            for _ in range(3):
                peer.sendto(b"of another run", probe.getsockname())
            assert not program._comes_back(probe, b"x" * 40)
        closed = peer.getsockname()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(closed)  # no program is there
        assert not program._comes_back(probe, b"x" * 40)


def test_a_stream_that_ends_early() -> None:
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            theirs.sendall(b"abc")
        with pytest.raises(ConnectionResetError):
            program.read_exactly(ours, 4)
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            theirs.sendall(bytes(1000))
        assert program._drain(ours)[0] == 1000
