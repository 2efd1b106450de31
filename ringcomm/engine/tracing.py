"""Brings every rank's events to rank 0, on rank 0's clock.

Clocks are compared as in NTP: a rank asks rank 0 what time it is, and takes the answer that came back
quickest to be from the middle of its way.
"""

from __future__ import annotations

from typing import Any, List, Optional

from ..wire.messages import Message
from .control_messages import ControlMessages
from .observer import Observer, Sink, now_us

FLUSH_S = 0.25
"""How long events are collected before they are sent."""
OWN_FLUSH_S = 0.02
"""The same for rank 0's own, which need no message: programs read the file after a collective, as Horovod's
tests do."""
CLOCK_ASKS = 8
"""How often a rank asks for the time."""


class Tracing:
    """One engine's part in the timeline. Used by the engine's thread, except for :attr:`observer`."""

    def __init__(self, messages: ControlMessages, rank: int) -> None:
        self.observer: Optional[Observer] = None
        self.sink: Optional[Sink] = None
        self._messages = messages
        self._rank = rank
        self._interval_s = FLUSH_S if rank else OWN_FLUSH_S
        self._asked = 0
        self._quickest_us = float("inf")
        self._flushed_s = 0.0

    def ask_time(self) -> Message:
        """The question what time it is on rank 0."""
        self._asked += 1
        return {"type": "clock", "sent_us": now_us(), "there_us": 0.0}

    def attach(self, observer: Optional[Observer], sink: Optional[Sink] = None) -> List[Message]:
        """Collect with another observer, or with none; return what is to be delivered because of that."""
        last, self.observer = self.observer, observer
        if sink is not None:
            self.sink = sink
        if observer is not None:
            # Compare clocks anew.
            self._asked, self._quickest_us = 0, float("inf")
            return [self.ask_time()] if self._rank else []
        if last is None:
            return []
        last.finish()
        message = self.drain(last)
        return [] if message is None else [message]

    def take(self, peer: int, message: Message) -> bool:
        """A message, if it is about the timeline; whether it was."""
        if message["type"] == "trace":
            if self.sink is not None:
                self.sink(peer, message["events"])
        elif message["type"] != "clock":
            return False
        elif self._rank == 0:
            self._messages.send({**message, "there_us": now_us()}, peer)
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
            self._messages.send(self.ask_time())

    def flush(self, now_s: float) -> None:
        """Send what was collected, if it is time."""
        if self.observer is not None and now_s - self._flushed_s >= self._interval_s:
            self._flushed_s = now_s
            message = self.drain(self.observer)
            if message is not None:
                self.deliver(message)

    def drain(self, observer: Observer) -> Optional[Message]:
        """Return what an observer has collected, as a message to rank 0."""
        events: List[List[Any]] = observer.drain()
        return {"type": "trace", "events": events} if events else None

    def deliver(self, message: Message) -> None:
        """Bring a message of :meth:`drain` or :meth:`attach` to rank 0."""
        if self._rank:
            self._messages.send(message)
        elif self.sink is not None:
            self.sink(0, message["events"])

    def alarm_s(self, now_s: float) -> Optional[float]:
        """In how many seconds :meth:`flush` is to be called again."""
        if self.observer is None or not self.observer.collected:
            return None
        return max(0.0, self._flushed_s + self._interval_s - now_s)
