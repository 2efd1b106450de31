"""The contract of transports, as checks to run against them.

Each check takes the two fabrics of a fresh job of two ranks, rank 0's and rank 1's, drives both from
one thread (a second one only to wake a sleeper) and raises AssertionError where the contract of
:mod:`ringcomm.transport.base` is broken. The docstrings are that contract in prose. For another
transport::

    @pytest.mark.parametrize("check", contract.CHECKS)
    def test_contract(check):
        contract.run(check, lambda: my_fabrics(2))
"""

from __future__ import annotations

import random
from typing import Callable, Sequence, Tuple

from ..clock import Deadline, monotonic
from ..transport.base import Fabric, LinkClosed, after
from .driving import (
    LIMIT_S,
    arrived,
    closed,
    drain,
    exchange,
    fill_up,
    left,
    numbered,
    pass_on,
    raise_if_expired,
    recv_exactly,
    send_all,
    wakes,
)

Check = Callable[[Fabric, Fabric], None]
Maker = Callable[[], Sequence[Fabric]]

_MEGABYTES = 3


def run(check: Check, make: Maker) -> None:
    """Run one check on a fresh pair of fabrics, and close them."""
    one, other = make()
    try:
        check(one, other)
    finally:
        one.close()
        other.close()


# ---- bytes -----------------------------------------------------------------------------------


def check_describes_itself(one: Fabric, other: Fabric) -> None:
    """A fabric has its rank and the job's size; a link has its peer and is always the same object."""
    assert (one.rank, one.size, other.rank, other.size) == (0, 2, 1, 2)
    assert one.link(1).peer == 1 and other.link(0).peer == 0
    assert one.link(1) is one.link(1)


def check_nothing_lost_both_ways(one: Fabric, other: Fabric) -> None:
    """Megabytes flow both ways at once, in pieces of odd sizes, without loss, repetition or disorder."""
    rng = random.Random(1)
    data = [rng.getrandbits(8 * 1024).to_bytes(1024, "little") * 1024 * _MEGABYTES for _ in range(2)]
    # A counter in every block distinguishes the blocks.
    streams = [numbered(item, 4093) for item in data]
    got = exchange(one, other, streams, lambda: rng.randrange(1, 300_001))
    assert got == [streams[1], streams[0]]


def check_single_bytes(one: Fabric, other: Fabric) -> None:
    """A view may be as short as a byte, on either side."""
    data = bytes(range(256)) * 8
    assert exchange(one, other, [data, data[::-1]], lambda: 1) == [data[::-1], data]


def check_no_more_than_arrived(one: Fabric, other: Fabric) -> None:
    """What is received may be less than asked for; beyond it the view is left as it was."""
    send_all(one.link(1), b"abc")
    buffer = bytearray(b"." * 10)
    got = 0
    deadline = Deadline(LIMIT_S)
    while got < 3:
        got += other.link(0).recv([memoryview(buffer)[got:]])
        raise_if_expired(deadline)
    assert (got, bytes(buffer)) == (3, b"abc.......")


def check_several_views(one: Fabric, other: Fabric) -> None:
    """Several views are sent, and filled, one after another; empty ones among them change nothing."""
    parts = [b"head", b"", b"x", b"tail of it", b""]
    buffers = [bytearray(0), bytearray(3), bytearray(0), bytearray(1), bytearray(11), bytearray(0)]
    pass_on(one, other, map(memoryview, parts), map(memoryview, buffers))
    assert b"".join(buffers) == b"".join(parts)
    assert bytes(buffers[1]) == b"hea"


def check_many_views(one: Fabric, other: Fabric) -> None:
    """There may be more views than the system takes at once."""
    data = bytes(range(200)) * 10
    for width in (1, 7, 100):
        pieces = [memoryview(data)[i : i + width] for i in range(0, len(data), width)]
        target = bytearray(len(data))
        whole = memoryview(target)
        pass_on(one, other, pieces, [whole[i : i + width] for i in range(0, len(data), width)])
        assert target == data


def check_many_empty_views_first(one: Fabric, other: Fabric) -> None:
    """However many empty views come first, they are not taken for the end of the stream."""
    send_all(one.link(1), b"x")
    target = bytearray(1)
    empty = [memoryview(bytearray(0))] * 40
    assert other.link(0).recv(empty + [memoryview(target)]) in (0, 1)
    assert one.link(1).send(empty + [memoryview(b"")]) == 0


def check_empty_views(one: Fabric, other: Fabric) -> None:
    """Sending or receiving nothing does nothing, whether or not something has arrived."""
    nothing = memoryview(bytearray(0))
    for views in ([nothing], [nothing, nothing]):
        assert one.link(1).send(views) == 0
        assert other.link(0).recv(views) == 0
    send_all(one.link(1), b"abc")
    assert other.link(0).recv([nothing]) == 0
    assert recv_exactly(other.link(0), 3) == b"abc"


def check_read_only_views(one: Fabric, other: Fabric) -> None:
    """What is sent need not be writable."""
    target = bytearray(8)
    pass_on(one, other, [memoryview(b"read"), memoryview(b"only")], [memoryview(target)])
    assert target == b"readonly"


def check_sent_buffer_may_change(one: Fabric, other: Fabric) -> None:
    """As soon as bytes are counted as taken, the caller may overwrite them."""
    data = bytes(range(241)) * 10_000
    buffer = bytearray(data)
    unsent = memoryview(buffer)
    got = bytearray()
    scratch = memoryview(bytearray(50_000))
    deadline = Deadline(LIMIT_S)
    while len(got) < len(data):
        taken = one.link(1).send([unsent]) if unsent else 0
        unsent[:taken] = b"\xff" * taken
        unsent = unsent[taken:]
        got += scratch[: other.link(0).recv([scratch])]
        raise_if_expired(deadline)
    assert got == data


def check_revoked_bytes_never_arrive(one: Fabric, other: Fabric) -> None:
    """What was not counted when a link is revoked never arrives: the caller may overwrite it at once."""
    data = bytes(range(241)) * 20_000
    buffer = bytearray(data)
    taken = one.link(1).send([memoryview(buffer)])
    target = memoryview(bytearray(len(data)))
    # Some of it may have been looked at, but not received, before the lender gives up.
    got = other.link(0).recv([target[: len(data) // 3]])
    if got and taken < len(data):
        taken += one.link(1).send([memoryview(buffer)[taken:]])
    one.link(1).revoke()
    one.link(1).revoke()
    buffer[taken:] = b"\xff" * (len(data) - taken)
    span = Deadline(0.2)
    while got < len(data) and not span.expired():
        got += other.link(0).recv([target[got:]])
    assert target[:got] == data[:got]
    assert got >= taken
    one.close()
    while got < taken:
        got += other.link(0).recv([target[got:]])
    closed(lambda: other.link(0).recv([memoryview(bytearray(1))]))


# ---- nothing to do ---------------------------------------------------------------------------


def check_receiving_does_not_block(one: Fabric, other: Fabric) -> None:
    """Receiving returns 0 at once if nothing has arrived."""
    started_s = monotonic()
    assert other.link(0).recv([memoryview(bytearray(10))]) == 0
    assert other.link(0).recv([memoryview(bytearray(1)), memoryview(bytearray(1))]) == 0
    assert monotonic() - started_s < 1.0


def check_sending_does_not_block(one: Fabric, other: Fabric) -> None:
    """If the peer does not read, sending soon returns 0 instead of blocking; later all bytes arrive."""
    taken, unsent = fill_up(one.link(1))  # which ends only when nothing is taken
    target = bytearray(len(taken) + unsent.nbytes)
    pass_on(one, other, [unsent], [memoryview(target)])
    assert target == taken + bytes(unsent)


# ---- the end ---------------------------------------------------------------------------------


def check_end_comes_after_all_bytes(one: Fabric, other: Fabric) -> None:
    """What was taken before a close is still delivered; only then LinkClosed is raised, every time."""
    taken, _ = fill_up(one.link(1))
    one.close()
    assert recv_exactly(other.link(0), len(taken)) == taken
    for _ in range(2):
        problem = closed(lambda: other.link(0).recv([memoryview(bytearray(10))]))
        assert problem.peer == 0
        assert problem.reason


def check_what_was_read_counts_as_sent(one: Fabric, other: Fabric) -> None:
    """A peer that has received everything may answer and close; the sender still learns that all is taken."""
    data = bytes(range(250)) * 2000
    unsent = [memoryview(data)]
    target = bytearray(len(data))
    unfilled = [memoryview(target)]
    deadline = Deadline(LIMIT_S)
    while left(unfilled):
        unsent = after(unsent, one.link(1).send(unsent)) if unsent else []
        unfilled = after(unfilled, other.link(0).recv(unfilled))
        raise_if_expired(deadline)
    send_all(other.link(0), b"done")
    while not other.link(0).settled():
        raise_if_expired(deadline)
    assert recv_exactly(one.link(1), 4) == b"done"
    other.close()
    while unsent:
        unsent = after(unsent, one.link(1).send(unsent))
        raise_if_expired(deadline)
    assert target == data


def check_end_with_several_views(one: Fabric, other: Fabric) -> None:
    """The end is found by a receive into several views, too."""
    one.close()
    closed(lambda: other.link(0).recv([memoryview(bytearray(1)), memoryview(bytearray(1))]))


def check_sending_to_a_closed_peer(one: Fabric, other: Fabric) -> None:
    """Sending to a peer that has closed raises LinkClosed, at the latest after some bytes, and no signal."""
    one.close()
    for data in ([b"x" * 1000], [b"x", b"y"]):
        views = [memoryview(item) for item in data]
        assert closed(lambda views=views: other.link(0).send(views)).peer == 0  # type: ignore[misc]


def check_own_close(one: Fabric, other: Fabric) -> None:
    """On a link closed at this end nothing can be sent or received; closing again is harmless."""
    link = one.link(1)
    link.close()
    closed(lambda: link.send([memoryview(b"x")]))
    closed(lambda: link.recv([memoryview(bytearray(1))]))
    link.close()
    one.close()


# ---- waiting ---------------------------------------------------------------------------------


def check_wait_times_out(one: Fabric, other: Fabric) -> None:
    """With nothing to do, a wait lasts about as long as its timeout: it may end early, but not always."""
    send_all(other.link(0), b"x")
    assert recv_exactly(one.link(1), 1) == b"x"
    for reading in ([one.link(1)], []):
        waits = 0
        span = Deadline(0.3)
        while not span.expired():
            one.wait(reading, [], min(0.1, span.remaining_s()))
            waits += 1
        assert span.elapsed_s() < 2.0
        assert waits < 50, f"{waits} waits of 0.1 s in 0.3 s: it does not sleep"


def check_wait_of_nothing(one: Fabric, other: Fabric) -> None:
    """A wait of no time returns at once; an endless one is allowed and ends when bytes come."""
    started_s = monotonic()
    one.wait([one.link(1)], [], 0.0)
    assert monotonic() - started_s < 1.0
    wakes(one, lambda: send_all(other.link(0), b"x"), lambda: arrived(one), float("inf"))


def check_wait_wakes_for_bytes(one: Fabric, other: Fabric) -> None:
    """Bytes that arrive end a wait for reading; so do bytes that had arrived before it."""
    wakes(one, lambda: send_all(other.link(0), b"x"), lambda: arrived(one))
    send_all(other.link(0), b"x")
    wakes(one, lambda: None, lambda: arrived(one))


def check_wait_wakes_for_room(one: Fabric, other: Fabric) -> None:
    """A peer that reads ends a wait for writing."""
    _, unsent = fill_up(one.link(1))
    wakes(one, lambda: drain(other.link(0)), lambda: one.link(1).send([unsent]) > 0, writing=True)


def check_wait_wakes_for_the_end(one: Fabric, other: Fabric) -> None:
    """A peer that closes ends a wait for reading."""

    def ended() -> bool:
        try:
            return one.link(1).recv([memoryview(bytearray(1))]) < 0
        except LinkClosed:
            return True

    wakes(one, other.close, ended)


CHECKS: Tuple[Check, ...] = tuple(
    item for name, item in list(globals().items()) if name.startswith("check_") and callable(item)
)
"""All of them."""
