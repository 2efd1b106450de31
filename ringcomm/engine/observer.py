"""Events of the engine, for the timeline. Without an observer they cost nothing."""

from __future__ import annotations

import threading
import time
from typing import Any, Callable, Dict, List, Optional, Protocol, Sequence, Tuple

from ..ops import Collective
from ..wire.signature import Key, Signature

Event = Tuple[str, str, str, float, Optional[Dict[str, Any]]]
"""Tensor, phase (B, E, X, i), activity, microseconds on this rank's clock, arguments."""

Sink = Callable[[int, Sequence[Sequence[Any]]], None]
"""Takes a rank's events."""


def now_us() -> float:
    """The clock of all events: monotonic microseconds."""
    return time.monotonic_ns() / 1000.0


def label_of(signature: Signature, number: int) -> str:
    """Return what an operation is called in reports.

    Horovod's ``allreduce.NAME``, or ``allreduce.noname.3``.
    """
    kind = signature.verb
    if signature.name.startswith(f"{kind}."):
        return signature.name  # adapters' names say the kind already
    return f"{kind}.{signature.name}" if signature.name else f"{kind}.noname.{number}"


def labels_of(signatures: Sequence[Signature], run: Sequence[int]) -> List[Tuple[str, Signature]]:
    """The members of a bucket with their labels; ``run`` is how responses name them."""
    return [(label_of(signature, count), signature) for signature, count in zip(signatures, run[1::2])]


class Observer:
    """Collects events; :meth:`drain` takes them. ``on_added`` is called after each, in any thread."""

    def __init__(self) -> None:
        self.offset_us = 0.0
        self.on_added: Optional[Callable[[], None]] = None
        self._events: List[Event] = []
        self._lock = threading.Lock()
        self._negotiating: Dict[Key, str] = {}

    def _add(self, events: Sequence[Event]) -> None:
        with self._lock:
            self._events += events
        if self.on_added is not None:
            self.on_added()

    def announced(self, key: Key, rank: int, signature: Signature) -> None:
        """On rank 0: an announcement has arrived."""
        now, label = now_us(), label_of(signature, key.number)
        events: List[Event] = []
        if key not in self._negotiating:
            self._negotiating[key] = label
            events.append((label, "B", f"NEGOTIATE_{Collective(signature.kind).name}", now, None))
        events.append((label, "X", str(rank), now, None))
        self._add(events)

    def negotiated(self, key: Key) -> None:
        """On rank 0: all members have announced it, or it has failed."""
        label = self._negotiating.pop(key, None)
        if label is not None:
            self._add([(label, "E", "", now_us(), None)])

    def started(self, bucket: Sequence[Tuple[str, Signature]]) -> None:
        """A bucket begins to run."""
        now = now_us()
        self._add([(label, "B", Collective(signature.kind).name, now, None) for label, signature in bucket])

    def activity(self, bucket: Sequence[Tuple[str, Signature]], name: str) -> None:
        """Something within a bucket begins; with an empty name, what began last ends."""
        now = now_us()
        self._add([(label, "B" if name else "E", name, now, None) for label, _ in bucket])

    def ended(self, bucket: Sequence[Tuple[str, Signature]]) -> None:
        """A bucket has run."""
        now = now_us()
        self._add([
            (label, "E", "", now, {"dtype": "/".join(sorted(set(item.dtypes))), "shape": str(item.shapes)})
            for label, item in bucket
        ])  # fmt: skip

    def call_made(self, label: str) -> None:
        """A call without a name has been made, and waits until it may run."""
        self._add([(label, "B", "QUEUE", now_us(), None)])

    def call_started(self, label: str, activity: str) -> None:
        """A call without a name begins to run."""
        now = now_us()
        self._add([(label, "E", "", now, None), (label, "B", activity, now, None)])

    def call_ended(self, label: str) -> None:
        """It is done, or has failed."""
        self._add([(label, "E", "", now_us(), None)])

    def finish(self) -> None:
        """Nothing more will be observed: end what is open."""
        for key in list(self._negotiating):
            self.negotiated(key)

    @property
    def collected(self) -> bool:
        """Whether :meth:`drain` would give anything."""
        return bool(self._events)

    def drain(self) -> List[List[Any]]:
        """All events since the last time, on rank 0's clock."""
        with self._lock:
            events, self._events = self._events, []
        offset = self.offset_us
        return [
            [name, phase, activity, at + offset, arguments] for name, phase, activity, at, arguments in events
        ]


class EventSource(Protocol):
    """What brings a rank's events to rank 0: an engine, a failure detector, or the trace of a rank alone."""

    rank: int

    @property
    def observer(self) -> Optional[Observer]:
        """The observer that receives this rank's events, if there is one."""

    def observe(self, observer: Optional[Observer], sink: Optional[Sink] = None) -> None:
        """Set the observer, or none (None); on rank 0 the sink takes the events of all ranks."""

    def settle(self, limit_s: float) -> None:
        """Wait for the events that are on their way when this rank leaves; seconds."""

    def stop(self) -> None:
        """End it."""
