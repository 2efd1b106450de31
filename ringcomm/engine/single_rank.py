"""The engine of a job of one rank: what is submitted runs at once, in the thread that submits it."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any, Optional

from ..clock import Clock, monotonic
from ..errors import Misuse
from .announcements import no_weight_text
from .bucket_runner import Performer
from .observer import Observer, label_of
from .request import Request
from .tracing import FLUSH_S, Sink


class OwnTrace:
    """The timeline of a rank that is alone: what it collects goes straight to the file.

    Args:
        clock: seconds.

    Attributes:
        observer: who is told what happens, if anybody is.
    """

    rank = 0

    def __init__(self, clock: Clock = monotonic) -> None:
        self.observer: Optional[Observer] = None
        self._clock = clock
        self._sink: Optional[Sink] = None
        self._flushed_s = 0.0

    def observe(self, observer: Optional[Observer], sink: Optional[Sink] = None) -> None:
        """Collect with this one from now on; None: with nobody, and hand over what the last one has.

        Args:
            sink: takes the events.
        """
        last, self.observer = self.observer, observer
        if last is not None:
            last.on_added = None
            self._flush(last)
        if sink is not None:
            self._sink = sink
        if observer is not None:
            observer.on_added = self._added

    def settle(self, limit_s: float) -> None:
        """Nothing is on its way to anybody."""

    def _added(self) -> None:
        observer = self.observer
        if observer is not None and self._clock() - self._flushed_s >= FLUSH_S:
            self._flush(observer)

    def _flush(self, observer: Observer) -> None:
        self._flushed_s = self._clock()
        events = observer.drain()
        if events and self._sink is not None:
            self._sink(0, events)


class Alone:
    """Runs requests, and tells an observer of them while there is one.

    Args:
        performer: of a job of one rank.

    Attributes:
        trace: has the observer.
    """

    def __init__(self, performer: Performer) -> None:
        self.trace = OwnTrace()
        self._performer = performer
        self._lock = threading.Lock()
        self._unnamed: Counter[int] = Counter()

    def run(self, request: Request) -> Any:
        """The result of an operation."""
        if request.signature.weighted:
            if not request.weight:
                raise Misuse(no_weight_text(request.signature.describe()))
            request.total = request.weight
        observer = self.trace.observer
        if observer is None:
            return self._performer.run([(request.signature, request)])[0]
        with self._lock:
            return self._run_observed(request, observer)

    def _run_observed(self, request: Request, observer: Observer) -> Any:
        signature = request.signature
        if not signature.name:
            self._unnamed[signature.process_set] += 1
        traced = [(label_of(signature, self._unnamed[signature.process_set]), signature)]
        observer.started(traced)
        self._performer.on_activity = lambda name: observer.activity(traced, name)
        try:
            return self._performer.run([(signature, request)])[0]
        finally:
            self._performer.on_activity = None
            observer.ended(traced)
