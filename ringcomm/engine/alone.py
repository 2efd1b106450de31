"""The engine of a job of one rank: what is submitted runs at once, in the thread that submits it."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any, Optional

from ..clock import Clock, monotonic
from .observe import Observer, label_of
from .perform import Performer
from .request import Request
from .tracing import FLUSH_S, Sink


class Alone:
    """Runs requests, and tells an observer of them while there is one.

    Args:
        performer: of a job of one rank.
        clock: seconds.
    """

    def __init__(self, performer: Performer, clock: Clock = monotonic) -> None:
        self._performer = performer
        self._clock = clock
        self._observer: Optional[Observer] = None
        self._sink: Optional[Sink] = None
        self._lock = threading.Lock()
        self._unnamed: Counter[int] = Counter()
        self._flushed_s = 0.0

    def observe(self, observer: Optional[Observer], sink: Optional[Sink]) -> None:
        """Tell an observer what happens from now on; None: nobody, and hand over what the last one collected.

        Args:
            sink: takes the events.
        """
        with self._lock:
            if self._observer is not None:
                self._flush(self._observer)
            self._observer = observer
            self._sink = sink or self._sink

    def run(self, request: Request) -> Any:
        """The result of an operation."""
        if self._observer is not None:
            with self._lock:
                if self._observer is not None:
                    return self._run_observed(request, self._observer)
        return self._run(request)

    def _run(self, request: Request) -> Any:
        return self._performer.run([(request.signature, request)])[0]

    def _run_observed(self, request: Request, observer: Observer) -> Any:
        signature = request.signature
        if not signature.name:
            self._unnamed[signature.process_set] += 1
        traced = [(label_of(signature, self._unnamed[signature.process_set]), signature)]
        observer.started(traced)
        self._performer.on_activity = lambda name: observer.activity(traced, name)
        try:
            return self._run(request)
        finally:
            self._performer.on_activity = None
            observer.ended(traced)
            if self._clock() - self._flushed_s >= FLUSH_S:
                self._flush(observer)

    def _flush(self, observer: Observer) -> None:
        self._flushed_s = self._clock()
        events = observer.drain()
        if events and self._sink is not None:
            self._sink(0, events)
