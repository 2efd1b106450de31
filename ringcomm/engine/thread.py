"""The threads that do the engine's work.

A thread that waits for an operation does the engine's work itself, if no other thread does: waking another
thread up would cost more than a small collective. The engine's own thread sleeps unless there is something to
do. A small operation does not wake it at once: a caller probably waits for it soon. If none does within
:data:`PAUSE_S`, the thread does the work.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from operator import attrgetter
from typing import Any, Callable, List, Optional, Sequence

from ..clock import POLLING, Deadline, monotonic
from ..collective.observe import Progress
from ..errors import (
    BrokenInvariantError,
    Misuse,
    NotInitializedError,
    Recoverable,
    RingcommError,
    describe_error,
    failed_before,
    fresh_copy,
    used_in_fork,
)  # fmt: skip
from ..group.failures import FailureReporter
from ..group.operation_queue import Turn
from ..transport.base import Channels, StoppableWatch, Stopped
from ..wire.messages import Message
from ..wire.signature import Key
from .bucket_runner import BucketRunner
from .coordinator import Coordinator
from .cycle import EngineState
from .observer import Observer, Sink
from .peer_channels import PeerChannels, SilenceLimits
from .process_sets import GLOBAL_SET
from .request import Handle, OperationHistory, Request
from .stacks import NOTHING_REPORTED, BlockedReport

logger = logging.getLogger("ringcomm.engine")

BLOCKED_S = 0.1  # how long every thread of a rank must wait before rank 0 is told that nothing more will come
LOOK_S = 0.5  # how often a rank that waits in a transfer listens to the others
PAUSE_S = 0.005
"""How long the engine's thread leaves the work to threads that wait: after one of them has done some, and
after a small operation was submitted."""
SMALL_BYTES = 256 * 1024
"""Of a larger operation the transfer takes longer than to wake the thread, and runs beside the program."""

_nbytes_of = attrgetter("nbytes")


class EngineThread:
    """Owns the thread; ``calls`` returns how far this rank is in direct calls, ``watch`` interrupts waits."""

    def __init__(
        self, channels: Channels, bucket_runner: BucketRunner, coordinator: Optional[Coordinator],
        watch: StoppableWatch, reporter: FailureReporter, calls: Callable[[], Progress],
        hosts: Sequence[str], spin_s: float, limits: SilenceLimits, history: OperationHistory,
    ) -> None:  # fmt: skip
        control = channels.control
        self.rank = control.rank
        self.waited_s = 0.0  # by threads of this rank, for operations
        self._channels, self._watch, self._reporter, self._calls = channels, watch, reporter, calls
        self._spin_s = spin_s

        def lost(peer: int, why: str, kind: str) -> BaseException:
            error: BaseException = reporter.report_lost(peer, self._state.doing(), why, kind)
            channels.direct.wake()
            return error

        peers = PeerChannels(
            control, hosts, limits, lost, lambda: (calls(), bucket_runner.progress()), monotonic
        )
        watch.pulse = peers.pulse
        watch.interval_s = min(peers.interval_s, LOOK_S)
        reporter.heard_and_silent = peers.divided
        self._state = EngineState(
            control, peers, bucket_runner, coordinator, watch, reporter, monotonic, history
        )
        self._turn = Turn(control.wake, PAUSE_S)
        self._stopped = False
        self._pid = os.getpid()
        control.make_wakeable()
        channels.background.make_wakeable()
        self._thread = threading.Thread(target=self._main, name=f"ringcomm-engine-{self.rank}", daemon=True)
        self._thread.start()

    # ---- for all threads ---------------------------------------------------------------------

    def submit(self, request: Request, urgent: bool = False) -> Handle:
        """Accept an operation; an ``urgent`` one does not wait for others to be fused with."""
        state, handle = self._state, request.handle
        request.urgent = urgent
        with state.lock:
            self._check_usable()
            attended = bool(state.waiters.waits) or state.pending.announced
            state.pending.add(request)
            state.history.submitted(request)
            state.urgent = state.urgent or urgent
            state.waiters.submitters.add(threading.get_ident())
            busy, asleep = state.busy, state.asleep
        if not busy and not urgent:
            if attended or sum(map(_nbytes_of, request.arrays)) > SMALL_BYTES:
                self._turn.hurry()
            else:
                self._turn.expect()
                if asleep:
                    self._channels.control.wake()  # to a pause, after which it does the work if no caller has
        return handle

    def join(self) -> Handle:
        """Say that this rank has no more data; the handle gives the rank that joined last, once all have."""
        handle = Handle("join", self.wait)
        with self._state.lock:
            self._check_usable()
            if self._state.join is not None:
                raise Misuse("join() was called while an earlier join() is still going on.")
            self._state.join = handle
            self._state.outbox.append({"type": "joined"})
        self._turn.hurry()
        return handle

    def pause(self, reason: str) -> None:
        """Say that this rank will be away for a while, on purpose."""
        self._queue({"type": "paused", "reason": reason})
        self._state.history.paused = reason

    def resume(self) -> None:
        """Say that this rank is back."""
        self._state.history.paused = ""
        self._queue({"type": "resumed"})

    def _queue(self, message: Message) -> None:
        with self._state.lock:
            self._check_usable()
            self._state.outbox.append(message)
        self._turn.hurry()

    def pending(self) -> List[Request]:
        """Return what is on its way, in the order of submission."""
        with self._state.lock:
            return self._state.pending.waiting()

    def finish_earlier(self, name: str, process_set: int = GLOBAL_SET) -> None:
        """Wait for this rank's own operation of this name, if its program has left it unfinished."""
        with self._state.lock:
            request = self._state.pending.requests.get(Key(process_set, name, 0))
            handle = None if request is None else request.handle
        if handle is not None:
            handle.attend()

    @property
    def observer(self) -> Optional[Observer]:
        return self._state.peers.tracing.observer

    def observe(self, observer: Optional[Observer], sink: Optional[Sink] = None) -> None:
        """Report events from now on to an observer, or none; send what the last one has collected."""
        state = self._state
        if state.coordinator is not None:
            state.coordinator.observer = observer
        with state.lock:
            self._check_usable()
            state.outbox += state.peers.tracing.attach(observer, sink)
        self._turn.hurry()

    def settle(self, limit_s: float) -> None:
        state = self._state
        state.peers.settle(limit_s, lambda: state.outbox, lambda: state.broken)

    def stop(self) -> None:
        """End the thread; what is still pending fails."""
        if os.getpid() != self._pid or self._stopped:
            return
        with self._state.lock:
            self._stopped = True
            self._watch.stopping = True
        self._turn.hurry()
        self._channels.background.wake()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self._reporter.heard_and_silent = None
        self._watch.pulse = None
        self._state.peers.close()

    def _check_usable(self) -> None:
        if os.getpid() != self._pid:
            raise used_in_fork(self.rank, self._pid)
        if self._stopped:
            raise NotInitializedError(
                "ringcomm has been shut down (shutdown() was called), so there are no other ranks. Call "
                "init() again first."
            )
        broken = self._state.broken
        if isinstance(broken, Recoverable):
            # This may be the first place where this rank's program learns of the loss.
            raise fresh_copy(broken)
        if broken is not None:
            raise failed_before(broken) from broken

    # ---- waiting -----------------------------------------------------------------------------

    def wait(self, handle: Handle, timeout_s: Optional[float], reports: bool = True) -> None:
        """Wait until a handle is done; ``reports``: rank 0 may be told that this thread waits."""
        if os.getpid() != self._pid:
            raise used_in_fork(self.rank, self._pid)
        state, waits, told, began_s = self._state, self._state.waiters.waits, False, 0.0
        wait = (threading.get_ident(), handle, timeout_s is not None, reports)
        try:  # Ctrl-C may interrupt every one of these calls.
            with state.lock:
                waits.append(wait)
            began_s = time.perf_counter()
            if timeout_s is None and self._turn.take(at_once=True):
                try:
                    told = self._drive(handle)
                finally:
                    self._turn.give_back(state.hand_over())
            else:
                # Another thread is at work, and may have looked for requests just before this one came.
                self._turn.hurry()
                told = self._block(handle, timeout_s)
        except BaseException as problem:
            if not handle.finished:
                self.abandon(describe_error(problem))
                handle.block(None)  # until no peer can read the operation's arrays any more
            raise
        finally:
            unfinished = told and not handle.finished
            with state.lock:
                if wait in waits:
                    waits.remove(wait)
                if began_s:
                    self.waited_s += time.perf_counter() - began_s
                if unfinished:
                    state.outbox.append({"type": "unblocked"})
            if unfinished:
                self._turn.hurry()

    def abandon(self, why: str) -> None:
        """Fail the engine and the job: an interrupted program may overwrite what this rank contributes."""
        # Also if another thread is in the middle of a collective: its next look at the watch raises this.
        self._watch.interrupted = self._reporter.note_interrupted(self._state.doing(), why)
        self._turn.hurry()
        self._channels.background.wake()

    def _block(self, handle: Handle, timeout_s: Optional[float]) -> bool:
        """Sleep; whether rank 0 was told that this rank waits and does nothing else."""
        deadline, told = Deadline(timeout_s), NOTHING_REPORTED
        while not handle.block(min(BLOCKED_S, deadline.remaining_s())) and not deadline.expired():
            told = self._report_if_blocked(told)
        return told != NOTHING_REPORTED

    def _drive(self, handle: Handle) -> bool:
        """Do the engine's work until a handle is done; otherwise as :meth:`_block`."""
        state = self._state
        began_s = time.perf_counter()
        moved_s, told = began_s, NOTHING_REPORTED
        with state.lock:
            state.busy = True
        while not handle.finished and state.broken is None:
            if self._guarded(state.cycle):
                moved_s = time.perf_counter()
                continue
            now_s = time.perf_counter()
            if now_s < POLLING.until(moved_s, self._spin_s):
                POLLING.give_way()
                continue
            if now_s - began_s >= BLOCKED_S and state.repeats.current is None:
                told = self._report_if_blocked(told)
                began_s = now_s
            state.sleep(state.prepare_to_sleep(BLOCKED_S))
            self._guarded(state.wake_up)
        if not handle.finished:
            handle.block(None)
        return told != NOTHING_REPORTED

    def _report_if_blocked(self, told: BlockedReport) -> BlockedReport:
        """Report to rank 0 that all threads of this rank wait, again after every responses message: what it
        has responded meanwhile may be what this rank waits for. Return what it was ``told`` last.
        """
        state = self._state
        with state.lock:
            if not state.waiters.all_wait():
                return told
            now = state.waiters.report(state.executed, self._calls())
            if now == told:
                return told
            state.outbox.append(now.message())
        self._turn.hurry()
        return now

    # ---- the thread --------------------------------------------------------------------------

    def _main(self) -> None:
        state, turn = self._state, self._turn
        while state.broken is None:
            if turn.wanted:
                state.wake_if_needed()  # This thread may have been woken in place of that one.
            turn.pause()
            with turn:
                self._guarded(state.wake_up)
                while state.broken is None and self._guarded(state.cycle):
                    pass
                rest = state.prepare_to_sleep(thread=True)
            if state.broken is None:
                state.sleep(rest)
            state.asleep = False

    def _guarded(self, work: Any) -> bool:
        """Do a piece of the engine's work; if it fails, so does the engine."""
        state = self._state
        try:
            return bool(work())
        except Stopped:
            state.fail_all(
                NotInitializedError("ringcomm has been shut down while this operation was on its way.")
            )
        except RingcommError as error:
            state.fail_all(error)
        except Exception as error:  # noqa: BLE001 - any error must reach all threads that wait
            logger.exception("the engine of rank %d failed", self.rank)
            self._reporter.note_interrupted(state.doing(), describe_error(error))
            state.fail_all(
                BrokenInvariantError(f"engine of rank {self.rank} failed: {type(error).__name__}: {error}")
            )
        except BaseException as error:
            # An interrupt in the thread that was at work: streams may have stopped in mid-message.
            state.fail_all(self._reporter.note_interrupted(state.doing(), describe_error(error)))
            raise
        return False
