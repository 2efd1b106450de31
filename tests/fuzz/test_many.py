"""A million cases in minutes: damaged copies of what is right, without hypothesis' care in choosing them.

    FUZZ_CASES=1000000 python -m pytest tests/fuzz/test_many.py --timeout 0

Hypothesis finds the odd case, and takes a millisecond or more for each. Here it is the number that counts.
"""

from __future__ import annotations

import json
import random

import pytest

from ringcomm.calls.objects import Objects
from ringcomm.config import Slot
from ringcomm.errors import AuthenticationError, ConfigError, ProtocolError, StartupError
from ringcomm.group.message_channel import OVERHEAD_BYTES, Channel, Disagreement
from ringcomm.group.message_matching import Matcher, Receive
from ringcomm.rendezvous.actions import Seat
from ringcomm.rendezvous.server import Board
from ringcomm.rendezvous.state import Rendezvous
from ringcomm.rendezvous.terms import Terms
from ringcomm.transport.memory import memory_fabrics
from ringcomm.wire import frames, messages, signature
from ringcomm.wire.auth import Initiator, Responder
from ringcomm.wire.messages import MessageReader, encode, validate
from ringcomm.wire.signing import Signer
from ringrun.agent import framing
from ringrun.diagnosis.records import Records, explain, has_operations
from ringrun.diagnosis.reports import parse_record, read_report
from ringrun.diagnosis.waiting import diagnose
from ringrun.job.launch import prepare
from ringrun.plan.hosts import parse_hostfile, parse_hosts
from ringrun.plan.options import Options
from ringrun.plan.signed import about_call, about_result, signed, verified
from ringrun.reach.incoming import event_facts
from ringrun.reach.protocol import FrameReader
from ringrun.show.visible import visible
from ringrun.watch import table
from ringrun.watch.history import History
from ringrun.watch.html_report import ReportFacts, html_report
from tests.fuzz.cases import CASES, at_most
from tests.fuzz.test_wire import DIALLING, JOB, KEY, RIGHT, challenge
from tests.unit.ringrun.watch.samples import report

GREETING = Initiator(KEY, DIALLING, bytes).greeting
TEXTS = [
    b"host",
    b"host:2,user@h",
    b"[fe80::1]:3",
    b"a slots=2 python=/x 'cwd=y z'",
    b"#",
]
AGENTS = (
    framing.MARKER
    + framing.TO_LAUNCHER.pack(4, 0, 16)
    + b'{"event":"done"}'
    + framing.TO_LAUNCHER.pack(1, 1, 2)
    + b"hi"
)
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
POSTED = [
    {"type": "post", "entry": "a", "text": "x"},
    {"type": "post", "entry": "b", "text": "x" * 70_000},
    {"type": "await", "entry": "a"},
    {"type": "await", "entry": "c"},
]
SIGNER = Signer(KEY, "job", 1)
OBJECTS = Objects(SIGNER, 0)
NOTICE = {"job": "torch-a", "machine": "m", "endpoints": [["127.0.0.1", 1]], "key": "00" * 32}
PLANNED = prepare(Options(np=2), ["true"])
ODD = [
    0,
    -1,
    2**31,
    2**63,
    1e308,
    float("nan"),
    "",
    "x",
    None,
    True,
    [],
    {},
    [1],
    {"address": "1.2.3.4"},
    "127.0.0.1",
]


def damage(rng: random.Random, right: bytes) -> bytes:
    """A few bytes changed, some left out or put in, the end cut off."""
    data = bytearray(right)
    for _ in range(rng.randrange(4)):
        at = rng.randrange(len(data) + 1)
        how = rng.randrange(4)
        if how == 0:
            data[at : at + rng.randrange(1, 9)] = b""
        elif how == 1:
            data[at:at] = rng.randbytes(rng.randrange(1, 9)) if hasattr(rng, "randbytes") else b"\xff\x00"
        elif at < len(data):
            data[at] = rng.randrange(256) if how == 2 else data[at] ^ (1 << rng.randrange(8))
    return bytes(data[: rng.randrange(len(data) + 1)] if rng.randrange(4) == 0 else data)


def handshake(rng: random.Random) -> None:
    """Both sides of it, in pieces."""
    for side, right in (
        (Responder(KEY, JOB, bytes), GREETING + bytes(32)),
        (Initiator(KEY, DIALLING, bytes), challenge),
    ):
        data = damage(rng, right)
        while data and side.needs:
            count = min(side.needs, rng.randrange(1, 80))
            side.receive(data[:count])
            data = data[count:]
        assert not side.done


def control_message(rng: random.Random) -> None:
    """Damaged JSON in a damaged frame."""
    for message in MessageReader(messages.MAX_REPORT_BYTES).feed(damage(rng, encode(rng.choice(RIGHT)))):
        assert message["type"] in messages._FIELDS


def header(rng: random.Random) -> None:
    """64 bytes that are read with each message."""
    mine = frames.Header(1, 7, 1, 1, 10, -1, 8, 0)
    theirs = frames.unpack_header((damage(rng, mine.pack()) + bytes(64))[:64])
    # Damage to bytes that are not used makes no other call.
    assert signature.explain_difference(mine, theirs) or theirs == mine
    assert signature.header_text(theirs)


def rendezvous(rng: random.Random) -> None:
    """Ranks that say the right things with wrong contents, or at the wrong time."""
    state = Rendezvous(
        Terms("1", 9.0, 2, tuple(Seat(Slot(rank, 0), "h") for rank in range(rng.randrange(2) * 2)))
    )
    for now in range(rng.randrange(2, 9)):
        message = dict(rng.choice(RIGHT) if rng.randrange(3) else RIGHT[min(now, 5)])
        if rng.randrange(3) == 0:
            message[rng.choice(list(message))] = rng.choice(ODD)
        connection = rng.randrange(2)
        try:
            state.handle(connection, validate(message), float(now))
            state.tick(float(now))
        except ProtocolError:
            state.disconnected(connection, float(now))


def board(rng: random.Random) -> None:
    """Entries that ranks post and wait for: each answer is a message that may be sent."""
    entries = Board()
    for _ in range(rng.randrange(2, 9)):
        message = dict(rng.choice(POSTED))
        if rng.randrange(9) == 0:
            message[rng.choice(list(message))] = rng.choice([*ODD, "\ud800"])
        connection = rng.randrange(3)
        kind = validate(message)["type"]
        if kind not in ("post", "await"):
            raise ProtocolError("the rendezvous gives it to others")
        for action in (entries.posted if kind == "post" else entries.awaited)(connection, message):
            assert validate(action.message)["type"] == "entry" and encode(action.message)
        if rng.randrange(3) == 0:
            entries.left(connection)


def agents(rng: random.Random) -> None:
    """What comes from another host through ssh."""
    for frame in FrameReader().feed(damage(rng, AGENTS)):
        if frame.kind == framing.EVENT:
            event_facts(frame.data)


def numbers_of_ranks(rng: random.Random) -> None:
    """What ranks report for --watch and --report: any valid report can be shown."""
    history, hosts, taken = History(0.0), {0: "here", 1: "there"}, 0
    for second in range(1, 4):
        for rank in (0, 1):
            content = json.loads(report(rank, float(second), steps=second, peers={"0": [9, 9, 0.1, 9, 0.1]}))
            for _ in range(rng.choice((0, 0, 0, 1))):
                peers, kinds = {"1": [1 << 62, 1 << 62, 1e308, 0, 1e308]}, {"\ud800<": [1, 1e308, 1 << 62]}
                odd = rng.choice([*ODD, 1e308, 1 << 62, "\ud800<&", peers, kinds])
                content[rng.choice(list(content))] = odd
            data = json.dumps(content).encode()
            taken += history.take(rank, data if rng.randrange(12) else damage(rng, data), float(second))
    table.table(history, hosts, 4.0, True, True, 20)
    table.line(history, hosts)
    html_report(ReportFacts("train.py", "1", 0.0, 4.0, "it ended"), history, hosts).encode("utf-8", "replace")
    if taken < 6:
        raise ProtocolError("a report is not valid")


def files(rng: random.Random) -> None:
    """What people write."""
    text = damage(rng, rng.choice(TEXTS)).decode("latin-1")
    try:
        parse_hosts(text)
    except ConfigError:
        pass
    parse_hostfile(text, "f")


def flight_record(rng: random.Random) -> None:
    """The records of a failed job, which ``ringrun diagnose`` reads from files: damaged, or odd inside."""
    content = json.loads(json.dumps(FLIGHT))
    places = [content, content["threads"][0], content["lanes"][0], content["lanes"][0]["operations"][0]]
    for _ in range(rng.randrange(3)):
        place = rng.choice(places)
        place[rng.choice(list(place))] = rng.choice([*ODD, "\ud800", "1e999", 1 << 70])
    data = json.dumps(content).encode()
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


class Unnoticed:
    """Stands for a work."""

    def finish(self, error: object = None) -> None:
        pass

    def where(self) -> str:
        return ""


def group_messages(rng: random.Random) -> None:
    """Frames between two ranks of a process group, in any order and about any message."""
    near, far = (fabric.link(1 - rank) for rank, fabric in enumerate(memory_fabrics(2)))
    matcher = Matcher()
    channel = Channel(near, matcher)
    for nbytes in (4, 40_000):
        channel.send((0, 1), memoryview(bytes(nbytes)), Unnoticed())
    for tag in range(2):
        receive = Receive(1, (0, tag), memoryview(bytearray(4)), Unnoticed())
        arrival = matcher.post(receive)
        assert arrival is None
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


def signed_objects(rng: random.Random) -> None:
    """What is unpickled only if its signature is right: objects, functions and results."""
    right = OBJECTS.pack(rng.randrange(9), "broadcast_object", "n").data
    data = damage(rng, right)
    source, name = rng.randrange(2), rng.choice("nm")
    if data != right or (source, name) != (0, "n"):
        with pytest.raises(ProtocolError):
            Objects(SIGNER, 1).verified(data, source, "broadcast_object", name)
    payload = signed(right, SIGNER, *about_call())
    assert verified(damage(rng, payload) + b"x", SIGNER, *about_call()) is None
    assert verified(payload, SIGNER, *about_result(None)) is None


def store_entry(rng: random.Random) -> None:
    """A process group's entry in PyTorch's store, where there is no key to sign it."""
    from ringcomm.torch.distributed._store import _notice_of

    notice = dict(NOTICE)
    if rng.randrange(2):
        notice[rng.choice(list(notice))] = rng.choice([*ODD, "\ud800", [["a", 1 << 70]], [[1]], ["a"]])
    try:
        _notice_of(damage(rng, json.dumps(notice).encode()).decode("latin-1"), "a group")
    except StartupError as problem:
        raise ProtocolError(str(problem)) from None


def words_of_ringrun(rng: random.Random) -> None:
    """Text from anywhere, as it is printed."""
    text = "".join(chr(rng.randrange(0x110000)) for _ in range(rng.randrange(20)))
    shown = visible(text).encode().decode()
    assert not any(ord(character) < 32 and character not in "\t\n" for character in shown)


PARSERS = [
    handshake, control_message, header, rendezvous, board, agents, files, flight_record,
    group_messages, numbers_of_ranks, signed_objects, store_entry, words_of_ringrun,
]  # fmt: skip
REFUSING = (
    handshake, control_message, board, agents, files, flight_record, group_messages,
    numbers_of_ranks, store_entry,
)  # fmt: skip
"""Of these some cases must be refused and some taken, or what is made is not worth trying."""


@pytest.mark.parametrize("parser", PARSERS, ids=lambda parser: parser.__name__)
def test_many(parser):
    if parser is store_entry:
        pytest.importorskip("torch")
        import ringcomm.torch.distributed._store  # noqa: F401
    rng = random.Random(parser.__name__)
    count = max(100, CASES // len(PARSERS))
    refused = 0
    with at_most(1 << 20):
        for _ in range(count):
            try:
                parser(rng)
            except (AuthenticationError, ProtocolError, ConfigError):
                refused += 1
    print(f"{parser.__name__}: {count} cases, {refused} refused")
    assert parser not in REFUSING or 0 < refused < count
