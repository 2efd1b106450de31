"""The contract of transports, as checks to run against them.

Each check takes the two fabrics of a fresh job of two ranks, rank 0's and rank 1's, drives both from
one thread (a second one only to wake a sleeper) and raises AssertionError where the contract of
:mod:`ringcomm.transport.base` is broken. The docstrings are that contract in prose::

    @pytest.mark.parametrize("check", contract.CHECKS)
    def test_contract(check):
        contract.run(check, lambda: my_fabrics(2))
"""

from __future__ import annotations

import random
import threading
from typing import Callable, Iterable, List, Sequence, Tuple

from ringcomm.clock import Deadline
from ringcomm.transport.base import Fabric, Link, LinkClosed, after

Check = Callable[[Fabric, Fabric], None]
Maker = Callable[[], Sequence[Fabric]]

LIMIT_S = 20.0  # a check that takes longer has failed
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
    streams = [_numbered(item, 4093) for item in data]
    assert _exchange(one, other, streams, lambda: rng.randrange(1, 300_001)) == [streams[1], streams[0]]


def check_single_bytes(one: Fabric, other: Fabric) -> None:
    """A view may be as short as a byte, on either side."""
    data = bytes(range(256)) * 8
    assert _exchange(one, other, [data, data[::-1]], lambda: 1) == [data[::-1], data]


def check_no_more_than_arrived(one: Fabric, other: Fabric) -> None:
    """What is received may be less than asked for; beyond it the view is left as it was."""
    _send_all(one.link(1), b"abc")
    buffer, got, deadline = bytearray(b"." * 10), 0, Deadline(LIMIT_S)
    while got < 3:
        got += other.link(0).recv([memoryview(buffer)[got:]])
        _raise_if_expired(deadline)
    assert (got, bytes(buffer)) == (3, b"abc.......")


def check_several_views(one: Fabric, other: Fabric) -> None:
    """Several views, which need not be writable, are sent, and filled, one after another; empty ones among
    them change nothing, and there may be more than the system takes at once.
    """
    parts = [b"head", b"", b"x", b"tail of it", b""]
    buffers = [bytearray(0), bytearray(3), bytearray(0), bytearray(1), bytearray(11), bytearray(0)]
    _pass_on(one, other, map(memoryview, parts), map(memoryview, buffers))
    assert b"".join(buffers) == b"".join(parts)
    data = bytes(range(200)) * 10
    for width in (1, 7):
        target = bytearray(len(data))
        cuts = range(0, len(data), width)
        pieces = [[view[i : i + width] for i in cuts] for view in (memoryview(data), memoryview(target))]
        _pass_on(one, other, *pieces)
        assert target == data


def check_empty_views(one: Fabric, other: Fabric) -> None:
    """Sending or receiving nothing does nothing, whether or not something has arrived; however many empty
    views come first, they are not taken for the end of the stream.
    """
    nothing = memoryview(bytearray(0))
    for views in ([nothing], [nothing] * 40):
        assert one.link(1).send(views) == 0
        assert other.link(0).recv(views) == 0
    _send_all(one.link(1), b"abc")
    assert other.link(0).recv([nothing]) == 0
    target = bytearray(1)
    got = other.link(0).recv([*[nothing] * 40, memoryview(target)])
    assert bytes(target[:got]) + _recv_exactly(other.link(0), 3 - got) == b"abc"


def check_sent_buffer_may_change(one: Fabric, other: Fabric) -> None:
    """As soon as bytes are counted as taken, the caller may overwrite them."""
    data = bytes(range(241)) * 10_000
    unsent, got, scratch = memoryview(bytearray(data)), bytearray(), memoryview(bytearray(50_000))
    deadline = Deadline(LIMIT_S)
    while len(got) < len(data):
        taken = one.link(1).send([unsent]) if unsent else 0
        unsent[:taken] = b"\xff" * taken
        unsent = unsent[taken:]
        got += scratch[: other.link(0).recv([scratch])]
        _raise_if_expired(deadline)
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
    _closed(lambda: other.link(0).recv([memoryview(bytearray(1))]))


# ---- nothing to do ---------------------------------------------------------------------------


def check_receiving_does_not_block(one: Fabric, other: Fabric) -> None:
    """Receiving returns 0 at once if nothing has arrived."""
    assert other.link(0).recv([memoryview(bytearray(10))]) == 0
    assert other.link(0).recv([memoryview(bytearray(1)), memoryview(bytearray(1))]) == 0


def check_sending_does_not_block(one: Fabric, other: Fabric) -> None:
    """If the peer does not read, sending soon returns 0 instead of blocking; later all bytes arrive."""
    taken, unsent = _fill_up(one.link(1))  # which ends only when nothing is taken
    target = bytearray(len(taken) + unsent.nbytes)
    _pass_on(one, other, [unsent], [memoryview(target)])
    assert target == taken + bytes(unsent)


# ---- the end ---------------------------------------------------------------------------------


def check_end_comes_after_all_bytes(one: Fabric, other: Fabric) -> None:
    """What was taken before a close is still delivered; only then LinkClosed is raised, every time."""
    taken, _ = _fill_up(one.link(1))
    one.close()
    assert _recv_exactly(other.link(0), len(taken)) == taken
    for views in ([memoryview(bytearray(10))], [memoryview(bytearray(1)), memoryview(bytearray(1))]):
        problem = _closed(lambda views=views: other.link(0).recv(views))  # type: ignore[misc]
        assert problem.peer == 0
        assert problem.reason


def check_what_was_read_counts_as_sent(one: Fabric, other: Fabric) -> None:
    """A peer that has received everything may answer and close; the sender still learns that all is taken."""
    data = bytes(range(250)) * 2000
    unsent, target = [memoryview(data)], bytearray(len(data))
    unfilled, deadline = [memoryview(target)], Deadline(LIMIT_S)
    while _left(unfilled):
        unsent = after(unsent, one.link(1).send(unsent)) if unsent else []
        unfilled = after(unfilled, other.link(0).recv(unfilled))
        _raise_if_expired(deadline)
    _send_all(other.link(0), b"done")
    assert _recv_exactly(one.link(1), 4) == b"done"
    other.close()
    while unsent:
        unsent = after(unsent, one.link(1).send(unsent))
        _raise_if_expired(deadline)
    assert target == data


def check_sending_to_a_closed_peer(one: Fabric, other: Fabric) -> None:
    """Sending to a peer that has closed raises LinkClosed, at the latest after some bytes, and no signal."""
    one.close()
    for data in ([b"x" * 1000], [b"x", b"y"]):
        views = [memoryview(item) for item in data]
        assert _closed(lambda views=views: other.link(0).send(views)).peer == 0  # type: ignore[misc]


def check_own_close(one: Fabric, other: Fabric) -> None:
    """On a link closed at this end nothing can be sent or received; closing again is harmless."""
    link = one.link(1)
    link.close()
    _closed(lambda: link.send([memoryview(b"x")]))
    _closed(lambda: link.recv([memoryview(bytearray(1))]))
    link.close()
    one.close()


# ---- waiting ---------------------------------------------------------------------------------


def check_wait_times_out(one: Fabric, other: Fabric) -> None:
    """With nothing to do, a wait lasts about as long as its timeout: it may end early, but not always."""
    _send_all(other.link(0), b"x")
    assert _recv_exactly(one.link(1), 1) == b"x"
    for reading in ([one.link(1)], []):
        waits, span = 0, Deadline(0.3)
        while not span.expired():
            one.wait(reading, [], min(0.1, span.remaining_s()))
            waits += 1
        assert waits < 50, f"{waits} waits of 0.1 s in 0.3 s: it does not sleep"


def check_wait_wakes_for_bytes(one: Fabric, other: Fabric) -> None:
    """Bytes that arrive end a wait for reading, also an endless one; so do bytes that had arrived before."""
    one.wait([one.link(1)], [], 0.0)
    _wakes(one, lambda: _send_all(other.link(0), b"x"), lambda: _arrived(one), float("inf"))
    _wakes(one, lambda: _send_all(other.link(0), b"x"), lambda: _arrived(one))
    _send_all(other.link(0), b"x")
    _wakes(one, lambda: None, lambda: _arrived(one))


def check_wait_wakes_for_room(one: Fabric, other: Fabric) -> None:
    """A peer that reads ends a wait for writing."""
    _, unsent = _fill_up(one.link(1))
    _wakes(one, lambda: _drain(other.link(0)), lambda: one.link(1).send([unsent]) > 0, writing=True)


def check_wait_wakes_for_the_end(one: Fabric, other: Fabric) -> None:
    """A peer that closes ends a wait for reading."""

    def ended() -> bool:
        try:
            return one.link(1).recv([memoryview(bytearray(1))]) < 0
        except LinkClosed:
            return True

    _wakes(one, other.close, ended)


CHECKS: Tuple[Check, ...] = tuple(
    item for name, item in list(globals().items()) if name.startswith("check_") and callable(item)
)
"""All of them."""


# ---- driving both ends from one thread -------------------------------------------------------


def _raise_if_expired(deadline: Deadline) -> None:
    assert not deadline.expired(), f"no end within {deadline.timeout_s:g} s"


def _numbered(data: bytes, block: int) -> bytes:
    """Return the data with a counter at the start of every block."""
    blocks = bytearray(data)
    for number, start in enumerate(range(0, len(blocks) - 4, block)):
        blocks[start : start + 4] = number.to_bytes(4, "little")
    return bytes(blocks)


def _left(views: Sequence[memoryview]) -> bool:
    return any(view.nbytes for view in views)


def _pass_on(one: Fabric, other: Fabric, views: Iterable[memoryview], targets: Iterable[memoryview]) -> None:
    """Send the views from one to the other and fill the targets, however many calls it takes."""
    unsent, unfilled = list(views), list(targets)
    deadline = Deadline(LIMIT_S)
    while _left(unsent) or _left(unfilled):
        if _left(unsent):
            unsent = after(unsent, one.link(1).send(unsent))
        unfilled = after(unfilled, other.link(0).recv(unfilled))
        _raise_if_expired(deadline)


def _send_all(link: Link, data: bytes) -> None:
    """Send a few bytes, for which there is room."""
    unsent, deadline = [memoryview(data)], Deadline(LIMIT_S)
    while unsent:
        unsent = after(unsent, link.send(unsent))
        _raise_if_expired(deadline)


def _recv_exactly(link: Link, count: int) -> bytes:
    """Receive ``count`` bytes, however many calls it takes."""
    buffer = bytearray(count)
    unfilled, deadline = [memoryview(buffer)], Deadline(LIMIT_S)
    while _left(unfilled):
        unfilled = after(unfilled, link.recv(unfilled))
        _raise_if_expired(deadline)
    return bytes(buffer)


def _exchange(one: Fabric, other: Fabric, streams: Sequence[bytes], piece: Callable[[], int]) -> List[bytes]:
    """Send both streams at once, sleeping when nothing moves; return the received bytes of each side."""
    fabrics, links = (one, other), (one.link(1), other.link(0))
    unsent, got = [memoryview(stream) for stream in streams], [bytearray(), bytearray()]
    deadline = Deadline(LIMIT_S)
    while any(unsent) or len(got[0]) < len(streams[1]) or len(got[1]) < len(streams[0]):
        moved = 0
        for side in (0, 1):
            taken = links[side].send([unsent[side][: piece()]])
            unsent[side] = unsent[side][taken:]
            target = bytearray(piece())
            came = links[side].recv([memoryview(target)])
            got[side] += target[:came]
            moved += taken + came
        if not moved:
            # Bytes may be on their way inside the system; a wait may not miss their arrival.
            for side in (0, 1):
                fabrics[side].wait([links[side]], [links[side]] if unsent[side] else [], 0.01)
        _raise_if_expired(deadline)
    return [bytes(item) for item in got]


def _fill_up(link: Link) -> Tuple[bytes, memoryview]:
    """Send until the link takes nothing for a while; return the taken bytes, and the refused view."""
    block, taken = memoryview(bytes(range(251)) * 4000), bytearray()
    deadline, quiet = Deadline(LIMIT_S), Deadline(0.05)
    while not quiet.expired():
        start = len(taken) % 251
        count = link.send([block[start:]])
        taken += block[start : start + count]
        if count:
            quiet.restart()
        _raise_if_expired(deadline)
    return bytes(taken), block[len(taken) % 251 :]


def _drain(link: Link) -> None:
    """Receive until nothing has come for a while."""
    scratch, quiet = [memoryview(bytearray(100_000))], Deadline(0.05)
    while not quiet.expired():
        if link.recv(scratch):
            quiet.restart()


def _closed(action: Callable[[], int]) -> LinkClosed:
    """Repeat the action until it finds the link closed."""
    deadline = Deadline(LIMIT_S)
    while True:
        try:
            action()
        except LinkClosed as problem:
            return problem
        _raise_if_expired(deadline)


def _arrived(fabric: Fabric) -> bool:
    """Return whether a byte has arrived, and take it."""
    return fabric.link(1 - fabric.rank).recv([memoryview(bytearray(1))]) == 1


def _wakes(
    fabric: Fabric,
    event: Callable[[], object],
    done: Callable[[], bool],
    timeout_s: float = LIMIT_S,
    writing: bool = False,
) -> None:
    """Check that repeated waits until ``done`` end after ``event``, which happens meanwhile."""
    link = fabric.link(1 - fabric.rank)
    timer = threading.Timer(0.05, event)
    timer.start()
    deadline = Deadline(LIMIT_S)
    try:
        while not done():
            fabric.wait([] if writing else [link], [link] if writing else [], timeout_s)
            _raise_if_expired(deadline)
    finally:
        timer.join()
    assert deadline.elapsed_s() < LIMIT_S / 2, "it did not wake, but timed out"
