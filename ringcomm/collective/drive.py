"""The loop around a part of a collective: move available bytes, look again for a while, then sleep."""

from __future__ import annotations

import time
from typing import Callable, Optional

from ..clock import POLLING, Clock, Deadline, monotonic
from ..transport.base import Fabric
from .parts import Part


class StoodStill(TimeoutError):
    """Nothing moved within the time limit. (A program's signal handler may raise a TimeoutError as well.)"""


def run(
    execution: Part,
    fabric: Fabric,
    timeout_s: float,
    spin_s: float = 0.0,  # polling before each sleep; waking a process up costs 50 to 100 us
    may_poll: Optional[Callable[[], bool]] = None,  # whether to poll just now; None: always
    clock: Clock = monotonic,
) -> None:
    """Run a part to its end: poll for a while, then sleep until something can move. Raises StoodStill if
    nothing moved for ``timeout_s``, LinkClosed or MismatchError as :meth:`Part.advance`, RingcommError if the
    watch announced the end of the job.
    """
    if execution.advance():
        return
    quiet = Deadline(timeout_s, clock)
    moved = execution.moved_bytes
    watch = fabric.watch
    interval_s = 3600.0 if watch is None else watch.interval_s
    now_s = time.perf_counter()
    spin_until = POLLING.until(now_s, spin_s) if may_poll is None or may_poll() else now_s
    check_at = now_s + interval_s
    execution.waits_for = ()
    while not execution.advance():
        if execution.moved_bytes != moved:
            moved = execution.moved_bytes
            quiet.restart()
            now_s = time.perf_counter()
            spin_until = POLLING.until(now_s, spin_s) if may_poll is None or may_poll() else now_s
            if watch is not None and now_s >= check_at:
                # A transfer that never stops to wait must not keep this rank from hearing and being heard.
                check_at = now_s + interval_s
                watch.check()
        elif time.perf_counter() < spin_until:
            POLLING.give_way()
        else:
            if quiet.expired():
                raise StoodStill
            reading, writing = execution.waiting_for()
            execution.waits_for = tuple({link.peer for link in reading})
            sleep_s = min(quiet.remaining_s(), interval_s)
            # Asking may send the last bytes that a link had kept. Then all is done, and no peer
            # would wake us up.
            if reading or writing:
                asleep_s = time.perf_counter()
                fabric.wait(reading, writing, sleep_s)
                _note_sleep(execution, time.perf_counter() - asleep_s)
            if watch is not None:
                watch.check()


def _note_sleep(execution: Part, seconds: float) -> None:
    """Record the peers that a part waited to receive from. If it waited only to send, no peer was late."""
    peers, slept_s = execution.waits_for, execution.slept_s
    for peer in peers:
        slept_s[peer] = slept_s.get(peer, 0.0) + seconds / len(peers)
