"""Which header goes to each peer, and which one must come from it."""

from __future__ import annotations

import pytest

from ringcomm.collective.headers import Headers
from ringcomm.errors import MismatchError
from ringcomm.ops import Collective
from ringcomm.schedule.direct import all_to_all
from ringcomm.schedule.steps import SELF, Recv, Send, exchange_lengths
from ringcomm.wire.frames import NO_OP, NO_ROOT, Header, unpack_header

HEADER = Header(0, 0, Collective.GATHER, NO_OP, 11, NO_ROOT, 0, 99)


def test_lengths_are_sums_by_peer_and_direction():
    steps = [Send(1, 0, 3), Send(1, 5, 6), Recv((1, 2), 3, 5, (1, SELF, 2)), Send(3, 4, 4)]
    assert exchange_lengths(steps) == {1: (4, 2), 2: (0, 2), 3: (0, 0)}


def test_what_goes_to_a_peer_is_what_that_peer_expects():
    bounds = [(0, 1, 3, 6), (0, 4, 9, 15), (0, 7, 15, 24)]  # rank r sends what bounds[r] says
    sides = []
    for rank in range(3):
        counts = [bounds[peer][rank + 1] - bounds[peer][rank] for peer in range(3)]
        into = (0, counts[0], counts[0] + counts[1], sum(counts))
        sides.append(Headers(HEADER, all_to_all(rank, 3, bounds[rank], into), rank))
        sides[rank].stamp(7)
    for rank, peer in ((0, 1), (0, 2), (1, 2), (2, 0)):
        sent = sides[rank].outgoing[peer]
        assert sent == sides[peer].expected[rank]
        assert unpack_header(sent).sends == bounds[rank][peer + 1] - bounds[rank][peer]
        sides[peer].check(rank, memoryview(sent))


@pytest.mark.parametrize(
    "theirs, words",
    [
        ({"sends": 2}, "its message has 2 elements, but 3 are expected here"),
        ({"expects": 1}, "it expects 1 elements, but the message from here has 0"),
        ({"root": 1}, "the root rank"),
        ({"digest": HEADER.digest ^ 1 << 40}, "the list of sizes"),
        ({"digest": HEADER.digest ^ 1}, "the name, and about nothing else"),
    ],
)
def test_what_does_not_fit_is_said(theirs, words):
    headers = Headers(HEADER, [Recv((1,), 0, 3), Send(1, 0, 0)], 0)
    received = HEADER._replace(**{"sends": 3, **theirs}).pack() + b"elements"
    with pytest.raises(MismatchError, match=words) as caught:
        headers.check(1, memoryview(received))
    assert (caught.value.rank, caught.value.peer) == (0, 1)


@pytest.mark.parametrize("codec, words", [(3, "compression='int8'"), (99, "something that this version")])
def test_another_codec(codec, words):
    headers = Headers(HEADER, [Recv((1,), 0, 3), Send(1, 0, 0)], 0)
    received = bytearray(HEADER._replace(sends=3).pack())
    received[11] = codec
    with pytest.raises(MismatchError, match=f"disagree about the compression .*{words}"):
        headers.check(1, memoryview(received))


@pytest.mark.parametrize("place", range(48, 64))
def test_a_byte_that_must_be_zero(place):
    headers = Headers(HEADER, [Recv((1,), 0, 3), Send(1, 0, 0)], 0)
    received = bytearray(HEADER._replace(sends=3).pack())
    received[place] = 1
    with pytest.raises(MismatchError, match="its header is damaged"):
        headers.check(1, memoryview(received))
