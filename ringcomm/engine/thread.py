"""The engine's thread, and the threads that wait for it.

The thread sleeps unless there is something to do; nothing is sent while nothing is submitted. A thread
that waits for an operation does the engine's work itself, if nobody else is at it: waking another
thread up would cost more than a small collective.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from typing import Any, Callable, List, NamedTuple, Optional, Sequence

from ..clock import Clock, Deadline, give_way, monotonic
from ..collective.progress import Progress
from ..errors import (
    BrokenInvariantError,
    Misuse,
    NotInitializedError,
    Recoverable,
    RingcommError,
    describe_error,
    failed_before,
    fresh_copy,
)
from ..group.failures import FailureReporter
from ..transport.base import Fabric, Stopped
from ..wire.messages import Message
from .bucket_runner import Performer
from .coordinator import Coordinator
from .cycle import Turns
from .observer import Observer
from .operation_history import OperationJournal
from .peer_channels import Limits, Lines, StopWatch
from .request import Handle, Request
from .tracing import Sink
from .waiters import Wait

logger = logging.getLogger("ringcomm.engine")

BLOCKED_S = 0.1
"""How long every thread of a rank must wait before rank 0 is told that nothing more will come."""
LOOK_S = 0.5
"""How often a rank that waits in a transfer listens to the others."""
_BACK_OFF_S = 0.002
"""How often the engine's thread looks whether those who did its work have stopped."""


class Told(NamedTuple):
    """What rank 0 knows of a rank that waits and does nothing else.

    Attributes:
        obeyed: how many orders this rank had obeyed by then; -1: it has not been told.
        for_good: whether no thread is left that could submit anything.
    """

    obeyed: int
    for_good: bool


NOT_TOLD = Told(-1, False)


class Loop:
    """Owns the thread.

    Args:
        orders: the links to rank 0, or on rank 0 to everybody.
        engine: the links for the collectives themselves.
        performer: runs buckets over them.
        coordinator: on rank 0.
        watch: interrupts waits; set as the watch of both fabrics by the caller.
        reporter: tells the rendezvous of lost peers.
        calls: how far this rank is in direct calls.
        hosts: of every rank, for texts.
        on_lost: called when a peer has been reported.
        spin_s: how long to poll while somebody waits.
        limits: how long to be patient with others.
    """

    def __init__(
        self,
        orders: Fabric,
        engine: Fabric,
        performer: Performer,
        coordinator: Optional[Coordinator],
        watch: StopWatch,
        reporter: FailureReporter,
        calls: Callable[[], Progress],
        hosts: Sequence[str],
        on_lost: Callable[[], None],
        spin_s: float = 0.0,
        limits: Limits = Limits(),  # noqa: B008 - a tuple of constants
        clock: Clock = monotonic,
    ) -> None:
        self.rank = orders.rank
        self._orders_fabric = orders
        self._engine_fabric = engine
        self._watch = watch
        self._spin_s = spin_s

        def lost(peer: int, why: str, kind: str) -> BaseException:
            error: BaseException = reporter.report_lost(peer, self._turns.doing(), why, kind)
            on_lost()
            return error

        lines = Lines(orders, hosts, limits, lost, lambda: (calls(), performer.progress()), clock)
        watch.pulse = lines.pulse
        watch.interval_s = min(lines.interval_s, LOOK_S)
        reporter.who_is_heard = lines.divided
        self._reporter = reporter
        note = reporter.note_closed
        self._turns = Turns(orders, lines, performer, coordinator, watch, note, clock)
        self._driving = threading.Lock()
        self._stopped = False
        self._pid = os.getpid()
        orders.make_wakeable()
        engine.make_wakeable()
        self._thread = threading.Thread(target=self._main, name=f"ringcomm-engine-{self.rank}", daemon=True)
        self._thread.start()

    # ---- for all threads ---------------------------------------------------------------------

    def submit(self, request: Request, urgent: bool = False) -> Handle:
        """Accept an operation.

        Args:
            urgent: the caller waits for it at once, so it need not wait for company.

        Raises:
            DuplicateNameError: its name is in use.
            Misuse: the engine has failed or ended.
        """
        turns = self._turns
        request.urgent = urgent
        with turns.lock:
            self._check_usable()
            turns.pending.add(request)
            if turns.journal is not None:
                turns.journal.submitted(request)
            turns.urgent = turns.urgent or urgent
            turns.waiters.submitted()
            busy = turns.busy
        if not busy and not urgent:
            self._orders_fabric.wake()
        return request.handle

    def join(self) -> Handle:
        """Say that this rank has no more to submit; the handle gives the rank that joined last."""
        handle = Handle("join", self.wait)
        with self._turns.lock:
            self._check_usable()
            if self._turns.join is not None:
                raise Misuse("join() was called while an earlier join() is still going on.")
            self._turns.join = handle
            self._turns.outbox.append({"type": "joined"})
        self._orders_fabric.wake()
        return handle

    def pause(self, reason: str) -> None:
        """Say that this rank will be away for a while, on purpose."""
        self._say({"type": "paused", "reason": reason})
        if self._turns.journal is not None:
            self._turns.journal.paused = reason

    def resume(self) -> None:
        """Say that this rank is back."""
        self._say({"type": "resumed"})
        if self._turns.journal is not None:
            self._turns.journal.paused = ""

    def _say(self, message: Message) -> None:
        with self._turns.lock:
            self._check_usable()
            self._turns.outbox.append(message)
        self._orders_fabric.wake()

    def record(self, journal: OperationJournal) -> None:
        """Tell a journal of every operation. Called before the first."""
        self._turns.journal = journal

    def pending(self) -> List[Request]:
        """What is on its way, in the order of submission."""
        with self._turns.lock:
            return self._turns.pending.waiting()

    @property
    def observer(self) -> Optional[Observer]:
        """Who is told what happens, if anybody is."""
        return self._turns.lines.tracing.observer

    def observe(self, observer: Optional[Observer], sink: Optional[Sink] = None) -> None:
        """Tell an observer what happens from now on; None: nobody, and send what the last one collected.

        Args:
            sink: on rank 0, takes the events of all ranks.
        """
        turns, tracing = self._turns, self._turns.lines.tracing
        coordinator = turns.coordinator
        if coordinator is not None:
            coordinator.on_announce = None if observer is None else observer.announced
            coordinator.on_complete = None if observer is None else observer.negotiated
        with turns.lock:
            self._check_usable()
            turns.outbox += tracing.attach(observer, sink)
            if observer is None:
                turns.performer.on_activity = None
        self._orders_fabric.wake()

    def settle(self, limit_s: float) -> None:
        """Wait until what this rank has to say is on its way; on rank 0, until all others have left.

        No other rank has to do anything for it, so none is held up. At most so long.
        """
        deadline = Deadline(limit_s)
        while not deadline.expired() and self._turns.broken is None and not self._turns.settled():
            time.sleep(_BACK_OFF_S)

    def stop(self) -> None:
        """End the thread; what is still pending fails."""
        if os.getpid() != self._pid or self._stopped:
            return
        with self._turns.lock:
            self._stopped = True
            self._watch.stopping = True
        self._orders_fabric.wake()
        self._engine_fabric.wake()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self._reporter.who_is_heard = None
        self._watch.pulse = None
        self._turns.lines.close()

    def _check_usable(self) -> None:
        if os.getpid() != self._pid:
            raise Misuse(
                f"This process is a fork of rank {self.rank} and shares its connections; only process "
                f"{self._pid}, which called ringcomm.init(), may use them."
            )
        if self._stopped:
            raise NotInitializedError(
                "ringcomm has been shut down (shutdown() was called), so there is nobody to talk to. Call "
                "init() again first."
            )
        broken = self._turns.broken
        if isinstance(broken, Recoverable):
            # Whoever submits may be the first of this rank's program to learn of the loss.
            raise fresh_copy(broken)
        if broken is not None:
            raise failed_before(broken) from broken

    # ---- waiting -----------------------------------------------------------------------------

    def wait(self, handle: Handle, timeout_s: Optional[float]) -> None:
        """Wait until a handle is done, and notice if all of this rank's threads do nothing else."""
        turns = self._turns
        with turns.lock:
            turns.waiters.enter(Wait(handle, timeout_s is not None))
        told = False
        try:
            if timeout_s is None and self._driving.acquire(blocking=False):
                try:
                    told = self._drive(handle)
                finally:
                    turns.hand_over()
                    self._driving.release()
            else:
                # Somebody is at it, who may have looked for work a moment before there was ours.
                self._orders_fabric.wake()
                told = self._block(handle, timeout_s)
        finally:
            with turns.lock:
                turns.waiters.leave()
                unfinished = told and not handle.done()
                if unfinished:
                    turns.outbox.append({"type": "unblocked"})
            if unfinished:
                self._orders_fabric.wake()

    def _block(self, handle: Handle, timeout_s: Optional[float]) -> bool:
        """Sleep; whether rank 0 was told that this rank waits and does nothing else."""
        deadline, told = Deadline(timeout_s), NOT_TOLD
        while not handle.block(min(BLOCKED_S, deadline.remaining_s())) and not deadline.expired():
            told = self._tell_if_blocked(told)
        return told != NOT_TOLD

    def _drive(self, handle: Handle) -> bool:
        """Do the engine's work until a handle is done; otherwise as :meth:`_block`."""
        turns = self._turns
        began_s = time.perf_counter()
        moved_s, told = began_s, NOT_TOLD
        with turns.lock:
            turns.busy = True
        while not handle.done() and turns.broken is None:
            if self._guarded(turns.turn):
                moved_s = time.perf_counter()
                continue
            now_s = time.perf_counter()
            if now_s - moved_s < self._spin_s:
                give_way()
                continue
            if now_s - began_s >= BLOCKED_S:
                told = self._tell_if_blocked(told)
                began_s = now_s
            turns.sleep(turns.prepare_to_sleep(BLOCKED_S))
            self._guarded(turns.wake_up)
        handle.block(None)
        return told != NOT_TOLD

    def _tell_if_blocked(self, told: Told) -> Told:
        """Tell rank 0 if this rank waits and does nothing else, once after every orders.

        Rank 0 may issue orders before it hears of that, and must know that they were not taken into
        account: what they run may be what this rank waits for.

        Args:
            told: what it was told last; the result takes its place.
        """
        turns = self._turns
        with turns.lock:
            if not turns.waiters.all_wait():
                return told
            now = Told(turns.obeyed, turns.waiters.none_can_submit())
            if now == told:
                return told
            turns.outbox.append({"type": "blocked", "heard": now.obeyed, "for_good": now.for_good})
        self._orders_fabric.wake()
        return now

    # ---- the thread --------------------------------------------------------------------------

    def _main(self) -> None:
        turns = self._turns
        while turns.broken is None:
            with self._driving:
                self._guarded(turns.wake_up)
                while turns.broken is None and self._guarded(turns.turn):
                    pass
                rest = turns.prepare_to_sleep()
            if turns.broken is None:
                turns.sleep(rest)
            while self._driving.locked():
                # A thread that waits does this one's work. It need not be disturbed by a second.
                time.sleep(_BACK_OFF_S)
                turns.ring_if_needed()

    def _guarded(self, work: Any) -> bool:
        """Do a piece of the engine's work; if it fails, so does the engine."""
        turns = self._turns
        try:
            return bool(work())
        except Stopped:
            turns.fail_all(
                NotInitializedError("ringcomm has been shut down while this operation was on its way.")
            )
        except RingcommError as error:
            turns.fail_all(error)
        except Exception as error:  # noqa: BLE001 - whatever it is, all who wait must learn of it
            logger.exception("the engine of rank %d failed", self.rank)
            self._reporter.note_interrupted(turns.doing(), describe_error(error))
            turns.fail_all(
                BrokenInvariantError(f"engine of rank {self.rank} failed: {type(error).__name__}: {error}")
            )
        except BaseException as error:
            # An interrupt in the thread that was at work: streams may have stopped in mid-message.
            turns.fail_all(self._reporter.note_interrupted(turns.doing(), describe_error(error)))
            raise
        return False
