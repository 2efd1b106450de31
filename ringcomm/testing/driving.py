"""Drive the two ends of a fabric from one thread, for checks: bytes one way or both, waits, ends."""

from __future__ import annotations

import threading
from typing import Callable, Iterable, List, Sequence, Tuple

from ..clock import Deadline
from ..transport.base import Fabric, Link, LinkClosed, after

LIMIT_S = 20.0  # a check that takes longer has failed


def raise_if_expired(deadline: Deadline) -> None:
    """Fail if a check has no end."""
    assert not deadline.expired(), f"no end within {deadline.timeout_s:g} s"


def numbered(data: bytes, block: int) -> bytes:
    """Return the data with a counter at the start of every block, which distinguishes blocks."""
    blocks = bytearray(data)
    for number, start in enumerate(range(0, len(blocks) - 4, block)):
        blocks[start : start + 4] = number.to_bytes(4, "little")
    return bytes(blocks)


def pass_on(one: Fabric, other: Fabric, views: Iterable[memoryview], targets: Iterable[memoryview]) -> None:
    """Send the views from one to the other and fill the targets, however many calls it takes."""
    unsent, unfilled = list(views), list(targets)
    deadline = Deadline(LIMIT_S)
    while left(unsent) or left(unfilled):
        if left(unsent):
            unsent = after(unsent, one.link(1).send(unsent))
        else:
            one.link(1).settled()
        unfilled = after(unfilled, other.link(0).recv(unfilled))
        raise_if_expired(deadline)


def send_all(link: Link, data: bytes) -> None:
    """Send a few bytes, for which there is room."""
    unsent = [memoryview(data)]
    deadline = Deadline(LIMIT_S)
    while unsent:
        unsent = after(unsent, link.send(unsent))
        raise_if_expired(deadline)
    while not link.settled():
        raise_if_expired(deadline)


def left(views: Sequence[memoryview]) -> bool:
    """Return whether any of the views has bytes."""
    return any(view.nbytes for view in views)


def recv_exactly(link: Link, count: int) -> bytes:
    """Receive ``count`` bytes, however many calls it takes."""
    buffer = bytearray(count)
    unfilled = [memoryview(buffer)]
    deadline = Deadline(LIMIT_S)
    while left(unfilled):
        unfilled = after(unfilled, link.recv(unfilled))
        raise_if_expired(deadline)
    return bytes(buffer)


def exchange(one: Fabric, other: Fabric, streams: Sequence[bytes], piece: Callable[[], int]) -> List[bytes]:
    """Send both streams at once, sleeping when nothing moves; return the received bytes of each side."""
    fabrics, links = (one, other), (one.link(1), other.link(0))
    unsent = [memoryview(stream) for stream in streams]
    got = [bytearray(), bytearray()]
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
            fabrics[0].wait([links[0]], [links[0]] if unsent[0] else [], 0.01)
            fabrics[1].wait([links[1]], [links[1]] if unsent[1] else [], 0.01)
        raise_if_expired(deadline)
    return [bytes(item) for item in got]


def fill_up(link: Link) -> Tuple[bytes, memoryview]:
    """Send until the link takes nothing for a while; return the taken bytes, and the refused view."""
    block = memoryview(bytes(range(251)) * 4000)
    taken = bytearray()
    deadline = Deadline(LIMIT_S)
    quiet = Deadline(0.05)
    while not quiet.expired():
        start = len(taken) % 251
        count = link.send([block[start:]])
        taken += block[start : start + count]
        if count:
            quiet.restart()
        raise_if_expired(deadline)
    return bytes(taken), block[start:]


def drain(link: Link) -> None:
    """Receive until nothing has come for a while."""
    scratch = [memoryview(bytearray(100_000))]
    quiet = Deadline(0.05)
    while not quiet.expired():
        if link.recv(scratch):
            quiet.restart()


def closed(action: Callable[[], int]) -> LinkClosed:
    """Repeat the action until it finds the link closed."""
    deadline = Deadline(LIMIT_S)
    while True:
        try:
            action()
        except LinkClosed as problem:
            return problem
        raise_if_expired(deadline)


def arrived(fabric: Fabric) -> bool:
    """Return whether a byte has arrived, and take it."""
    return fabric.link(1 - fabric.rank).recv([memoryview(bytearray(1))]) == 1


def wakes(
    fabric: Fabric,
    event: Callable[[], object],
    done: Callable[[], bool],
    timeout_s: float = LIMIT_S,
    writing: bool = False,
) -> None:
    """Check that repeated waits until ``done`` end soon after ``event``, which happens meanwhile."""
    link = fabric.link(1 - fabric.rank)
    timer = threading.Timer(0.05, event)
    timer.start()
    deadline = Deadline(LIMIT_S)
    try:
        while not done():
            fabric.wait([] if writing else [link], [link] if writing else [], timeout_s)
            raise_if_expired(deadline)
    finally:
        timer.join()
    assert deadline.elapsed_s() < LIMIT_S / 2, "it did not wake, but timed out"
