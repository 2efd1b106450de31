"""What comes from outside: damaged copies of what is right. A parser takes or refuses them, in little memory.

    FUZZ_CASES=1000000 python -m pytest tests/fuzz/test_parsers.py --timeout 0

tries a million cases, divided among the parsers; without it some thousands. They are the same in every run.
"""

from __future__ import annotations

import copy
import functools
import json
import os
import random
import socket
import ssl
import tracemalloc
from contextlib import contextmanager
from typing import Any, Callable, Dict, Iterator, List, Mapping

import pytest

from ringcomm.calls.objects import Objects
from ringcomm.config import Membership, Slot
from ringcomm.configuration.membership import parse_endpoint
from ringcomm.engine.coordinator import Coordinator
from ringcomm.engine.peer_channels import ControlMessages
from ringcomm.engine.process_sets import ProcessSets
from ringcomm.errors import AuthenticationError, ConfigError, ProtocolError, RingcommError, StartupError
from ringcomm.group.message_channel import OVERHEAD_BYTES, Channel, Disagreement, Matcher, Receive
from ringcomm.ops import Collective, ReduceOp
from ringcomm.rendezvous import embedded as launched
from ringcomm.rendezvous.control import error_from
from ringcomm.rendezvous.measuring import Echo
from ringcomm.rendezvous.membership import Seat, Terms
from ringcomm.rendezvous.server import Board
from ringcomm.rendezvous.state import Rendezvous
from ringcomm.storage.keys import make_certificate, read_key
from ringcomm.transport import shm
from ringcomm.transport.memory import memory_fabrics
from ringcomm.transport.reactor import Reactor, encryption_of
from ringcomm.wire import frames, messages, signature
from ringcomm.wire.auth import Admission, Claim, Initiator, Purpose, Responder, Session, Signer, job_digest
from ringcomm.wire.frames import NO_ROOT
from ringcomm.wire.messages import MessageReader, encode, validate
from ringcomm.wire.signature import Signature
from ringrun.agent import framing
from ringrun.diagnosis.records import Records, explain, has_operations
from ringrun.diagnosis.waiting import diagnose, parse_record, read_report
from ringrun.job.launch import prepare
from ringrun.plan.hosts import parse_hostfile, parse_hosts
from ringrun.plan.job import signed, verified
from ringrun.plan.options import Options
from ringrun.reach.incoming import event_facts
from ringrun.reach.protocol import FRAME_LIMIT_BYTES, FrameReader
from ringrun.show import views
from ringrun.show.history import History
from ringrun.show.views import ReportFacts, html_report
from ringrun.show.visible import visible
from tests.unit.ringrun.show.samples import report

CASES = int(os.environ.get("FUZZ_CASES", "4000"))
REFUSALS = (AuthenticationError, ProtocolError, ConfigError, StartupError)
Random = random.Random
PARSERS: List[Any] = []


def parser(refuses: bool = False, limit_bytes: int = 1 << 20, release: bool = False) -> Callable[[Any], Any]:
    """Try what the function does with a random generator, and how much memory it holds meanwhile. Of what
    `refuses`, some cases must be refused and some taken, or what is made is not worth trying.
    """

    def decorate(feed: Callable[[Random], None]) -> Any:
        marks = [pytest.mark.release] if release else []
        PARSERS.append(pytest.param(feed, refuses, limit_bytes, id=feed.__name__, marks=marks))
        return feed

    return decorate


@contextmanager
def at_most(limit_bytes: int) -> Iterator[None]:
    """What happens inside may not hold more memory than this at any time."""
    tracemalloc.start()
    try:
        yield
        _, peak = tracemalloc.get_traced_memory()
        assert peak <= limit_bytes, f"{peak} bytes were allocated, {limit_bytes} are allowed"
    finally:
        tracemalloc.stop()

# ---- what goes in ----------------------------------------------------------------------------


ODD = [
    0, 1, 2, -1, 255, 65536, 2**31, 2**63, 1 << 70, 1e308, float("nan"), "", "x", "\ud800", "1e999", None,
    True, False, [], {}, [1], [[1]], [["a", 1 << 70]], {"address": "1.2.3.4"}, "127.0.0.1", "@ringcomm-x",
    "fe80::1",
]  # fmt: skip
BY_TYPE: Mapping[type, List[Any]] = {
    int: [*range(-2, 5)], float: [0.0, 1.5, 1e308], bool: [False, True],
    str: ["", "x", "lost", "stalled", "mismatch", "127.0.0.1", "::1", "@ringcomm-x", "host"],
    list: [[], [1], [[0, 1]], ["x"], [None], [1.5, {}]],
}  # fmt: skip


def noise(rng: Random, most: int) -> bytes:
    """Any bytes, at most so many."""
    return bytes(rng.getrandbits(8) for _ in range(rng.randrange(most + 1)))


def damage(rng: Random, right: bytes) -> bytes:
    """A few bytes changed, some left out or put in, the end cut off."""
    data = bytearray(right)
    for _ in range(rng.randrange(4)):
        at = rng.randrange(len(data) + 1)
        how = rng.randrange(4)
        if how == 0:
            data[at : at + rng.randrange(1, 9)] = b""
        elif how == 1:
            data[at:at] = noise(rng, 8)
        elif at < len(data):
            data[at] = rng.randrange(256) if how == 2 else data[at] ^ (1 << rng.randrange(8))
    return bytes(data[: rng.randrange(len(data) + 1)] if rng.randrange(4) == 0 else data)


def changed(rng: Random, right: Any) -> Any:
    """A copy in which up to two values, at any depth, are odd ones."""
    found = copy.deepcopy(right)
    for _ in range(rng.randrange(3)):
        place = found
        while isinstance(place, (dict, list)) and place:
            key = rng.choice(list(place) if isinstance(place, dict) else range(len(place)))
            if not (isinstance(place[key], (dict, list)) and rng.randrange(3)):
                place[key] = copy.deepcopy(rng.choice(ODD))
                break
            place = place[key]
    return found


def portions(rng: Random, data: bytes) -> Iterator[bytes]:
    """The data in pieces."""
    while data:
        count = rng.randrange(1, 200)
        yield data[:count]
        data = data[count:]


def _fields(rng: Random, wanted: Mapping[str, Any], kind: str = "") -> Dict[str, Any]:
    found: Dict[str, Any] = {}
    for name, types in wanted.items():
        items = messages._ADDRESS if name == "addresses" else messages._ITEMS.get((kind, name))
        if items is None:
            found[name] = copy.deepcopy(rng.choice(BY_TYPE[types[0]]))
        else:
            found[name] = [_fields(rng, items) for _ in range(rng.randrange(3))]
    return found


def any_message(rng: Random) -> Dict[str, Any]:
    """A control message that is right, or nearly."""
    kind = rng.choice(sorted(messages._FIELDS))
    message = {"type": kind, **_fields(rng, messages._FIELDS[kind], kind)}
    for name in ("rank", "host", "slot", "machine", "python", "iface", "kind"):
        if rng.randrange(7) == 0:
            message[name] = copy.deepcopy(rng.choice([*ODD, [0, 1], [1, 0]]))
    return dict(changed(rng, message)) if rng.randrange(4) == 0 else message

# ---- before the proof ------------------------------------------------------------------------


KEY, JOB = b"k" * 32, job_digest("job")
DIALLING = Claim(Purpose.DIRECT, JOB)
GREETING = Initiator(KEY, DIALLING, bytes).greeting
CHALLENGE = Responder(b"x" * 32, JOB, bytes).receive(GREETING)
LITTLE_BYTES = 64 * 1024


def converse(rng: Random, side: Any, data: bytes) -> None:
    """Give a side of the handshake what it asks for, in pieces, and never more than 124 bytes."""
    taken = 0
    while data and side.needs:
        piece = data[: min(side.needs, rng.randrange(1, 80))]
        data = data[len(piece) :]
        taken += len(piece)
        assert taken <= 124
        side.receive(piece)


@parser(refuses=True, limit_bytes=LITTLE_BYTES)
def handshake(rng: Random) -> None:
    """Both sides of it, of which each has the other's key."""
    if rng.randrange(2):
        claim = Claim(rng.choice(list(Purpose)), rng.choice([JOB, job_digest("other")]), rng.randrange(4))
        side: Any = Responder(KEY, JOB, bytes)
        right = Initiator(KEY, claim, bytes).greeting + bytes(32)
    else:
        side, right = Initiator(KEY, DIALLING, bytes), CHALLENGE
    try:
        converse(rng, side, damage(rng, right))
    finally:
        assert not side.done


@parser(refuses=True, limit_bytes=LITTLE_BYTES)
def admission(rng: Random) -> None:
    """Of all this only the right one is accepted: to TLS, or to the relay."""
    right = Admission.of(KEY, bytes, rng.choice([None, DIALLING]))
    side, data = Admission(KEY, set()), damage(rng, right)
    try:
        converse(rng, side, data)
    except REFUSALS:
        assert not data.startswith(right)
        raise
    assert (not side.needs) == data.startswith(right)


@functools.lru_cache(None)
def encryption() -> Any:
    return encryption_of(make_certificate())


@parser()
def encrypted_connection(rng: Random) -> None:
    """A real beginning that is damaged, or nothing but noise."""
    hello, sent = ssl.MemoryBIO(), ssl.MemoryBIO()
    with pytest.raises(ssl.SSLWantReadError):
        encryption()._dialling.wrap_bio(hello, sent).do_handshake()
    data = damage(rng, sent.read()) if rng.randrange(3) else noise(rng, 600)
    here, there = socket.socketpair()
    here.setblocking(False)
    secured = encryption().wrap(here, accepted=True)
    try:
        for piece in portions(rng, data):
            there.sendall(piece)
            assert not secured.handshake()
    except OSError as problem:
        raise ProtocolError(str(problem)) from None
    finally:
        secured.close()
        there.close()

# ---- between ranks and the rendezvous ----------------------------------------------------------


def joining(rank: int) -> Dict[str, Any]:
    address = {"iface": "eth0", "address": "10.0.0.1", "port": 1, "kind": "wired"}
    said = {"type": "join", "version": "1", "hostname": "h", "pid": rank}
    return {**said, "slot": [rank, 0], "addresses": [address]}


ATTEMPT = {
    "source": 0, "target": 1, "address": "10.0.0.1", "port": 1, "local": "10.0.0.2", "local_iface": "eth0",
    "remote_iface": "eth0", "kind": "wired", "why": "", "mb_per_s": None,
}  # fmt: skip
RIGHT: List[Dict[str, Any]] = [
    joining(0), joining(1), {"type": "probed", "attempts": [ATTEMPT]},
    {"type": "linked", "links": [{"iface": "a", "local": "", "peers": [[1, 1]]}]},
    {"type": "linked", "links": [{"iface": "a", "local": "", "peers": [[0, 0]]}]},
    {"type": "leaving", "reason": "x", "ok": True},
    {"type": "lost", "peer": 1, "doing": "", "why": "", "kind": "lost"},
]  # fmt: skip
START = [(0, RIGHT[0]), (1, RIGHT[1]), (0, RIGHT[2]), (1, RIGHT[2]), (0, RIGHT[3]), (1, RIGHT[4])]
POSTED: List[Dict[str, Any]] = [
    {"type": "post", "entry": "a", "text": "x"}, {"type": "post", "entry": "b", "text": "x" * 70_000},
    {"type": "await", "entry": "a"}, {"type": "await", "entry": "c"},
]  # fmt: skip


@parser(refuses=True, limit_bytes=LITTLE_BYTES)
def control_message(rng: Random) -> None:
    """Damaged JSON in a damaged frame."""
    reader = MessageReader(messages.MAX_REPORT_BYTES)
    for piece in portions(rng, damage(rng, encode(any_message(rng)))):
        for message in reader.feed(piece):
            assert message["type"] in messages._FIELDS


@parser(refuses=True)
def no_message(rng: Random) -> None:
    """Anything that JSON can say."""
    validate(changed(rng, rng.choice([*RIGHT, *ODD, [RIGHT], any_message(rng)])))


@parser()
def rendezvous(rng: Random) -> None:
    """Ranks that say anything, in any order: refusals and aborts, and no other exception."""
    planned = rng.randrange(2)
    seats = tuple(Seat(Slot(rank, 0), f"h{rank}") for rank in range(2 * planned))
    state, now = Rendezvous(Terms("1", 9.0, 2, seats)), 0.0
    steps = START[: rng.randrange(7)]
    for _ in range(rng.randrange(9)):
        message = changed(rng, rng.choice(RIGHT)) if rng.randrange(3) else any_message(rng)
        steps.append((rng.randrange(3), message))
    for connection, message in steps:
        now += 0.4
        try:
            for action in state.handle(connection, validate(message), now):
                if hasattr(action, "message"):
                    assert len(encode(action.message)) < messages.MAX_MESSAGE_BYTES
        except ProtocolError:
            state.disconnected(connection, now)
        state.tick(now)
    if planned:
        state.process_exited(0, "exit code 1", False, now)
    state.tick(now + 20.0)


@parser(refuses=True)
def board(rng: Random) -> None:
    """Entries that ranks post and wait for: each answer is a message that may be sent."""
    entries = Board()
    for _ in range(rng.randrange(2, 9)):
        message = changed(rng, rng.choice(POSTED)) if rng.randrange(9) == 0 else rng.choice(POSTED)
        connection = rng.randrange(3)
        kind = validate(message)["type"]
        if kind not in ("post", "await"):
            raise ProtocolError("the rendezvous gives it to others")
        for action in (entries.posted if kind == "post" else entries.awaited)(connection, message):
            assert validate(action.message)["type"] == "entry" and encode(action.message)
        if rng.randrange(3) == 0:
            entries.left(connection)


@parser(refuses=True)
def announced_error(rng: Random) -> None:
    """What a rank makes of the end of the job as it is announced."""
    message = {"kind": rng.choice(["lost", "stalled", "mismatch", "x"]), "text": "x", "rank": 1}
    message = validate({**changed(rng, message), **any_message(rng), "type": "abort"})
    assert isinstance(error_from(message), RingcommError)


@parser(limit_bytes=2 << 20)
def probe(rng: Random) -> None:
    """The lengths of what is to be sent back, and the bytes."""
    lengths = [rng.choice([rng.getrandbits(32), 1, 3, 300]) for _ in range(rng.randrange(5))]
    data = b"".join(length.to_bytes(4, "big") + bytes(min(length, 100)) for length in lengths)
    here, there = socket.socketpair()
    here.setblocking(False)
    reactor, ended = Reactor(), []  # type: ignore[var-annotated]
    echo = Echo(reactor, here, Session(bytes(32), bytes(32)), 0, ended.append)
    for piece in portions(rng, data + noise(rng, 20)):
        if not ended:
            there.sendall(piece)
            reactor.run_once(0.0)
    reactor.forget(echo.sock)
    for item in (reactor, here, there):
        item.close()


NOTICE = {"job": "a", "machine": "m", "endpoints": [["127.0.0.1", 1], ["fd00::1", 4000]], "key": "ab" * 32}


def notice(rng: Random, right: Dict[str, Any]) -> str:
    return damage(rng, json.dumps(changed(rng, right)).encode()).decode("latin-1")


@parser(refuses=True, release=True)
def file_of_rank_0(rng: Random) -> None:
    """What ranks that srun or mpirun has started read."""
    text = notice(rng, {**NOTICE, "certificate": ""})
    full = launched._with_notice(Membership(size=2, rank=1), text, "a file")
    assert all(isinstance(host, str) and 0 < port < 65536 for host, port in full.rendezvous)
    assert isinstance(full.key, bytes)


@parser(refuses=True)
def store_entry(rng: Random) -> None:
    """A process group's entry in PyTorch's store, where there is no key to sign it."""
    pytest.importorskip("torch")
    from ringcomm.torch.distributed._rendezvous import _notice_of

    _notice_of(notice(rng, NOTICE), "a group")

# ---- between ranks ---------------------------------------------------------------------------


SIGNATURE = Signature("x", 0, int(Collective.ALLREDUCE), int(ReduceOp.SUM), NO_ROOT, ("float32",), ((4,),))
OPERATIONS: List[List[Any]] = [[SIGNATURE.to_json(), 0, 1], [SIGNATURE.to_json(), 0, 0, {"absent": "0f"}]]
READY = {"type": "ready", "operations": OPERATIONS[:1], "sites": ["a.py:1"], "urgent": True}
OPERATIONS += [[1, 0, 1], [1, 0, 1, {"values": "AAAA", "weight": 1.0}]]
READY_AGAIN = {**READY, "operations": OPERATIONS[1:], "urgent": False}
SIGNER = Signer(KEY, "job", 1)
OBJECTS = Objects(SIGNER, 0)


@parser()
def header(rng: Random) -> None:
    """64 bytes that are read with each message."""
    mine = frames.Header(1, 7, 1, 1, 10, -1, 8, 0)
    packed = mine.pack()
    data = damage(rng, packed) if rng.randrange(2) else packed[:2] + noise(rng, frames.HEADER_BYTES)
    theirs = frames.unpack_header(data[: frames.HEADER_BYTES].ljust(frames.HEADER_BYTES, b"\0"))
    # Damage to bytes that are not used makes no other call.
    assert signature.explain_difference(mine, theirs) or theirs == mine
    assert signature.header_text(theirs)


@parser(refuses=True)
def messages_of_an_engine(rng: Random) -> None:
    """Control messages and noise on a link of the fabric."""
    one, other = memory_fabrics(2)
    control = ControlMessages(other)
    data = b"".join(encode(any_message(rng)) for _ in range(rng.randrange(4))) + noise(rng, 20)
    try:
        for piece in portions(rng, data):
            unsent = memoryview(piece)
            while unsent:
                unsent = unsent[one.link(1).send([unsent]) :]
            control.receive()
    finally:
        one.close()
        other.close()


@parser(refuses=True)
def coordinator(rng: Random) -> None:
    """Announcements of two ranks: every other rank can parse the responses."""
    sets = ProcessSets(0, 2)
    made, refused = Coordinator(["a", "b"], sets.members), None
    for number in range(1, rng.randrange(2, 7)):
        message = changed(rng, rng.choice([READY, READY_AGAIN])) if rng.randrange(4) else any_message(rng)
        try:
            made.take(rng.randrange(2), validate(message), 30.0 * number)
        except RingcommError as problem:
            refused = problem
            continue
        responses = made.decide(30.0 * number)
        if responses is not None:
            assert next(MessageReader(messages.MAX_RESPONSES_BYTES).feed(encode(responses))) is not None
    if refused is not None:
        raise ProtocolError(str(refused))


class Unnoticed:
    """Stands for a work."""

    def finish(self, error: object = None) -> None:
        pass

    def where(self) -> str:
        return ""


@parser(refuses=True)
def group_messages(rng: Random) -> None:
    """Frames between two ranks of a process group, in any order and about any message."""
    near, far = (fabric.link(1 - rank) for rank, fabric in enumerate(memory_fabrics(2)))
    matcher = Matcher()
    channel = Channel(near, matcher)
    for nbytes in (4, 40_000):
        channel.send((0, 1), memoryview(bytes(nbytes)), Unnoticed())
    for tag in range(2):
        assert matcher.post(Receive(1, (0, tag), memoryview(bytearray(4)), Unnoticed())) is None
    try:
        for _ in range(rng.randrange(1, 6)):
            kind, number = rng.randrange(1, 6), rng.randrange(1, 4)
            nbytes = rng.choice([4, 4, 4, 0, 5, 4 + OVERHEAD_BYTES, 40_000, 1 << 40])
            data = channel._pack(kind, number, nbytes, (0, rng.randrange(2)))
            data += bytes(nbytes) if kind in (1, 4) and nbytes < 100 else b""
            far.send([memoryview(damage(rng, data) if rng.randrange(4) == 0 else data)])
            channel.advance()
            far.recv([memoryview(bytearray(1 << 16))])
    except Disagreement as difference:
        raise ProtocolError(str(difference)) from None


@parser()
def signed_objects(rng: Random) -> None:
    """What is unpickled only if its signature is right: objects, functions and results."""
    right = OBJECTS.pack(rng.randrange(9), "broadcast_object", "n").data
    data = damage(rng, right)
    source, name = rng.randrange(2), rng.choice("nm")
    if data != right or (source, name) != (0, "n"):
        with pytest.raises(ProtocolError):
            Objects(SIGNER, 1).verified(data, source, "broadcast_object", name)
    payload = signed(right, SIGNER, "function")
    assert verified(damage(rng, payload) + b"x", SIGNER, "function") is None
    assert verified(payload, SIGNER, "result") is None


WORDS = [shm.WRITTEN, shm.READ, shm.WRITER_STATE, shm.READER_STATE, shm.LENT, shm.LOANS_READ]
WORDS += [shm.RETURNED, shm.SPAN, *range(shm.LOANS, shm.LOANS + 4)]
# ---- what ringrun reads ------------------------------------------------------------------------

TEXTS = [b"host", b"host:2,user@h", b"[fe80::1]:3", b"a slots=2 python=/x 'cwd=y z'", b"#", b"h:" + b"9" * 99]
HOST_WORDS = ["host", ":", "=", "slots=2", "[", "]", "@", "#", ",", "'", "9" * 5000, "fe80::1%eth0", "\n"]
PEM = ["-----BEGIN CERTIFICATE-----\n", "-----END CERTIFICATE-----\n", "MIIB", "\n", "ab" * 16, "=", "\u20ac"]
EVENTS = [{"event": "ready"}, {"event": "exit"}, {"event": "started"}, {"event": "what"}, 7, None, []]
FLIGHT = {
    "type": "record", "format": 1, "reason": "asked", "rank": 0, "size": 2, "host": "h", "error": "x",
    "culprit": 1, "generation": 1, "stacks": "Thread 0x1\n  File \"a.py\", line 3 in f", "state": "S",
    "threads": [{"name": "MainThread", "main": True, "frames": [["/home/me/train.py", 88, "train"]]}],
    "lanes": [{
        "name": "calls", "ordered": True, "members": [0, 1], "sets": {"1": [0, 1]}, "paused": "",
        "operations": [{
            "op": 8, "kind": "allreduce", "name": "g", "what": "allreduce", "at": 1.0, "set": 0, "count": 1,
            "site": "/home/me/train.py:88", "state": "running", "moved": 0,
        }],
    }],
}  # fmt: skip
PLANNED = prepare(Options(np=2), ["true"])


@parser(refuses=True, limit_bytes=LITTLE_BYTES)
def agent(rng: Random) -> None:
    """What comes from another host through ssh, after whatever its shell has printed."""
    data = framing.MARKER
    for _ in range(rng.randrange(4)):
        event = json.dumps(changed(rng, rng.choice(EVENTS)) if rng.randrange(2) else EVENTS[0]).encode()
        data += framing.TO_LAUNCHER.pack(rng.randrange(6), rng.randrange(-2, 4), len(event)) + event
    reader = FrameReader()
    for piece in portions(rng, noise(rng, 30) + damage(rng, data)):
        for frame in reader.feed(piece):
            assert len(frame.data) <= FRAME_LIMIT_BYTES
            if frame.kind == framing.EVENT:
                event_facts(frame.data)


@parser(refuses=True)
def hosts(rng: Random) -> None:
    """What people write on the command line and in files."""
    text = damage(rng, rng.choice(TEXTS)).decode("latin-1")
    if rng.randrange(2):
        text = "".join(rng.choice(HOST_WORDS) for _ in range(rng.randrange(9)))
    for parse in (parse_hosts, parse_endpoint):
        try:
            parse(text)  # type: ignore[operator]
        except ConfigError as problem:
            assert str(problem)
    parse_hostfile(text, "f")


@parser()
def keys(rng: Random) -> None:
    """A key and a certificate in one file."""
    _, certificate = read_key(None, "", "".join(rng.choice(PEM) for _ in range(rng.randrange(1, 9))))
    encryption_of(certificate)


@parser(refuses=True)
def numbers_of_ranks(rng: Random) -> None:
    """What ranks report for --watch and --report: any valid report can be shown."""
    history, names, taken = History(0.0), {0: "here", 1: "there"}, 0
    peers, kinds = {"1": [1 << 62, 1 << 62, 1e308, 0, 1e308]}, {"\ud800<": [1, 1e308, 1 << 62]}
    for second in range(1, 4):
        for rank in (0, 1):
            content = json.loads(report(rank, float(second), steps=second, peers={"0": [9, 9, 0.1, 9, 0.1]}))
            if rng.randrange(4) == 0:
                content[rng.choice(list(content))] = rng.choice([*ODD, 1 << 62, "\ud800<&", peers, kinds])
            data = json.dumps(content).encode()
            taken += history.take(rank, data if rng.randrange(12) else damage(rng, data), float(second))
    views.table(history, names, 4.0, True, True, 20)
    views.line(history, names)
    html_report(ReportFacts("train.py", "1", 0.0, 4.0, "it ended"), history, names).encode("utf-8", "replace")
    if taken < 6:
        raise ProtocolError("a report is not valid")


@parser(refuses=True)
def flight_record(rng: Random) -> None:
    """The records of a failed job, which ``ringrun diagnose`` reads from files: damaged, or odd inside."""
    data = json.dumps(changed(rng, FLIGHT)).encode()
    if rng.randrange(2):
        data = damage(rng, data)
    records = Records(PLANNED)
    told = [records.take(rank, data) for rank in (0, 1, 0)]
    records.explanations({0: ["x"]})
    contents = records.complete({})
    assert told[0] == told[1] and has_operations(contents) in (True, False)
    visible(explain(contents)).encode()
    try:
        reports = {rank: read_report({**parse_record(data), "rank": rank}) for rank in range(2)}
    except ValueError as problem:
        raise ProtocolError(str(problem)) from None
    visible("\n".join(diagnose(reports))).encode()


@parser()
def words_of_ringrun(rng: Random) -> None:
    """Text from anywhere, as it is printed."""
    text = "".join(chr(rng.randrange(0x110000)) for _ in range(rng.randrange(20)))
    shown = visible(text).encode().decode()
    assert not any(ord(character) < 32 and character not in "\t\n" for character in shown)


@pytest.mark.parametrize("feed, refuses, limit_bytes", PARSERS)
def test_parser(feed: Callable[[Random], None], refuses: bool, limit_bytes: int) -> None:
    rng = random.Random(feed.__name__)
    count, refused = max(100, CASES // len(PARSERS)), 0

    def refusals() -> int:
        try:
            feed(rng)
        except REFUSALS:
            return 1
        return 0

    refusals()  # what is imported and made once is not counted
    with at_most(limit_bytes):
        for _ in range(count):
            refused += refusals()
    print(f"{feed.__name__}: {count} cases, {refused} refused")
    assert not refuses or 0 < refused < count
