"""Events of the engine, and how they come to rank 0, for the timeline. Without an observer they cost nothing.

Clocks are compared as in NTP: a rank asks rank 0 what time it is, and takes the answer that came back
quickest to be from the middle of its way.
"""

from __future__ import annotations

import threading
import time
from typing import Any, Callable, Dict, List, Optional, Protocol, Sequence, Tuple

from ..ops import Collective
from ..wire.messages import Message
from ..wire.signature import Key, Signature

FLUSH_S = 0.25
"""How long events are collected before they are sent."""
OWN_FLUSH_S = 0.02
"""The same for rank 0's own, which need no message: programs read the file after a collective, as Horovod's
tests do."""
CLOCK_ASKS = 8
"""How often a rank asks for the time."""

Event = Tuple[str, str, str, float, Optional[Dict[str, Any]]]
"""Tensor, phase (B, E, X, i), activity, microseconds on this rank's clock, arguments."""

Sink = Callable[[int, Sequence[Sequence[Any]]], None]
"""Takes a rank's events."""

Send = Callable[[Message, Sequence[int]], None]
"""Sends a message to ranks."""


def now_us() -> float:
    """The clock of all events: monotonic microseconds."""
    return time.monotonic_ns() / 1000.0


def label_of(signature: Signature, number: int) -> str:
    """Return what an operation is called in reports: ``allreduce.NAME``, or ``allreduce.noname.3``."""
    kind = signature.verb
    if signature.name.startswith(f"{kind}."):
        return signature.name  # adapters' names say the kind already
    return f"{kind}.{signature.name}" if signature.name else f"{kind}.noname.{number}"


def labels_of(signatures: Sequence[Signature], run: Sequence[Sequence[Any]]) -> List[Tuple[str, Signature]]:
    """The members of a bucket with their labels; ``run`` is how responses name them."""
    return [(label_of(signature, item[1]), signature) for signature, item in zip(signatures, run)]


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


class Tracing:
    """One engine's part in the timeline. Used by the engine's thread, except for :attr:`observer`."""

    def __init__(self, send: Send, rank: int) -> None:
        self.observer: Optional[Observer] = None
        self._sink: Optional[Sink] = None
        self._send = send
        self._rank = rank
        self._interval_s = FLUSH_S if rank else OWN_FLUSH_S
        self._asked = 0
        self._quickest_us = float("inf")
        self._flushed_s = 0.0

    def _ask_time(self) -> Message:
        self._asked += 1
        return {"type": "clock", "sent_us": now_us(), "there_us": 0.0}

    def attach(self, observer: Optional[Observer], sink: Optional[Sink] = None) -> List[Message]:
        """Collect with another observer, or with none; return what is to be delivered because of that."""
        last, self.observer = self.observer, observer
        if sink is not None:
            self._sink = sink
        if observer is not None:
            # Compare clocks anew.
            self._asked, self._quickest_us = 0, float("inf")
            return [self._ask_time()] if self._rank else []
        if last is None:
            return []
        last.finish()
        return [{"type": "trace", "events": last.drain()}] if last.collected else []

    def take(self, peer: int, message: Message) -> bool:
        """A message, if it is about the timeline; whether it was."""
        if message["type"] == "trace":
            if self._sink is not None:
                self._sink(peer, message["events"])
        elif message["type"] != "clock":
            return False
        elif self._rank == 0:
            self._send({**message, "there_us": now_us()}, [peer])
        else:
            self._learn_time(message)
        return True

    def _learn_time(self, answer: Message) -> None:
        now = now_us()
        took_us = now - float(answer["sent_us"])
        if self.observer is not None and took_us < self._quickest_us:
            self._quickest_us = took_us
            self.observer.offset_us = float(answer["there_us"]) + took_us / 2.0 - now
        if self._asked < CLOCK_ASKS:
            self._send(self._ask_time(), [0])

    def flush(self, now_s: float) -> None:
        """Send what was collected, if it is time."""
        observer = self.observer
        if observer is not None and now_s - self._flushed_s >= self._interval_s:
            self._flushed_s = now_s
            if observer.collected:
                self.deliver({"type": "trace", "events": observer.drain()})

    def deliver(self, message: Message) -> None:
        """Bring a message of :meth:`attach` to rank 0."""
        if self._rank:
            self._send(message, [0])
        else:
            self.take(0, message)

    def alarm_s(self, now_s: float) -> Optional[float]:
        """In how many seconds :meth:`flush` is to be called again."""
        if self.observer is None or not self.observer.collected:
            return None
        return max(0.0, self._flushed_s + self._interval_s - now_s)


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
            observer.on_added = lambda: self._flush(observer)

    def _flush(self, observer: Observer) -> None:
        events = observer.drain()
        if events and self._sink is not None:
            self._sink(0, events)

    def settle(self, limit_s: float) -> None:
        """There is no peer to send events to."""

    def stop(self) -> None:
        """There is no thread to end."""
