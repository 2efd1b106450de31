"""The engine of a job of one rank: what is submitted runs at once, in the thread that submits it."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any, Optional

from ..collective.weighted import NO_WEIGHTS, Total
from ..errors import Misuse
from .bucket_runner import BucketRunner
from .observer import Observer, Sink, label_of
from .request import Request


class OwnTrace:
    """The timeline of a rank that is alone: every event goes straight to the file's thread."""

    rank = 0

    def __init__(self) -> None:
        self.observer: Optional[Observer] = None
        self._sink: Optional[Sink] = None

    def observe(self, observer: Optional[Observer], sink: Optional[Sink] = None) -> None:
        """Set the observer, or none; what the last one has collected goes to its sink."""
        last, self.observer = self.observer, observer
        if last is not None:
            last.on_added = None
            self._flush(last)
        if sink is not None:
            self._sink = sink
        if observer is not None:
            observer.on_added = self._added

    def settle(self, limit_s: float) -> None:
        """There is no peer to send events to."""

    def stop(self) -> None:
        """There is no thread to end."""

    def _added(self) -> None:
        observer = self.observer
        if observer is not None:
            self._flush(observer)

    def _flush(self, observer: Observer) -> None:
        events = observer.drain()
        if events and self._sink is not None:
            self._sink(0, events)


class SingleRank:
    """Runs requests, and reports them to an observer while there is one."""

    def __init__(self, bucket_runner: BucketRunner) -> None:
        self.trace = OwnTrace()
        self._bucket_runner = bucket_runner
        self._lock = threading.Lock()
        self._unnamed: Counter[int] = Counter()

    def run(self, request: Request) -> Any:
        """The result of an operation."""
        if request.signature.weighted:
            if not request.weight:
                raise Misuse(f"{request.signature.describe(named=False)}: {NO_WEIGHTS}")
            request.total = Total.of([request.weight])
        observer = self.trace.observer
        if observer is None:
            return self._bucket_runner.run([(request.signature, request)])[0]
        with self._lock:
            return self._run_observed(request, observer)

    def _run_observed(self, request: Request, observer: Observer) -> Any:
        signature = request.signature
        if not signature.name:
            self._unnamed[signature.process_set] += 1
        traced = [(label_of(signature, self._unnamed[signature.process_set]), signature)]
        observer.started(traced)
        self._bucket_runner.on_activity = lambda name: observer.activity(traced, name)
        try:
            return self._bucket_runner.run([(signature, request)])[0]
        finally:
            self._bucket_runner.on_activity = None
            observer.ended(traced)
