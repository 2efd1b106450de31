"""What comes over the network, before and after the proof: only ringcomm's own errors, and little memory."""

from __future__ import annotations

import itertools
import socket
import ssl

import pytest
from hypothesis import strategies as st

from ringcomm.config import Slot
from ringcomm.engine.control_messages import ControlMessages
from ringcomm.engine.coordinator import Coordinator
from ringcomm.engine.cycle import _making_sense
from ringcomm.engine.pending import Pending
from ringcomm.engine.process_sets import ProcessSets
from ringcomm.errors import AuthenticationError, ProtocolError, RingcommError
from ringcomm.rendezvous.actions import Seat
from ringcomm.rendezvous.control import error_from
from ringcomm.rendezvous.measuring import Echo
from ringcomm.rendezvous.state import Rendezvous
from ringcomm.rendezvous.terms import Terms
from ringcomm.storage.certificate import make_certificate
from ringcomm.transport.encryption import encryption_of
from ringcomm.transport.memory import memory_fabrics
from ringcomm.transport.reactor import Reactor
from ringcomm.wire import frames, messages, signature
from ringcomm.wire.auth import Admission, Claim, Initiator, Purpose, Responder, job_digest
from ringcomm.wire.messages import MessageReader, encode, validate
from ringcomm.wire.signing import Session
from tests.fuzz.cases import at_most, control_messages, damaged, fuzz, pieces, small, values

KEY, JOB = b"k" * 32, job_digest("job")
REFUSALS = (AuthenticationError, ProtocolError)
LITTLE_BYTES = 16 * 1024


def portions(data, sizes):
    """The data in pieces."""
    position = 0
    for size in itertools.cycle(sizes):
        if position >= len(data):
            return
        yield data[position : position + size]
        position += size


claims = st.builds(
    Claim, st.integers(0, 9), st.sampled_from([JOB, job_digest("other")]), st.integers(0, 3), small, small
)  # fmt: skip
preludes = claims.map(lambda claim: Initiator(KEY, claim, bytes).greeting)


def converse(side, data, sizes):
    """Give a side of the handshake what it asks for, never more than 124 bytes; whether it refuses."""
    taken = 0
    with at_most(LITTLE_BYTES):
        try:
            for piece in portions(data, sizes):
                while piece and side.needs:
                    count = min(side.needs, len(piece))
                    taken += count
                    assert taken <= 124
                    side.receive(piece[:count])
                    piece = piece[count:]
        except REFUSALS:
            return True
    return False


@fuzz(damaged(preludes) | st.binary(max_size=300), st.binary(max_size=64), pieces)
def test_accepting(first, then, sizes):
    side = Responder(KEY, JOB, bytes)
    converse(side, first + then, sizes)
    assert not side.done


DIALLING = Claim(Purpose.DIRECT, JOB)
challenge = Responder(b"x" * 32, JOB, bytes).receive(Initiator(KEY, DIALLING, bytes).greeting)


@fuzz(damaged(st.just(challenge)) | st.binary(max_size=200), pieces)
def test_dialling(data, sizes):
    side = Initiator(KEY, DIALLING, bytes)
    converse(side, data, sizes)
    assert not side.done


@fuzz(damaged(st.just(Admission.of(KEY, bytes))) | st.binary(max_size=100), pieces)
def test_admission_to_tls(data, sizes):
    """Of all this only the right one is accepted."""
    side = Admission(KEY, set())
    right = Admission.of(KEY, bytes)
    refused = converse(side, data, sizes)
    assert (not refused and not side.needs) == data.startswith(right)


_encryption = []


@fuzz(st.binary(max_size=600), st.integers(0, 600), st.binary(max_size=40), pieces)
def test_accepting_encrypted_connections(noise, position, other, sizes):
    """A real beginning with something else in its middle, or nothing but noise."""
    if not _encryption:
        _encryption.append(encryption_of(make_certificate()))
    hello, sent = ssl.MemoryBIO(), ssl.MemoryBIO()
    with pytest.raises(ssl.SSLWantReadError):
        _encryption[0]._dialling.wrap_bio(hello, sent).do_handshake()
    right = sent.read()
    data = noise if position > len(right) else right[:position] + other + right[position + len(other) :]
    here, there = socket.socketpair()
    here.setblocking(False)
    secured = _encryption[0].wrap(here, accepted=True)
    try:
        for piece in portions(data, sizes):
            there.sendall(piece)
            assert not secured.handshake()
    except (AuthenticationError, ProtocolError, OSError):
        pass
    finally:
        secured.close()
        there.close()


@fuzz(damaged(control_messages().map(encode)) | st.binary(max_size=100), pieces)
def test_control_messages(data, sizes):
    reader = MessageReader(messages.MAX_REPORT_BYTES)
    with at_most(LITTLE_BYTES + 20 * len(data)):
        try:
            for piece in portions(data, sizes):
                for message in reader.feed(piece):
                    assert message["type"] in messages._FIELDS
        except ProtocolError:
            pass


@fuzz(st.lists(control_messages().map(encode), max_size=3).map(b"".join), st.binary(max_size=20), pieces)
def test_messages_between_engines(data, noise, sizes):
    one, other = memory_fabrics(2)
    control = ControlMessages(other, [0])
    try:
        for piece in portions(data + noise, sizes):
            unsent = memoryview(piece)
            while unsent:
                unsent = unsent[one.link(1).send([unsent]) :]
            control.receive()
    except ProtocolError:
        pass
    finally:
        one.close()
        other.close()


REST = frames.HEADER_BYTES - 2


@fuzz(
    st.binary(min_size=frames.HEADER_BYTES, max_size=frames.HEADER_BYTES),
    damaged(st.binary(min_size=REST, max_size=REST)),
)
def test_headers(data, rest):
    mine = frames.Header(1, 7, 1, 1, 10, -1, 8, 0)
    packed = mine.pack()
    for theirs in (data, packed[:2] + rest[:REST].ljust(REST, b"\0")):
        header = frames.unpack_header(theirs)
        assert signature.header_text(header) and signature.explain_difference(mine, header)


@fuzz(values)
def test_what_is_no_message(value):
    try:
        validate(value)
    except ProtocolError:
        pass


@fuzz(control_messages())
def test_announced_errors(message):
    """What a rank makes of the end of the job as it is announced."""
    try:
        message = validate({**message, "type": "abort"})
    except ProtocolError:
        return
    assert isinstance(error_from(message), RingcommError)


def join(rank):
    return {
        "type": "join", "version": "1", "hostname": "h", "pid": rank, "slot": [rank, 0],
        "addresses": [{"iface": "eth0", "address": "10.0.0.1", "port": 1, "kind": "wired"}],
    }  # fmt: skip


attempt = {
    "source": 0, "target": 1, "address": "10.0.0.1", "port": 1, "local": "10.0.0.2", "local_iface": "eth0",
    "remote_iface": "eth0", "kind": "wired", "why": "", "mb_per_s": None,
}  # fmt: skip
RIGHT = [
    join(0), join(1), {"type": "probed", "attempts": [attempt]},
    {"type": "linked", "links": [{"iface": "a", "local": "", "peers": [[1, 1]]}]},
    {"type": "linked", "links": [{"iface": "a", "local": "", "peers": [[0, 0]]}]},
    {"type": "leaving", "reason": "x", "ok": True},
    {"type": "lost", "peer": 1, "doing": "", "why": "", "kind": "lost"},
]  # fmt: skip
STEPS = st.lists(st.tuples(st.integers(0, 2), st.sampled_from(RIGHT) | control_messages()), max_size=12)


@fuzz(st.integers(0, 5), STEPS, st.booleans())
def test_the_rendezvous(right_first, steps, planned):
    """Ranks that say anything, in any order: refusals and aborts, and no other exception."""
    state = Rendezvous(
        Terms("1", 10.0, 2, tuple(Seat(Slot(rank, 0), f"h{rank}") for rank in range(2 * planned)))
    )
    prefix = [(0, RIGHT[0]), (1, RIGHT[1]), (0, RIGHT[2]), (1, RIGHT[2]), (0, RIGHT[3]), (1, RIGHT[4])]
    now = 0.0
    for connection, message in prefix[:right_first] + steps:
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


signatures = st.tuples(
    st.text(max_size=3), small, st.integers(0, 12), st.sampled_from([0, 1, 255, 9]), small,
    st.lists(st.sampled_from(["float32", "int8", "bfloat16", "no", ""]), max_size=2),
    st.lists(st.lists(st.integers(-1, 5), max_size=2), max_size=2), st.floats(), st.just(1.0), st.booleans(),
).map(list)  # fmt: skip
ready = st.fixed_dictionaries({
    "type": st.just("ready"),
    "carried": st.lists(
        st.tuples(small, small, small, st.text(max_size=4) | st.just("AAAA")).map(list), max_size=2
    ),
    "sites": st.lists(st.text(max_size=5) | values, max_size=2),
    "known": st.lists(small | values, max_size=4), "urgent": st.booleans(),
    "weights": st.lists(st.floats() | values, max_size=3),
    "absent": st.lists(st.tuples(st.integers(0, 3), st.text("0123abcx-_ ", max_size=4)) | values, max_size=3),
    "fresh": st.lists(
        st.tuples(signatures | values, small | values, small | values).map(list) | values, max_size=3
    ),
})  # fmt: skip


@fuzz(st.lists(st.tuples(st.integers(0, 1), ready | control_messages()), max_size=6))
def test_the_coordinator(said):
    sets = ProcessSets(0, 2)
    coordinator = Coordinator(["a", "b"], sets.members)
    now = 0.0
    for rank, message in said:
        now += 30.0
        try:
            coordinator.take(rank, validate(message), now)
        except RingcommError:
            continue
        responses = coordinator.decide(now)
        if responses is not None:
            # Every other rank must be able to parse the response.
            assert next(MessageReader(messages.MAX_RESPONSES_BYTES).feed(encode(responses))) is not None


@fuzz(
    st.lists(values | st.tuples(small, signatures).map(list), max_size=3),
    st.lists(values | small, max_size=4),
)
def test_responses(fresh, run):
    pending = Pending()
    try:
        with _making_sense():
            pending.learn(fresh)
            pending.take_bucket(run)
    except RingcommError:
        pass


@fuzz(
    st.lists(st.integers(0, 1 << 32 - 1) | st.sampled_from([1, 3]), max_size=4),
    st.binary(max_size=20),
    pieces,
)
def test_probes(lengths, noise, sizes):
    data = b"".join(length.to_bytes(4, "big") + bytes(min(length, 100)) for length in lengths) + noise
    here, there = socket.socketpair()
    here.setblocking(False)
    reactor, ended = Reactor(), []
    echo = Echo(reactor, here, Session(bytes(32), bytes(32)), 0, ended.append)
    for piece in portions(data, sizes):
        if not ended:
            there.sendall(piece)
            reactor.run_once(0.0)
    reactor.forget(echo.sock)
    reactor.close()
    here.close()
    there.close()
