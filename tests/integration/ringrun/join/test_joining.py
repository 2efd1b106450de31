"""Machines that join with a code, by real sockets: the way as it is meant, and attacks on it."""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import ssl
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Callable, Iterator, List, Optional, Tuple

import pytest

from ringcomm.clock import monotonic
from ringcomm.errors import AuthenticationError, ConfigError, ProtocolError
from ringcomm.storage.keys import make_certificate
from ringrun.job.launch import prepare
from ringrun.join import connection, invitation
from ringrun.join.command import _WELCOME, Guest, connect, take_part
from ringrun.join.connection import Carrier, Kind, fingerprint_of, join_with
from ringrun.join.invitation import Invitation, Joined, Machine, _check_slots, gathered
from ringrun.join.proof import (
    HELLO,
    LAUNCHERS,
    MACHINES,
    Code,
    Known,
    Proof,
    Role,
    WrongCode,
    find_known,
    forget,
    keep,
    known_names,
    new_code,
    new_key,
)
from ringrun.plan.hosts import HostSpec
from ringrun.plan.options import Options
from tests.support.service import eventually

pytest.importorskip("spake2")
LIMIT_S = 20.0


@pytest.fixture(scope="module")
def pem() -> str:
    return make_certificate()


@pytest.fixture(autouse=True)
def configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where both ends keep their keys; the variable that a machine sets when it joins is taken back."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("SSH_CONNECTION", "")
    return tmp_path / "ringcomm"


class Desk:
    """An invitation for a launcher, and what it has said."""

    def __init__(self, count: int = 1, taken: Tuple[str, ...] = (), **options: Any) -> None:
        self.lines: List[str] = []
        self.invitation = Invitation(count, "train.py", taken, self.lines.append, "lo", **options)
        self.address = "127.0.0.1", self.invitation.port

    @property
    def code(self) -> Code:
        return self.invitation.code

    def dial(self, code: Code, pem: str, name: str = "desk") -> Carrier:
        """Prove a code, and return the connection."""
        proof = Proof(Role.JOINING, code, name, fingerprint_of(pem))
        with socket.create_connection(self.address, LIMIT_S) as sock:
            return Carrier(join_with(sock, proof, pem))

    def join(
        self, pem: str, name: str = "desk", agreed: bool = True, code: Optional[Code] = None,
        keeps: bool = False,
    ) -> Tuple[Carrier, Any]:
        """Join as a user does; the connection, and what is offered."""
        carrier = self.dial(code or self.code, pem, name)
        try:
            offer = Guest(carrier, "launcher", self.lines.append).offered(1, 2)
        except ConfigError:
            carrier.close()
            raise
        carrier.tell({"agreed": agreed, "keeps": keeps, "why": "" if agreed else "its user has not agreed"})
        carrier.flush()
        if agreed:
            assert carrier.told(_WELCOME, monotonic() + LIMIT_S) == {"keeps": keeps}
        return carrier, offer

    def wait_for(self, word: str) -> str:
        assert eventually(lambda: any(word in line for line in self.lines), LIMIT_S), self.lines
        return next(line for line in self.lines if word in line)

    def close(self) -> None:
        self.invitation.close()
        for machine in list(self.invitation.machines.values()):
            machine.close()


@pytest.fixture
def desk() -> Iterator[Callable[..., Desk]]:
    with contextlib.ExitStack() as stack:

        def make(*arguments: Any, **options: Any) -> Desk:
            made = Desk(*arguments, **options)
            stack.callback(made.close)
            return made

        yield make
    assert eventually(lambda: all(thread.name != "ringrun-join" for thread in threading.enumerate()), LIMIT_S)


def wrong(code: Code) -> Code:
    return code._replace(secret=new_code(True).secret)


def is_open(address: Tuple[str, int]) -> bool:
    try:
        socket.create_connection(address, 1.0).close()
    except OSError:
        return False
    return True


def wait_until_closed(address: Tuple[str, int]) -> None:
    assert eventually(lambda: not is_open(address), LIMIT_S)


# -- as it is meant --------------------------------------------------------------------------


def test_an_agent_runs_over_the_connection(desk: Callable[..., Desk], pem: str) -> None:
    """Its streams, of more bytes than pipes hold, its status, another one after it, and the end."""
    host = desk()
    carrier, offer = host.join(pem)
    assert (offer["refused"], offer["command"], offer["again"]) == ("", "train.py", False)
    host.invitation.wait(LIMIT_S)
    host.invitation.begin()
    wait_until_closed(host.address)
    guest = Guest(carrier, "launcher", host.lines.append)
    codes: List[int] = []
    turn_round = "import sys; d = sys.stdin.buffer.read(); sys.stdout.buffer.write(d[::-1]); sys.exit(3)"
    programs = [turn_round, "print(5)"]

    class Program(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, argv: List[str]) -> None:
            pipe = subprocess.PIPE
            super().__init__([sys.executable, "-c", programs.pop(0)], 0, stdin=pipe, stdout=pipe, stderr=pipe)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ringrun.join.command.LocalProcess", Program)
        patch.setattr("signal.signal", lambda *_: None)
        thread = threading.Thread(target=lambda: codes.append(guest.run()))
        thread.start()
        way = Joined(host.invitation)
        data = os.urandom(3_000_000)
        agent = way.start(["ringrun", "join", "desk"])
        threading.Thread(target=lambda: (agent.stdin.write(data), agent.stdin.close())).start()
        parts = list(iter(lambda: agent.stdout.read(1 << 16), b""))
        assert b"".join(parts) == data[::-1] and agent.stderr.read() == b""
        assert agent.wait(LIMIT_S) == 3
        again = way.start(["ringrun", "join", "desk"])
        assert again.stdout.read() == b"5\n" and again.wait(LIMIT_S) == 0
        for process in (agent, again):
            for pipe in (process.stdin, process.stdout, process.stderr):
                pipe.close()
        host.invitation.machines["desk"].close()
        thread.join(LIMIT_S)
        carrier.close()
    assert codes == [0] and "the job is over" in host.lines
    with pytest.raises(OSError, match="connection was closed"):
        way.start(["ringrun", "join", "desk"])


def test_discovery_finds_the_launcher_of_the_code(desk: Callable[..., Desk], pem: str) -> None:
    """Two launchers in one network: the one with the other number is not dialled."""
    one, two = desk(), desk()
    if one.invitation._answerer is None or two.invitation._answerer is None:
        pytest.skip("no multicast here")
    assert one.code.label != two.code.label
    found = next(connection.find(two.code.label, LIMIT_S))
    assert found[1] == two.invitation.port
    assert not any("not joined" in line for line in one.lines + two.lines)


# -- attacks, by the numbers of the list -----------------------------------------------------


def test_1_three_wrong_codes_end_the_invitation_also_in_parallel(desk: Callable[..., Desk], pem: str) -> None:
    host = desk()

    def guess(_: int) -> Optional[type]:
        try:
            host.dial(wrong(host.code), pem)
        except (WrongCode, ProtocolError, OSError) as problem:
            return type(problem)
        return None

    with ThreadPoolExecutor(6) as pool:
        assert None not in list(pool.map(guess, range(6)))
    with pytest.raises((AuthenticationError, ProtocolError, OSError)):
        host.dial(host.code, pem)
    with pytest.raises(ConfigError, match="three wrong codes: 0 of 1 machines have joined"):
        host.invitation.wait(LIMIT_S)
    wait_until_closed(host.address)


class Between:
    """A relay that may change what each side sends; ends with either of its sides."""

    def __init__(self, target: Tuple[str, int], change: Callable[[bool, int, bytes], bytes]) -> None:
        self._target, self._change = target, change
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = self._listener.getsockname()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        with contextlib.ExitStack() as stack:
            client = stack.enter_context(stack.enter_context(self._listener).accept()[0])
            server = stack.enter_context(socket.create_connection(self._target))
            back = threading.Thread(target=self._pass, args=(server, client, False), daemon=True)
            back.start()
            self._pass(client, server, True)
            back.join(LIMIT_S)

    def _pass(self, source: socket.socket, sink: socket.socket, forth: bool) -> None:
        number = 0
        with contextlib.suppress(OSError):
            while True:
                data = source.recv(1 << 16)
                if not data:
                    break
                sink.sendall(self._change(forth, number, data))
                number += 1
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_WR)


def through(host: Desk, pem: str, change: Callable[[bool, int, bytes], bytes]) -> Exception:
    """Join through a relay; the error."""
    relay = Between(host.address, change)
    with pytest.raises((AuthenticationError, ProtocolError, OSError, ssl.SSLError)) as caught:
        Desk.dial(_at(host, relay.address), host.code, pem)
    return caught.value


def _at(host: Desk, address: Any) -> Any:
    class Moved:
        pass

    moved: Any = Moved()
    moved.address = address
    return moved


@pytest.mark.parametrize("way", ["fingerprint", "certificate", "tls", "name"])
def test_3_a_machine_in_the_middle_ends_both_sides(desk: Callable[..., Desk], pem: str, way: str) -> None:
    host, own = desk(), make_certificate()
    der = ssl.PEM_cert_to_DER_cert(own[own.index("-----BEGIN CERT") :])
    changed = {"fingerprint": (5, hashlib.sha256(der).digest()), "name": (3, b"m")}

    def change(forth: bool, number: int, data: bytes) -> bytes:
        fields = list(HELLO.unpack(data)) if number == 0 and len(data) == HELLO.size else []
        if way in changed and fields:
            index, value = changed[way]
            fields[index] = value
            return HELLO.pack(*fields)
        if way == "certificate" and forth and number == 2:
            return len(der).to_bytes(2, "big") + der
        if way == "tls" and b"\x16\x03" in data[:2]:
            return data[:-1] + bytes([data[-1] ^ 1])
        return data

    problem = through(host, pem, change)
    if way in changed:
        assert isinstance(problem, WrongCode)
        assert host.invitation._wrong == 1
    else:
        host.wait_for("has not joined")
    assert not host.invitation.machines


def test_6_many_that_prove_nothing_cost_little_and_one_with_the_code_gets_in(
    desk: Callable[..., Desk], pem: str
) -> None:
    host = desk()
    socks = []
    for number in range(150):
        sock = socket.create_connection(host.address, LIMIT_S)
        sock.sendall([b"", b"GET / HTTP/1.0\r\n\r\n" * 20, b"ringjoin", b"\0" * HELLO.size][number % 4])
        socks.append(sock)
    until_s = monotonic() + LIMIT_S
    carrier: Optional[Carrier] = None
    while carrier is None:
        assert monotonic() < until_s
        with contextlib.suppress(ProtocolError, OSError):
            carrier = host.dial(host.code, pem)
    assert threading.active_count() < 2 * invitation.PLACES
    assert host.invitation._wrong == 0
    for sock in socks:
        sock.close()
    carrier.close()


def test_8_nothing_starts_before_the_answer_and_no_is_no(desk: Callable[..., Desk], pem: str) -> None:
    host = desk()
    carrier, _ = host.join(pem, agreed=False)
    assert "its user has not agreed" in host.wait_for("has not joined")
    until_s = monotonic() + LIMIT_S
    frames = []
    while not carrier.ended and monotonic() < until_s:
        frames += carrier.turn(0.2)
    assert not frames and not host.invitation.machines
    carrier.close()
    again, _ = host.join(pem)  # who has said no by mistake may come again
    assert [machine.name for machine in host.invitation.wait(LIMIT_S)] == ["desk"]
    again.close()


@pytest.mark.parametrize(
    "name", ["localhost", socket.gethostname(), "Jetson1", "lab", "10.0.0.1", "a.b", "-x", "a@b"]
)
def test_9_a_machine_may_not_take_a_name(desk: Callable[..., Desk], pem: str, name: str) -> None:
    host = desk(1, ("jetson1", "lab"))
    with pytest.raises((ConfigError, ProtocolError, OSError)):
        host.join(pem, name)[0].close()
    assert not host.invitation.machines


def test_9_frames_of_a_hostile_machine_end_its_connection(desk: Callable[..., Desk], pem: str) -> None:
    bad = [
        connection._FRAME.pack(99, 0, 0),
        connection._FRAME.pack(Kind.TELL, 0, 1 << 30),
        connection._FRAME.pack(Kind.TELL, 0, 4) + b"{{{{",
        connection._FRAME.pack(Kind.TELL, 0, 2) + b"[]",
        connection._FRAME.pack(Kind.EXIT, 0, 20) + b'{"status":1e999}    ',
    ]
    host = desk(len(bad))
    for number, data in enumerate(bad):
        carrier, _ = host.join(pem, f"m{number}")
        carrier._sock.send(data)
        machine = _machine(host, f"m{number}")
        assert machine.over.wait(LIMIT_S), data
        carrier.close()


def _machine(host: Desk, name: str) -> Machine:
    assert eventually(lambda: name in host.invitation.machines, LIMIT_S), host.lines
    return host.invitation.machines[name]


def test_10_a_code_is_used_up_also_when_its_machine_is_gone(desk: Callable[..., Desk], pem: str) -> None:
    host = desk()
    carrier, _ = host.join(pem)
    (machine,) = host.invitation.wait(LIMIT_S)
    host.invitation.close()
    carrier.close()
    assert machine.over.wait(LIMIT_S) and machine.lost
    wait_until_closed(host.address)
    with pytest.raises(OSError):
        host.dial(host.code, pem)


def test_15_to_17_answers_are_short_rare_and_for_questions_of_the_own_network(
    desk: Callable[..., Desk],
) -> None:
    host = desk()
    answerer = host.invitation._answerer
    if answerer is None:
        pytest.skip("no multicast here")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.bind(("127.0.0.1", 0))
        sock.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton("127.0.0.1"))
        sock.settimeout(0.5)
        question = connection._QUESTION.pack(connection._ASKED, b"n" * 16, host.code.label)
        for _ in range(50):
            sock.sendto(question, (connection.GROUP, connection.PORT))
            sock.sendto(b"x" * 64, (connection.GROUP, connection.PORT))
        answers = []
        with contextlib.suppress(socket.timeout):
            while True:
                answers.append(sock.recv(100))
    port = host.address[1].to_bytes(2, "big")
    answers = [answer for answer in answers if answer.endswith(port)]  # others are of tests beside this
    assert len(answers) <= 2 and len(answers[0]) == 29 < len(question)
    secret = host.code.secret.encode()
    assert not any(part in answers[0] for part in (secret, b"train", os.environ.get("USER", "root").encode()))


def test_16_forged_answers_only_suggest_a_few_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    class Forger:
        """A socket on which 10,000 answers from different addresses wait."""

        count = 0

        def __init__(self, *_: Any) -> None:
            self.nonce = b""

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *_: Any) -> None: ...
        def bind(self, *_: Any) -> None: ...
        def setsockopt(self, *_: Any) -> None: ...
        def setblocking(self, *_: Any) -> None: ...
        def sendto(self, data: bytes, _: Any) -> None:
            self.nonce = connection._QUESTION.unpack(data)[1]

        def recvfrom(self, _: int) -> Tuple[bytes, Tuple[str, int]]:
            Forger.count += 1
            return connection._ANSWER.pack(b"ringjoin!", self.nonce, 7, 80), (f"10.0.{Forger.count}.1", 43117)

    addresses = connection.own_addresses()
    monkeypatch.setattr(connection, "own_addresses", lambda *_: addresses)
    monkeypatch.setattr(connection.socket, "socket", Forger)
    monkeypatch.setattr(connection.select, "select", lambda socks, *_: (socks, [], []))
    assert len(list(connection.find(7, 5.0))) <= connection.MAX_ADDRESSES + 8
    assert Forger.count < 100


# -- known machines --------------------------------------------------------------------------


def met(desk: Callable[..., Desk], pem: str) -> Code:
    """Let a machine join by a code; the key that both ends keep since then."""
    host = desk()
    sock, proof = connect(host.code, host.address, "desk", pem)
    with ThreadPoolExecutor(1) as pool, pytest.MonkeyPatch.context() as patch:
        patch.setattr("signal.signal", lambda *_: None)
        ended = pool.submit(take_part, sock, proof, "desk", 1, 2, host.lines.append, lambda _: True)
        (machine,) = host.invitation.wait(LIMIT_S)
        machine.close()
        assert ended.result(LIMIT_S) == (0, 0.0)
    host.close()
    known, (launcher,) = find_known(MACHINES, "desk"), known_names(LAUNCHERS)
    kept = find_known(LAUNCHERS, launcher)
    assert known is not None and kept == Known(*known[:2], "desk", *host.address)
    return known.code


def test_19_a_known_machine_joins_only_where_it_is_awaited(desk: Callable[..., Desk], pem: str) -> None:
    key = met(desk, pem)
    host = desk(1, again=True)
    with pytest.raises(ProtocolError):
        host.dial(key, pem)
    assert host.invitation._wrong == 0
    with pytest.raises(ConfigError, match="No machine lab is known here"):
        desk(0, names=("lab",))


@pytest.mark.parametrize("way", ["another key", "a code", "a code and another key"])
def test_18_the_name_of_a_known_machine_is_nothing_without_its_key(
    desk: Callable[..., Desk], pem: str, way: str
) -> None:
    key = met(desk, pem)
    host = desk(1) if "code" in way else desk(0, names=("desk",))
    if way == "another key":
        with pytest.raises(ProtocolError):
            host.dial(new_key(), pem)
        return
    carrier = host.dial(host.code, pem)
    with pytest.raises(ConfigError, match="desk is another machine there"):
        Guest(carrier, "launcher", host.lines.append).offered(1, 2, "0" * 64 if "key" in way else "")
    carrier.close()
    assert not host.invitation.machines and find_known(MACHINES, "desk") == Known(key.label, key.secret)


def test_18_a_launcher_without_the_key_is_not_served_in_the_name_of_a_known_one(
    desk: Callable[..., Desk], pem: str
) -> None:
    met(desk, pem)
    forget("desk")  # as if it were another launcher of this name
    (launcher,), host, asked = known_names(LAUNCHERS), desk(), []
    kept = find_known(LAUNCHERS, launcher)
    sock, proof = connect(host.code, host.address, "desk", pem)
    text = f"is another launcher than the one known.*hosts forget {launcher.partition('+')[0]}"
    with pytest.raises(ConfigError, match=text):
        take_part(sock, proof, "desk", 1, 2, host.lines.append, lambda text: not asked.append(text))
    assert not asked and find_known(LAUNCHERS, launcher) == kept
    with pytest.raises((AuthenticationError, ProtocolError)):
        assert kept is not None
        host.dial(kept.code, pem)


def test_19_a_forgotten_machine_is_refused_also_while_a_launcher_waits(
    desk: Callable[..., Desk], pem: str
) -> None:
    key = met(desk, pem)
    host = desk(0, names=("desk",))
    assert forget("desk").startswith("desk is forgotten")
    with pytest.raises(ProtocolError):
        host.dial(key, pem)
    assert not host.invitation.machines
    with pytest.raises(ConfigError, match="No machine or launcher 'desk'"):
        forget("desk")


def test_a_plan_expects_of_a_machine_as_many_ranks_as_the_job_needs() -> None:
    with gathered(Options(hosts="localhost,join:1", np=3), ["true"], print, True) as joined:
        assert [spec.slots for spec, _ in joined] == [3]


def test_a_job_that_needs_more_slots_than_machines_offer_says_where() -> None:
    options = Options(hosts="localhost,join:1", np=3)
    draft = prepare(options, ["true"], joined=[(HostSpec("join-1", slots=3), Joined())])
    machine = SimpleNamespace(name="desk", spec=HostSpec("desk", slots=1))
    with pytest.raises(ConfigError, match="there are 2: desk offers 1. Join with --slots N"):
        _check_slots(options, draft, [machine])
    machine.spec = HostSpec("desk", slots=2)
    _check_slots(options, draft, [machine])


def joins(host: Desk, pem: str, name: str, ask: Callable[[str], bool] = lambda _: True) -> Optional[int]:
    """Join as a user does whose job ends at once; the exit code, None if the launcher has not let it in."""
    with ThreadPoolExecutor(1) as pool, pytest.MonkeyPatch.context() as patch:
        patch.setattr("signal.signal", lambda *_: None)
        sock, proof = connect(host.code, host.address, name, pem)
        ended = pool.submit(take_part, sock, proof, name, 1, 2, host.lines.append, ask)
        with contextlib.suppress(ConfigError):
            for machine in host.invitation.wait(LIMIT_S):
                machine.close()
        try:
            return ended.result(LIMIT_S)[0]
        except ConfigError as problem:
            host.lines.append(str(problem))
            return None


def test_a_machine_may_join_with_another_name(desk: Callable[..., Desk], pem: str) -> None:
    for name in ("desk", "board", "desk"):
        host = desk()
        assert joins(host, pem, name) == 0
        host.close()
    assert sorted(known_names(MACHINES)) == ["board", "desk"] and len(known_names(LAUNCHERS)) == 2


@pytest.mark.parametrize("side", [MACHINES, LAUNCHERS])
def test_a_key_that_one_end_cannot_keep_is_kept_by_none(
    desk: Callable[..., Desk], pem: str, configuration: Path, side: str
) -> None:
    """As with a home that cannot be written: the next time needs a code, and no more."""
    configuration.mkdir(mode=0o700)
    (configuration / side).write_text("in its place")
    host = desk()
    assert joins(host, pem, "desk") == 0
    host.close()
    assert "So the next time a code is needed" in host.wait_for("cannot be used")
    (configuration / side).unlink()
    assert not known_names(MACHINES) and not known_names(LAUNCHERS)
    again = desk()
    assert joins(again, pem, "desk") == 0


def test_an_invitation_that_ends_while_the_user_is_asked_leaves_no_key(
    desk: Callable[..., Desk], pem: str
) -> None:
    host = desk()
    host.invitation._until_s = monotonic() + 1.0
    assert joins(host, pem, "desk", lambda _: bool(host.wait_for("has not joined"))) is None
    assert "has not let this machine in: it closed the connection" in host.lines[-1]
    assert not known_names(MACHINES) and not known_names(LAUNCHERS)
    again = desk()
    assert joins(again, pem, "desk") == 0
    assert "ringrun hosts forget desk, too" in forget(known_names(LAUNCHERS)[0])


def test_19_a_machine_that_forgets_a_launcher_while_it_looks_for_it_does_not_join(
    desk: Callable[..., Desk], pem: str
) -> None:
    met(desk, pem)
    host, (launcher,) = desk(0, names=("desk",)), known_names(LAUNCHERS)
    kept = find_known(LAUNCHERS, launcher)
    assert kept is not None
    forget(launcher)
    with pytest.raises(ConfigError, match="No job was joined"):
        connect(kept.code, host.address, "desk", pem, lambda: find_known(LAUNCHERS, launcher) == kept)
    assert not host.invitation.machines


def test_20_a_recorded_join_of_a_known_machine_proves_nothing(desk: Callable[..., Desk], pem: str) -> None:
    key = met(desk, pem)
    host, sent = desk(0, names=("desk",)), []

    def record(forth: bool, _: int, data: bytes) -> bytes:
        if forth:
            sent.append(data)
        return data

    Desk.dial(_at(host, Between(host.address, record).address), key, pem).close()
    for target in (host, desk(0, names=("desk",))):
        with socket.create_connection(target.address, LIMIT_S) as sock:
            sock.sendall(sent[0])
            connection.read_exactly(sock, HELLO.size, monotonic() + LIMIT_S)
            sock.sendall(b"".join(sent[1:]))
            with contextlib.suppress(ConnectionError):
                assert sock.recv(1) == b""
    assert not host.invitation.machines


def test_10_a_machine_that_returns_voids_its_old_connection(desk: Callable[..., Desk], pem: str) -> None:
    host = desk(1, again=True)
    carrier, offer = host.join(pem, keeps=True)
    (machine,) = host.invitation.wait(LIMIT_S)
    host.invitation.begin()
    way = Joined(host.invitation)
    agent = way.start(["desk"])
    with pytest.raises((AuthenticationError, ProtocolError)):
        host.dial(host.code, pem)
    again, _ = host.join(pem, code=Code(offer["label"], offer["secret"], True))
    assert agent.wait(LIMIT_S) == 255 and machine.over.wait(LIMIT_S) and machine.lost == "it has joined again"
    assert not way._machines["desk"].over.is_set()
    for pipe in (agent.stdin, agent.stdout, agent.stderr):
        pipe.close()
    carrier.close()
    again.close()


@pytest.mark.parametrize("mode", ["key", "folder", "content"])
def test_18_a_key_that_others_could_have_read_or_changed_is_refused(
    desk: Callable[..., Desk], pem: str, configuration: Path, mode: str
) -> None:
    met(desk, pem)
    place = configuration / MACHINES / "desk"
    assert place.stat().st_mode & 0o777 == 0o600 and place.parent.stat().st_mode & 0o777 == 0o700
    if mode == "key":
        place.chmod(0o644)
    elif mode == "folder":
        place.parent.chmod(0o777)
    else:
        place.write_text('{"label": 7}')
    with pytest.raises(ConfigError, match="cannot be used"):
        find_known(MACHINES, "desk")
    if mode == "folder":
        said: List[str] = []
        keep(MACHINES, "lab", Known(*new_key()[:2]), said.append)
        assert "a code is needed" in said[0] and not (place.parent / "lab").exists()
