"""One cycle of the engine's work: announce, receive, decide, execute.

A set of operations that repeats takes a shorter way (:mod:`.repeats`). The threads that repeat cycles are in
:mod:`.thread`. Nothing is sent while nothing is submitted.
"""

from __future__ import annotations

import logging
import threading
from typing import Any, Collection, List, Optional, Sequence, Tuple

import numpy as np

from ..clock import Clock
from ..collective.observe import Progress
from ..errors import MismatchError, NotInitializedError, PeerStalledError, ProtocolError, RingcommError
from ..group.failures import FailureReporter
from ..transport.base import Fabric, Link, StoppableWatch, Stopped
from ..wire.messages import Message
from ..wire.signature import Key
from .bucket_runner import BucketRunner
from .coordinator import Coordinator, RankReports
from .observer import labels_of
from .peer_channels import PeerChannels
from .repeats import Repeats
from .request import Handle, OperationHistory, Pending, Request, unpack
from .stacks import NOTHING_REPORTED, Waiters, main_stack

logger = logging.getLogger("ringcomm.engine")

GIVE_UP_S = 0.1  # how long a rank waits in a repeat before rank 0 is to find out what the others do
_DECIDE_S = 1e-3  # how often a rank that only repeats does the rest of a cycle


Rest = Tuple[Sequence[Link], Sequence[Link], float]
"""What to wait for, and how long: readable links, writable links, seconds."""


class EngineState:
    """The state of one rank's engine; one thread at a time calls the methods but :meth:`sleep`."""

    def __init__(
        self, fabric: Fabric, peers: PeerChannels, bucket_runner: BucketRunner,
        coordinator: Optional[Coordinator], watch: StoppableWatch, reporter: FailureReporter, clock: Clock,
        history: OperationHistory,
    ) -> None:  # fmt: skip
        self.rank = fabric.rank
        self.lock = threading.Lock()
        self.pending = Pending()
        self.waiters = Waiters()
        self.outbox: List[Message] = []
        self.join: Optional[Handle] = None
        self.urgent = False
        self.busy = True
        self.asleep = False
        self.repeats = Repeats(fabric.rank, fabric.size)
        self.broken: Optional[BaseException] = None
        self.executed = 0  # responses
        self.history, self.peers, self.bucket_runner = history, peers, bucket_runner
        self.coordinator = coordinator
        bucket_runner.repeated = self.repeats.all_sets
        bucket_runner.may_poll = lambda: bool(self.waiters.waits)  # otherwise the program computes
        self._fabric, self._watch, self._reporter, self._clock = fabric, watch, reporter, clock
        self._repeat_began_s = 0.0
        self._given_up = (-1, 0)
        self._decide_s = 0.0
        self._skipped = False
        self._responses: List[Message] = []
        self._cut_short: List[Request] = []
        self._reported = NOTHING_REPORTED

    def fail_all(self, error: BaseException) -> None:
        with self.lock:
            self.broken = error
            requests = [*self._cut_short, *self.pending.take_all()]
            self._cut_short.clear()
            self.repeats.current = None
            join, self.join = self.join, None
        self.history.failed(error)
        for request in requests:
            request.finish(error=error)
        if join is not None:
            join.finish(error=error)

    def cycle(self) -> bool:
        """Do what can be done now; whether anything was."""
        peers = self.peers
        self._watch.check_here()
        now_s = self._clock()
        moved = bool(self.pending.unannounced) and self._begin_repeat(now_s)
        hurries = bool(self.outbox or self.pending.unannounced) and self._announce(now_s)
        if self.repeats.current is not None:
            peers.awake = True  # a repeat is between all ranks
            if not moved:
                peers.messages.flush()
        peers.pulse()
        if peers.waits_in:
            self._report_call(peers.waits_in)
            peers.waits_in = None
        received, peers.received = peers.received, []
        moved = moved or hurries or bool(received)
        for peer, message in received:
            hurries = hurries or message["type"] != "repeat"
            self._take(peer, message, now_s)
        current = self.repeats.current
        if current is not None:
            if self._end_repeat():
                moved = True
            elif now_s - self._repeat_began_s >= GIVE_UP_S and current.at != self._given_up:
                # Rank 0 finds out what the others do; it is told whether they are late, or lost.
                self._given_up = current.at
                with self.lock:
                    self.outbox.append({"type": "stuck", "epoch": current.at[0]})
                hurries = True
        repeating = self.repeats.current is not None or moved
        if repeating and not hurries and now_s < self._decide_s and not peers.messages.gone:
            self._skipped = True
            return moved
        self._decide_s, self._skipped = now_s + _DECIDE_S, False
        if self.coordinator is not None:
            self._coordinate(self.coordinator)
        while self._responses:
            moved = True
            self._execute(self._responses.pop(0))
        if peers.messages.gone:
            self._check_gone()  # after what it had sent before it left
        peers.tracing.flush(now_s)
        return moved

    def _take(self, peer: int, message: Message, now_s: float) -> None:
        kind = message["type"]
        if kind == "repeat":
            at, what = (message["epoch"], message["number"]), (message["set"], message["count"])
            self.repeats.take(peer, at, what, message["payload"])
            if self.coordinator is not None:
                self.coordinator.repeat_begun(peer, at, what, now_s)
        elif kind == "explain":
            self.peers.messages.send({"type": "stack", "text": main_stack()})
        elif self.coordinator is not None:
            self.coordinator.take(peer, message, now_s)
        elif peer != 0 or kind not in ("responses", "stop", "negotiate"):
            raise ProtocolError(f"rank {peer} may not send {kind!r} to rank {self.rank}")
        else:
            self._take_decision(message)

    def _take_decision(self, message: Message) -> None:
        """Carry out what rank 0 has decided for all ranks, or note it to be carried out."""
        if message["type"] == "responses":
            self._responses.append(message)
        elif message["type"] == "stop":
            with self.lock:
                self.outbox.append(self.repeats.stop(message["epoch"]))
        else:
            called_off = self.repeats.negotiate(message["epoch"], message["last"])
            if called_off is not None:
                with self.lock:
                    self.pending.unannounced = [*called_off.requests, *self.pending.unannounced]
                    self.urgent = True

    # ---- what repeats -------------------------------------------------------------------------

    def _begin_repeat(self, now_s: float) -> bool:
        """Begin a repeat, if just what repeats is pending; return whether it has begun."""
        if self.peers.tracing.observer is not None:
            return False
        with self.lock:
            if self.outbox or self.join is not None or self.pending.announced:
                return False
            repeat = self.repeats.begin(self.pending.unannounced)
            if repeat is None:
                return False
            self.pending.unannounced = []
            self.urgent = False
        for request in repeat.requests:
            request.began_s = now_s
        self._repeat_began_s = now_s
        self.peers.messages.send_repeat(repeat.message, repeat.elements.view(np.uint8).data)
        if self.coordinator is not None:
            self.coordinator.repeat_begun(self.rank, repeat.at, repeat.what, now_s)
        return True

    def _end_repeat(self) -> bool:
        """End the repeat under way if all elements have arrived; return whether they have."""
        ended = self.repeats.end()
        if ended is None:
            return False
        self.bucket_runner.count += 1
        ended.set.total.runs += 1
        ended.set.total.took_s += self._clock() - self._repeat_began_s
        with self.lock:
            for request in ended.requests:
                self.pending.take(request.key)
        for request in ended.requests:
            request.finish()
        return True

    # ---- rank 0 ---------------------------------------------------------------------------------

    def _report_call(self, calls: Progress) -> None:
        """Report to rank 0 if this rank does nothing but wait in a direct call."""
        with self.lock:
            report = self.waiters.report(self.executed, calls)
            if report.for_good and report != self._reported:
                self._reported = report
                self.outbox.append(report.message())

    def _coordinate(self, coordinator: Coordinator) -> None:
        responses = coordinator.decide(self._clock())
        if coordinator.deadlock:
            raise self._reporter.report_mismatch(self.rank, coordinator.deadlock)
        self._look_for_late(coordinator.reports)
        if coordinator.reports.warnings:
            self._report(coordinator.reports)
        decisions, coordinator.to_all = coordinator.to_all, []
        for decision in decisions + ([] if responses is None else [responses]):
            self.peers.messages.send(decision)
            self._take_decision(decision)

    def _report(self, reports: RankReports) -> None:
        """Log what rank 0 has noticed, and ask the ranks that do not come where they are."""
        for text in reports.warnings:
            logger.warning("%s", text)
        reports.warnings.clear()
        for rank in reports.to_explain:
            if rank == self.rank:
                reports.take_stack(rank, main_stack())
            else:
                self.peers.messages.send({"type": "explain"}, [rank])
        reports.to_explain.clear()

    def _look_for_late(self, reports: RankReports) -> None:
        """Direct calls to which some ranks do not come. (What has a name is the coordinator's affair.)"""
        late = self.peers.progress_reports.late(reports.paused, self._clock())
        if late is None:
            return
        if late.given_up:
            why = f"{late.text}, and is given up (RINGCOMM_LATE_AFTER sets the limit)"
            raise self.peers.lost(
                late.ranks[0], f"{why}. {reports.stack_of(late.ranks[0])}".rstrip(". "), "late"
            )
        reports.warn(f"{late.text}.", late.ranks)

    def _announce(self, now_s: float) -> bool:
        """Tell rank 0 what is new. What is added meanwhile wakes a thread that sleeps to another cycle."""
        with self.lock:
            ready = self.pending.announce(self.urgent or bool(self.waiters.waits), self.rank)
            self.urgent = False
            messages, self.outbox = self.outbox, []
        worked = ready is not None or bool(messages)
        # The timeline's first: what is announced may be the barrier behind which rank 0 closes it. The others
        # last: an announcement says that this rank is not blocked, and one of them may say that it is.
        for message in messages:
            if message["type"] in ("trace", "clock"):
                self.peers.tracing.deliver(message)
        messages = [message for message in messages if message["type"] not in ("trace", "clock")]
        for message in messages if ready is None else [ready, *messages]:
            if self.coordinator is None:
                self.peers.messages.send(message)
            else:
                self.coordinator.take(0, message, now_s)
        return worked

    # ---- between cycles -------------------------------------------------------------------------

    def prepare_to_sleep(self, most_s: float = 3600.0, thread: bool = False) -> Rest:
        """Return what to wait for, and how long (0.0: there is work); later submissions wake the sleeper."""
        timeout_s, current = min(most_s, self.peers.alarm_s()), self.repeats.current
        if current is not None and current.at != self._given_up:
            timeout_s = min(timeout_s, max(0.0, self._repeat_began_s + GIVE_UP_S - self._clock()))
        if self.coordinator is not None:
            alarm_s = self.coordinator.next_alarm_s(self._clock())
            timeout_s = timeout_s if alarm_s is None else min(timeout_s, alarm_s)
        reading, writing = self.peers.messages.waiting_for()
        self._decide_s = 0.0
        with self.lock:
            self.busy, self.asleep = False, thread
            return reading, writing, 0.0 if self._skipped or self._has_work() else timeout_s

    def sleep(self, rest: Rest) -> None:
        """Wait for the links. The one part that another thread may run meanwhile."""
        if rest[2] > 0.0:
            self._fabric.wait(*rest)

    def wake_up(self) -> None:
        """Begin a cycle, after sleeping."""
        with self.lock:
            self.busy = True
        self.peers.messages.flush()
        self.peers.awake = True
        self._watch.check()

    def hand_over(self) -> bool:
        """The calling thread does not go on; return whether the engine's must do so at once."""
        alarm_s = None if self.coordinator is None else self.coordinator.next_alarm_s(self._clock())
        with self.lock:
            self.busy = False
            left = bool(self.pending.requests or self.outbox) or self.join is not None
            return left or alarm_s is not None or len(self.waiters.waits) > 1

    def wake_if_needed(self) -> None:
        """Wake the thread at work, if something was submitted that it may not have seen."""
        with self.lock:
            needed = self._has_work()
        if needed:
            self._fabric.wake()

    def _has_work(self) -> bool:
        return bool(self.outbox or self.pending.unannounced)

    def _check_gone(self) -> None:
        """A link has ended: that matters if an operation needs the peer, or if it sent no goodbye."""
        gone = self.peers.messages.gone
        for peer in self.repeats.missing():
            if peer in gone:
                raise self.peers.lost(peer, gone[peer], "lost")
        nearest = {peer: reason for peer, reason in gone.items() if peer in self.peers.messages.nearest}
        if nearest and self._is_waiting(nearest):
            peer, reason = next(iter(nearest.items()))
            raise self.peers.lost(peer, reason, "lost")
        self.peers.note_closed(self._reporter)

    def _is_waiting(self, gone: Collection[int]) -> bool:
        with self.lock:
            if self.join is not None:
                return True
            if self.coordinator is None:  # the ranks that have gone include rank 0
                return bool(self.pending.requests)
        return self.coordinator.waits_for(gone)

    def doing(self) -> str:
        """Return what this rank is in the middle of, for messages; empty if it is not."""
        running = self.peers.doing()
        if running:
            return running
        with self.lock:
            waiting = self.pending.waiting()
        return f"{waiting[0].signature.describe(named=False)} {waiting[0].key}" if waiting else ""

    # ---- responses ----------------------------------------------------------------------------

    def _execute(self, responses: Message) -> None:
        with self.lock:
            self.pending.learn(responses["fresh"])
            for epoch, number, ids in responses["repeats"]:
                self.repeats.learn(epoch, number, [self.pending.signatures[item] for item in ids])
        for (process_set, name, count), kind, text, late in responses["failed"]:
            self._fail_one(Key(process_set, name, count), kind, text, late)
        for number, count, text in responses["settled"]:
            self._settle(number, count, text)
        for run in responses["run"]:
            self._run(run)
        if responses["joined"] >= 0:
            with self.lock:
                join, self.join = self.join, None
            if join is not None:
                join.finish(responses["joined"])
        with self.lock:
            self.pending.forget(responses["fresh"])
            self.executed += 1  # their callers are gone

    def _fail_one(self, key: Key, kind: str, text: str, missing: Sequence[int]) -> None:
        with self.lock:
            request = self.pending.take(key)
        if request is None:
            return
        error: RingcommError = MismatchError(text)
        if kind == "stalled":
            error = PeerStalledError(text, rank=missing[0] if missing else None)
            self.history.failed(error)
        request.finish(error=error)

    def _settle(self, number: int, count: int, text: str) -> None:
        """An operation that needs no collective: its result came with the responses."""
        with self.lock:
            signature = self.pending.signatures[number]
            request = self.pending.take(Key(signature.process_set, signature.name, count))
        if request is None:
            return  # of a process set to which this rank does not belong
        request.begin()
        observer = self.peers.tracing.observer
        if observer is not None:
            traced = labels_of([signature], [[number, count]])
            observer.started(traced)
            observer.ended(traced)
        try:
            unpack(request, text)
        except ProtocolError as problem:
            request.finish(error=problem)
            raise
        request.finish()

    def _run(self, run: Sequence[Sequence[Any]]) -> None:
        with self.lock:
            bucket = self.pending.take_bucket(run)
            members = self.bucket_runner.sets.members(bucket[0][0].process_set)
        self.bucket_runner.count += 1
        if self.rank not in members:
            return
        requests = [request for _, request in bucket if request is not None]
        if len(requests) < len(bucket) and self.join is None:  # this rank's program would wait for ever
            missing = next(signature for signature, request in bucket if request is None)
            raise ProtocolError(
                f"Rank 0's responses run {missing.describe(named=False)} {missing.name!r}, which this rank "
                f"({self.rank}) has not submitted."
            )
        for request in requests:
            request.begin()
        observer = self.peers.tracing.observer
        traced = [] if observer is None else labels_of([signature for signature, _ in bucket], run)
        try:
            results = self.bucket_runner.run(bucket, observer, traced)
        except Exception as problem:
            error: Exception = problem
            if isinstance(problem, Stopped):
                error = NotInitializedError("ringcomm has been shut down while this operation was running.")
            for request in requests:
                request.finish(error=error)
            raise
        except BaseException:
            # Ctrl-C in the thread that does the engine's work. Other threads, which may wait for the
            # same operations, get the error of an interrupted rank from fail_all.
            self._cut_short += requests
            raise
        for work, result in zip(bucket, results):
            if work[1] is not None:
                failed = isinstance(result, RingcommError)  # this operation alone, on all ranks
                work[1].finish(None if failed else result, result if failed else None)
