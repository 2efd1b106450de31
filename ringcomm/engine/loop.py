"""The engine's one thread: it announces, takes orders, and carries them out.

The thread sleeps unless there is something to do; nothing is sent while nothing is submitted. All
state is guarded by one lock, which is never held while waiting for others.
"""

from __future__ import annotations

import logging
import os
import threading
from typing import Any, Dict, List, Optional, Sequence, Set, Tuple

from ..clock import Clock, monotonic
from ..errors import (
    BrokenInvariantError,
    MismatchError,
    Misuse,
    NotInitializedError,
    PeerStalledError,
    Recoverable,
    RingcommError,
)
from ..transport.base import Fabric, Watch
from ..wire.messages import Message
from .coordinator import Coordinator
from .mailbox import Mailbox
from .observe import Observer, label_of
from .pending import Pending, Work
from .perform import Performer
from .request import Handle, Key, Request, Signature, fresh_copy
from .tracing import Sink, Tracing

logger = logging.getLogger("ringcomm.engine")

BLOCKED_S = 0.1
"""How long every thread of a rank must wait before rank 0 is told that nothing more will come."""
_LONGEST_WAIT_S = 3600.0


class _Stopped(Exception):
    """The engine is to end."""


class StopWatch(Watch):
    """Interrupts the engine's waits when it is to end, besides what interrupts all waits."""

    def __init__(self, inner: Optional[Watch]) -> None:
        self.stopping = False
        self._inner = inner

    def fileno(self) -> int:
        return self._inner.fileno() if self._inner is not None else -1

    def check(self) -> None:
        if self.stopping:
            raise _Stopped
        if self._inner is not None:
            self._inner.check()


class Loop:
    """Owns the thread and the requests of one rank.

    Args:
        orders: the links to rank 0, or on rank 0 to everybody.
        engine: the links for the collectives themselves.
        performer: runs buckets over them.
        coordinator: on rank 0.
        watch: interrupts waits; set as the watch of both fabrics by the caller.
        reporter: tells the rendezvous of lost peers.
        spin_s: how long to poll while somebody waits.
    """

    def __init__(
        self,
        orders: Fabric,
        engine: Fabric,
        performer: Performer,
        coordinator: Optional[Coordinator],
        watch: StopWatch,
        reporter: Any,
        spin_s: float = 0.0,
        clock: Clock = monotonic,
    ) -> None:
        self.rank = orders.rank
        self._orders_fabric = orders
        self._engine_fabric = engine
        self._performer = performer
        self._coordinator = coordinator
        self._watch = watch
        self._reporter = reporter
        self._spin_s = spin_s
        self._clock = clock
        self._mailbox = Mailbox(orders, _peers(orders.rank, orders.size))
        self.tracing = Tracing(self._mailbox, self.rank)
        self._pending = Pending()
        self._lock = threading.Lock()
        self._busy = True
        self._urgent = False
        self._join: Optional[Handle] = None
        self._outbox: List[Message] = []
        self._orders: List[Message] = []
        self._broken: Optional[BaseException] = None
        self._stopped = False
        self._submitters: Set[int] = set()
        self._waiting: Dict[int, int] = {}
        self._pid = os.getpid()
        orders.make_wakeable()
        engine.make_wakeable()
        self._thread = threading.Thread(target=self._main, name=f"ringcomm-engine-{self.rank}", daemon=True)
        self._thread.start()

    # ---- for all threads ---------------------------------------------------------------------

    def submit(self, request: Request, urgent: bool = False) -> Handle:
        """Accept an operation.

        Args:
            urgent: somebody waits for it, so it need not wait for company.

        Raises:
            DuplicateNameError: its name is in use.
            Misuse: the engine has failed or ended.
        """
        handle = request.handle
        with self._lock:
            self._check_usable()
            self._pending.add(request)
            self._urgent = self._urgent or urgent
            self._submitters.add(threading.get_ident())
            busy = self._busy
        if not busy:
            self._orders_fabric.wake()
        return handle

    def join(self) -> Handle:
        """Say that this rank has no more to submit; the handle gives the rank that joined last."""
        handle = Handle("join", self.wait)
        with self._lock:
            self._check_usable()
            if self._join is not None:
                raise Misuse("join() was called while an earlier join() is still going on.")
            self._join = handle
            self._outbox.append({"type": "joined"})
        self._orders_fabric.wake()
        return handle

    def wait(self, handle: Handle, timeout_s: Optional[float]) -> None:
        """Sleep until a handle is done, and notice if all of this rank's threads do nothing else."""
        ident = threading.get_ident()
        with self._lock:
            self._waiting[ident] = self._waiting.get(ident, 0) + 1
        told = False
        try:
            first_s = BLOCKED_S if timeout_s is None else min(BLOCKED_S, timeout_s)
            if handle.block(first_s) or timeout_s is not None and timeout_s <= BLOCKED_S:
                return
            told = self._tell_if_blocked()
            handle.block(None if timeout_s is None else timeout_s - first_s)
        finally:
            with self._lock:
                self._waiting[ident] -= 1
                if not self._waiting[ident]:
                    del self._waiting[ident]
                if told and not handle.done():
                    self._outbox.append({"type": "unblocked"})
            if told and not handle.done():
                self._orders_fabric.wake()

    def _tell_if_blocked(self) -> bool:
        alive = {thread.ident for thread in threading.enumerate()}
        with self._lock:
            self._submitters &= alive
            if not self._submitters <= set(self._waiting):
                return False
            self._outbox.append({"type": "blocked"})
        self._orders_fabric.wake()
        return True

    def pending(self) -> List[Request]:
        """What is on its way, in the order of submission."""
        with self._lock:
            return self._pending.waiting()

    def observe(self, observer: Optional[Observer], sink: Optional[Sink] = None) -> None:
        """Tell an observer what happens from now on; None: nobody, and send what the last one collected.

        Args:
            sink: on rank 0, takes the events of all ranks.
        """
        if self._coordinator is not None:
            self._coordinator.on_announce = None if observer is None else observer.announced
            self._coordinator.on_complete = None if observer is None else observer.negotiated
        with self._lock:
            self._check_usable()
            last, self.tracing.observer = self.tracing.observer, observer
            if observer is None:
                if last is not None:
                    last.finish()
                message = self.tracing.drain(last) if last is not None else None
                self._outbox += [] if message is None else [message]
                self._performer.on_activity = None
            elif self._coordinator is None:
                self._outbox.append(self.tracing.restart())
            if sink is not None:
                self.tracing.sink = sink
        self._orders_fabric.wake()

    def stop(self) -> None:
        """End the thread; what is still pending fails."""
        if os.getpid() != self._pid or self._stopped:
            return
        with self._lock:
            self._stopped = True
            self._watch.stopping = True
        self._orders_fabric.wake()
        self._engine_fabric.wake()
        if threading.current_thread() is not self._thread:
            self._thread.join()

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
        if isinstance(self._broken, Recoverable):
            # Whoever submits may be the first of this rank's program to learn of the loss.
            raise fresh_copy(self._broken)
        if self._broken is not None:
            raise Misuse(
                "This job has failed before; call shutdown(), and init() if it shall start again. The "
                f"failure was: {type(self._broken).__name__}: {self._broken}"
            ) from self._broken

    # ---- the thread --------------------------------------------------------------------------

    def _main(self) -> None:
        try:
            while True:
                if not self._turn():
                    self._sleep()
        except _Stopped:
            self._fail_all(
                NotInitializedError("ringcomm has been shut down while this operation was on its way.")
            )
        except RingcommError as error:
            self._fail_all(error)
        except Exception as error:  # noqa: BLE001 - whatever it is, all who wait must learn of it
            logger.exception("the engine of rank %d failed", self.rank)
            self._fail_all(
                BrokenInvariantError(f"engine of rank {self.rank} failed: {type(error).__name__}: {error}")
            )

    def _fail_all(self, error: BaseException) -> None:
        with self._lock:
            self._broken = error
            requests = self._pending.take_all()
            join, self._join = self._join, None
        for request in requests:
            request.handle.finish(error=error)
        if join is not None:
            join.finish(error=error)

    def _turn(self) -> bool:
        """Do what can be done now; whether anything was."""
        if self._watch.stopping:
            raise _Stopped
        now_s = self._clock()
        moved = self._announce(now_s)
        for peer, message in self._mailbox.receive():
            moved = True
            if self.tracing.take(peer, message):
                continue
            if self._coordinator is None:
                self._orders.append(message)
            else:
                self._coordinator.take(peer, message, now_s)
        if self._mailbox.gone:
            self._check_gone()
        if self._coordinator is not None:
            orders = self._coordinator.decide(self._clock())
            for text in self._coordinator.warnings:
                logger.warning("%s", text)
            self._coordinator.warnings.clear()
            if orders is not None:
                self._mailbox.send(orders)
                self._orders.append(orders)
        while self._orders:
            moved = True
            self._obey(self._orders.pop(0))
        self.tracing.flush(now_s)
        return moved

    def _announce(self, now_s: float) -> bool:
        with self._lock:
            ready = self._pending.announce(self._urgent or bool(self._waiting))
            self._urgent = False
            messages, self._outbox = self._outbox, []
        if ready is not None:
            messages.insert(0, ready)
        for message in messages:
            if message["type"] in ("trace", "clock"):
                self.tracing.deliver(message)
            elif self._coordinator is None:
                self._mailbox.send(message)
            else:
                self._coordinator.take(0, message, now_s)
        return bool(messages)

    def _sleep(self) -> None:
        timeout_s = _LONGEST_WAIT_S
        if self._coordinator is not None:
            alarm_s = self._coordinator.next_alarm_s(self._clock())
            timeout_s = timeout_s if alarm_s is None else alarm_s
        alarm_s = self.tracing.alarm_s(self._clock())
        if alarm_s is not None:
            timeout_s = min(timeout_s, alarm_s)
        with self._lock:
            # What is submitted from here on rings the bell.
            self._busy = False
            if len(self._outbox) or self._pending.unannounced:
                timeout_s = 0.0
        try:
            if timeout_s > 0.0:
                self._orders_fabric.wait(*self._mailbox.waiting_for(), timeout_s)
        finally:
            with self._lock:
                self._busy = True
        self._mailbox.flush()
        self._watch.check()

    def _check_gone(self) -> None:
        """A rank has hung up: that matters if anybody still waits for it."""
        with self._lock:
            waiting = self._pending.waiting()
            idle = not waiting and self._join is None
        if self._coordinator is not None and self._coordinator.waits_for(self._mailbox.gone):
            idle = False
        if idle:
            return
        peer, reason = next(iter(self._mailbox.gone.items()))
        doing = f"{waiting[0].signature.describe()} {waiting[0].key}" if waiting else "waiting for others"
        raise self._reporter.report_lost(peer, doing, reason)

    # ---- orders ------------------------------------------------------------------------------

    def _obey(self, orders: Message) -> None:
        if self.tracing.observer is not None:
            self.tracing.observer.cycle()
        with self._lock:
            self._pending.learn(orders["fresh"])
        for key, kind, text, missing in orders["failed"]:
            self._fail_one(Key(*key), kind, text, missing)
        for run in orders["run"]:
            self._run(run)
        if orders["joined"] >= 0:
            with self._lock:
                join, self._join = self._join, None
            if join is not None:
                join.finish(orders["joined"])
        if orders["forget"]:
            with self._lock:
                self._pending.ids.forget()
                self._outbox.append({"type": "forgot", "epoch": orders["forget"]})

    def _fail_one(self, key: Key, kind: str, text: str, missing: Sequence[int]) -> None:
        with self._lock:
            request = self._pending.take(key)
        if request is not None:
            error: RingcommError = MismatchError(text)
            if kind == "stalled":
                error = PeerStalledError(text, rank=missing[0] if missing else None)
            request.handle.finish(error=error)

    def _run(self, run: Sequence[int]) -> None:
        with self._lock:
            bucket = self._pending.take_bucket(run)
            self._performer.spin_s = self._spin_s if self._waiting else 0.0
        members = self._performer.members(bucket[0][0].process_set)
        if self.rank not in members:
            return
        observer = self.tracing.observer
        traced = _traced(bucket, run) if observer is not None else []
        if observer is not None:
            observer.started(traced)
            self._performer.on_activity = lambda name: observer.activity(traced, name)
        try:
            results = self._performer.run(bucket)
        except BaseException as problem:
            error = problem
            if isinstance(problem, _Stopped):
                error = NotInitializedError("ringcomm has been shut down while this operation was running.")
            for _, request in bucket:
                if request is not None:
                    request.handle.finish(error=error)
            raise
        if observer is not None:
            observer.ended(traced)
        for (_, request), result in zip(bucket, results):
            if request is not None:
                request.handle.finish(result)


def _traced(bucket: Sequence[Work], run: Sequence[int]) -> List[Tuple[str, Signature]]:
    """The members of a bucket under the names that the timeline has for them."""
    return [(label_of(signature, count), signature) for (signature, _), count in zip(bucket, run[1::2])]


def _peers(rank: int, size: int) -> List[int]:
    """Whom the orders' links lead to."""
    return list(range(1, size)) if rank == 0 else [0]
