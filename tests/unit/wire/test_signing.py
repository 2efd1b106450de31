"""Sessions of connections, signatures of jobs, and places."""

from __future__ import annotations

import hmac
import struct

import pytest

from ringcomm.errors import AuthenticationError, ProtocolError
from ringcomm.wire.auth import (
    NOWHERE,
    Claim,
    Initiator,
    Purpose,
    Responder,
    describe_place,
    job_digest,
    parting_answer,
    place_of,
)
from ringcomm.wire.messages import MessageReader, encode
from ringcomm.wire.signing import Session, Signer

KEY, JOB = b"k" * 32, job_digest("job")
CLAIM = Claim(Purpose.CONTROL, JOB)
FIRST, SECOND = {"type": "note", "text": "one"}, {"type": "note", "text": "two"}


def ends(place=NOWHERE, there=NOWHERE, binding=b""):
    """Both sessions of a connection, after its handshake."""
    one, other = (
        Initiator(KEY, CLAIM, binding=binding, place=place),
        Responder(KEY, JOB, binding=binding, place=there),
    )
    other.receive(one.receive(other.receive(one.greeting)))
    return one.session, other.session


def read(data, session):
    return list(MessageReader(1000, session).feed(data))


def test_every_flipped_bit_is_noticed():
    one, _ = ends()
    data = encode(FIRST, one)
    for bit in range(32, len(data) * 8, 5):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        fresh = Session(b"?" * 32, one._sending)
        with pytest.raises(ProtocolError, match="another process has changed it"):
            read(bytes(changed), fresh)


@pytest.mark.parametrize(
    "order", [(1, 0), (0, 0), (1,), (0, 1, 1)], ids=["swapped", "repeated", "left out", "repeated later"]
)
def test_order_counts(order):
    one, other = ends()
    assert read(encode({"type": "bye"}, one), other) == [{"type": "bye"}]
    frames = [encode(FIRST, one), encode(SECOND, one)]
    with pytest.raises(ProtocolError, match="does not carry the tag"):
        read(b"".join(frames[index] for index in order), other)


def test_a_message_sent_back_is_refused():
    one, _ = ends()
    with pytest.raises(ProtocolError, match="does not carry the tag"):
        read(encode(FIRST, one), one)


HERE = place_of("10.0.0.1", 4000)


@pytest.mark.parametrize(
    "other",
    [
        place_of("10.0.0.2", 4000), place_of("10.0.0.1", 4001), place_of("::1", 4000), NOWHERE,
        place_of("@ringcomm-1", 0),
    ],
    ids=describe_place,
)  # fmt: skip
def test_another_place_is_refused_on_both_sides(other):
    one, responder = Initiator(KEY, CLAIM, place=other), Responder(KEY, JOB, place=HERE)
    with pytest.raises(AuthenticationError, match="this is 10.0.0.1:4000: the connection") as refused:
        responder.receive(one.greeting)
    assert describe_place(other) in str(refused.value)
    with pytest.raises(AuthenticationError, match="passed on from there") as caught:
        one.receive(parting_answer(refused.value))
    assert describe_place(other) in str(caught.value)


def test_a_place_that_was_changed_on_the_way_spoils_the_proof():
    """A relay may say in the prelude that the right place was dialled; the initiator has the right one."""
    other = place_of("10.9.9.9", 1)
    one, responder = Initiator(KEY, CLAIM, place=other), Responder(KEY, JOB, place=HERE)
    assert one.greeting.count(other) == 1
    challenge = responder.receive(one.greeting.replace(other, HERE))
    with pytest.raises(AuthenticationError, match="does not hold this job's key"):
        one.receive(challenge)


def test_a_signature_is_for_these_bytes_as_just_this():
    signer = Signer(KEY, "job", 3)
    signature = signer.sign(b"data", "object", 1, "name")
    assert len(signature) == Signer.SIGNATURE_BYTES
    assert Signer(KEY, "job", 3).verifies(b"data", signature, "object", 1, "name")
    others = [
        Signer(b"x" * 32, "job", 3).verifies(b"data", signature, "object", 1, "name"),
        Signer(KEY, "bob", 3).verifies(b"data", signature, "object", 1, "name"),
        Signer(KEY, "job", 4).verifies(b"data", signature, "object", 1, "name"),
        signer.verifies(b"datA", signature, "object", 1, "name"),
        signer.verifies(b"data", signature, "object", 2, "name"),
        signer.verifies(b"data", signature, "object", 1, "nam"),
        signer.verifies(b"data", signature, "object", "1", "name"),
        signer.verifies(b"data", signature[:-1], "object", 1, "name"),
        signer.verifies(b"data", b"", "object", 1, "name"),
    ]
    assert not any(others)


@pytest.mark.parametrize("data", [b"", b"x" * 63, b"y" * 5000, memoryview(b"z" * 100)[7:]])
def test_a_signature_is_the_hmac_of_the_protocols_page(data):
    own = hmac.digest(KEY, b"ringcomm signature\0('job', 3)", "sha256")
    text = b"('object', 1, 'n\xc3\xa4me')"
    expected = hmac.digest(own, struct.pack("!Q", len(text)) + text + bytes(data), "sha256")
    signer = Signer(KEY, "job", 3)
    assert [signer.sign(data, "object", 1, "n\u00e4me") for _ in range(2)] == [expected] * 2
