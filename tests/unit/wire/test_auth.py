"""The handshake: replayed byte by byte, with unauthenticated peers, and with messages sent back or again."""

from __future__ import annotations

import hmac
import re
import struct
from pathlib import Path

import pytest

from ringcomm.errors import AuthenticationError, ProtocolError
from ringcomm.wire import auth
from ringcomm.wire.auth import (
    NOWHERE,
    Admission,
    Claim,
    Initiator,
    Purpose,
    Responder,
    Session,
    Signer,
    describe_place,
    job_digest,
    parting_answer,
    place_of,
)
from ringcomm.wire.messages import MessageReader, encode

KEY, OTHER_KEY = b"k" * 32, b"x" * 32
JOB, OTHER_JOB = job_digest("job"), job_digest("another")
CLAIM = Claim(Purpose.DIRECT, JOB, generation=7, source=2, target=5)
REFUSALS = (AuthenticationError, ProtocolError)


def nonce(letter):
    return lambda count: letter * count


def initiator(key=KEY, claim=CLAIM, letter=b"i"):
    return Initiator(key, claim, nonce(letter))


def responder(key=KEY, job=JOB, letter=b"r"):
    return Responder(key, job, nonce(letter))


def feed(side, data, piece):
    """Give ``data`` to one side in pieces, never more than it needs; (answer, what is left)."""
    answer = b""
    while data and side.needs:
        count = min(piece, side.needs, len(data))
        answer += side.receive(data[:count])
        data = data[count:]
    return answer, data


def shake(one, other, piece=1000):
    """The whole handshake; all bytes that were exchanged."""
    challenge, _ = feed(other, one.greeting, piece)
    proof, _ = feed(one, challenge, piece)
    feed(other, proof, piece)
    return one.greeting, challenge, proof


@pytest.mark.parametrize("piece", [1, 7, 1000])
def test_both_sides_agree_whatever_the_pieces(piece):
    one, other = initiator(), responder()
    assert not hasattr(other, "claim")
    shake(one, other, piece)
    assert one.done and other.done
    assert other.claim == CLAIM
    assert (one.needs, other.needs) == (0, 0)


@pytest.mark.parametrize("bindings", [(b"a" * 32, b""), (b"", b"a" * 32), (b"a" * 32, b"b" * 32)])
def test_a_proof_holds_for_one_certificate_only(bindings):
    """What was said in plain text proves nothing inside TLS, and the other way round."""
    one = Initiator(KEY, CLAIM, nonce(b"i"), bindings[0])
    other = Responder(KEY, JOB, nonce(b"r"), bindings[1])
    with pytest.raises(AuthenticationError, match="does not hold this job's key"):
        shake(one, other)
    assert not one.done and not other.done
    one, other = Initiator(KEY, CLAIM, binding=bindings[0]), Responder(KEY, JOB, binding=bindings[0])
    shake(one, other)
    assert one.done and other.done


@pytest.mark.parametrize("piece", [1, 1000])
def test_a_peer_that_encrypts_reads_that_this_one_does_not(piece):
    other = responder()
    with pytest.raises(ProtocolError, match="it encrypts") as caught:
        feed(other, Admission.of(KEY) + bytes(300), piece)
    assert parting_answer(caught.value) == parting_answer(auth.unencrypted_peer()) != b""
    one = initiator()
    with pytest.raises(AuthenticationError, match="it encrypts its connections"):
        feed(one, parting_answer(caught.value), piece)


def test_an_admission_holds_for_one_key():
    data = Admission.of(KEY)
    admission = Admission(KEY, set())
    admission.receive(data)
    assert admission.needs == 0
    assert Admission.of(KEY) != data, "a nonce makes each differ"
    with pytest.raises(AuthenticationError, match="does not hold this job's key") as caught:
        Admission(b"x" * 32, set()).receive(data)
    answer = parting_answer(caught.value)
    problems = [auth.plain_answer(answer[:length]) for length in range(len(answer) + 1)]
    assert set(problems[:12]) == {None}
    assert all("this process has the wrong one" in str(problem) for problem in problems[12:])


LINK = Claim(Purpose.BACKGROUND, JOB, 3, 7, 2)


@pytest.mark.parametrize("passage", [None, LINK])
@pytest.mark.parametrize("piece", [1, 1000])
def test_every_flipped_bit_of_an_admission_is_refused(piece, passage):
    right = Admission.of(KEY, passage=passage)
    for bit in range(8 * len(right)):
        with pytest.raises(REFUSALS):
            fed(Admission(KEY, set()), flip(right, bit), piece)


def fed(admission, data, piece):
    """The admission after these bytes, and what belongs to those that follow."""
    while admission.needs and data:
        count = min(piece, admission.needs)
        admission.receive(bytes(data[:count]))
        data = data[count:]
    return admission, data


@pytest.mark.parametrize("piece", [1, 1000])
def test_an_admission_to_the_relay_names_the_link(piece):
    used = set()
    data = Admission.of(KEY, passage=LINK)
    admission, rest = fed(Admission(KEY, used), data + b"rest", piece)
    assert (admission.passage, bytes(rest)) == (LINK, b"rest")
    with pytest.raises(ProtocolError, match="copy"):
        fed(Admission(KEY, used), data, piece)
    assert fed(Admission(KEY, used), Admission.of(KEY), piece)[0].passage is None


def test_what_comes_ahead_of_tls_is_refused_at_its_first_wrong_byte():
    for right, wrong in ((b"", b"GET"), (b"", b"\x16\x03\x01"), (b"\x02rc", b"T"), (b"ringco", b"n")):
        admission = Admission(KEY, set())
        admission.receive(right)
        assert admission.needs
        with pytest.raises(ProtocolError, match="does not encrypt"):
            admission.receive(wrong)
    with pytest.raises(AuthenticationError, match="it does not encrypt, and this process does"):
        Admission(KEY, set()).receive(initiator().greeting[:36])


def test_initiator_refuses_a_responder_with_another_key():
    one, other = initiator(), responder(key=OTHER_KEY)
    challenge, _ = feed(other, one.greeting, 1000)
    with pytest.raises(AuthenticationError, match="does not hold this job's key"):
        feed(one, challenge, 1000)
    assert not one.done


def test_responder_refuses_an_initiator_with_another_key():
    cheat, other = initiator(key=OTHER_KEY), responder()
    challenge, _ = feed(other, cheat.greeting, 1000)
    # The cheat ignores that the challenge is not for its key, and answers all the same.
    proof = auth._proof(OTHER_KEY, b"initiator", cheat.greeting, challenge[12:44])
    with pytest.raises(AuthenticationError, match="does not hold this job's key"):
        feed(other, proof, 1000)
    assert not other.done


def test_other_job_is_told_so_on_both_sides():
    one, other = initiator(claim=CLAIM._replace(job=OTHER_JOB)), responder()
    with pytest.raises(AuthenticationError, match="another job") as caught:
        feed(other, one.greeting, 1)
    with pytest.raises(AuthenticationError, match="another job"):
        feed(one, parting_answer(caught.value), 1)


def test_other_version_is_told_so_on_both_sides(monkeypatch):
    monkeypatch.setattr(auth, "PROTOCOL_VERSION", 99)
    one = initiator()
    monkeypatch.undo()
    other = responder()
    here = auth.PROTOCOL_VERSION
    with pytest.raises(ProtocolError, match=f"version 99 of the protocol, not {here}") as caught:
        feed(other, one.greeting, 1000)
    monkeypatch.setattr(auth, "PROTOCOL_VERSION", 99)
    with pytest.raises(
        ProtocolError, match=f"version {here} of ringcomm's protocol and this process version 99"
    ):
        feed(one, parting_answer(caught.value), 1000)


def test_the_documented_version_is_that_of_the_handshake():
    text = (Path(__file__).parents[3] / "docs" / "protocol.md").read_text()
    assert re.findall(r"^Version (\d+)\.|\| version \| (\d+) \|", text, re.MULTILINE) == [
        (str(auth.PROTOCOL_VERSION), ""), *[("", str(auth.PROTOCOL_VERSION))] * 2
    ]  # fmt: skip


def test_reflected_proof_is_worthless():
    """An attacker sends a responder's own proof back to it."""
    one, other = initiator(), responder()
    challenge, _ = feed(other, one.greeting, 1000)
    with pytest.raises(AuthenticationError):
        feed(other, challenge[-32:], 1000)


def test_recorded_initiator_fails_against_a_new_nonce():
    greeting, _, proof = shake(initiator(), responder())
    fresh = responder(letter=b"R")
    feed(fresh, greeting, 1000)
    with pytest.raises(AuthenticationError):
        feed(fresh, proof, 1000)


def test_every_flipped_bit_of_the_handshake_is_refused():
    greeting, challenge, proof = shake(initiator(), responder())
    for position in range(len(challenge) * 8):
        with pytest.raises(REFUSALS):
            feed(initiator(), flip(challenge, position), 1000)
    for position in range(len(greeting) * 8):
        one, other = initiator(), responder()
        with pytest.raises(REFUSALS):
            answer, _ = feed(other, flip(greeting, position), 1000)
            feed(one, answer, 1000)
    for position in range(len(proof) * 8):
        other = responder()
        feed(other, greeting, 1000)
        with pytest.raises(REFUSALS):
            feed(other, flip(proof, position), 1000)


def flip(data, bit):
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def test_unauthenticated_peers_are_refused_at_their_first_wrong_byte():
    for first in (b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01", b"SSH-2.0-OpenSSH", b"\0", b"ringcomX"):
        wrong = next(i for i, byte in enumerate(first) if byte != auth.MAGIC[i])
        for side in (initiator(), responder()):
            assert side.receive(first[:wrong]) == b""
            with pytest.raises(ProtocolError):
                side.receive(first[wrong : wrong + 1])


# ---- sessions of connections, signatures of jobs, and places -------------------------------------


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
        fresh = Session(b"?" * 32, one._sending)
        with pytest.raises(ProtocolError, match="another process has changed it"):
            read(flip(data, bit), fresh)


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
