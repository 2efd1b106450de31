"""The supervisor's event loop: descriptors, alarms, and calls from other threads."""

from __future__ import annotations

import selectors
import socket
from collections import deque
from typing import Callable, Deque, Dict, NamedTuple

from ringcomm.clock import Clock

READ, WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE


class _Alarm(NamedTuple):
    due_s: float
    action: Callable[[], None]


class Loop:
    """Waits for whatever comes first. Only :meth:`call` and :meth:`wake` may be used from elsewhere."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._alarms: Dict[str, _Alarm] = {}
        self._calls: Deque[Callable[[], None]] = deque()
        self._selector = selectors.DefaultSelector()
        self._wake_in, self._wake_out = socket.socketpair()
        for end in (self._wake_in, self._wake_out):
            end.setblocking(False)
        self._selector.register(self._wake_in, READ, self._woken)

    def call(self, action: Callable[[], None]) -> None:
        """Have the loop's thread do this soon. For other threads and signal handlers."""
        self._calls.append(action)
        self.wake()

    def wake(self) -> None:
        """Let :meth:`turn` return now."""
        try:
            self._wake_out.send(b"!")
        except OSError:  # full, so it will wake anyway; or closed, so it has ended
            pass

    def _woken(self) -> None:
        try:
            self._wake_in.recv(4096)
        except BlockingIOError:
            pass

    def after(self, name: str, seconds: float, action: Callable[[], None]) -> None:
        """Set an alarm, in place of one with the same name."""
        self._alarms[name] = _Alarm(self.clock() + seconds, action)

    def is_set(self, name: str) -> bool:
        """Whether an alarm is waiting."""
        return name in self._alarms

    def cancel(self, *names: str) -> None:
        """Forget alarms, given by name or by the first word of their names."""
        for name in list(self._alarms):
            if name.split()[0] in names:
                del self._alarms[name]

    def watch(self, descriptor: int, events: int, action: Callable[[], None]) -> None:
        """Call ``action`` when the descriptor is ready; ``events`` 0 stops that. -1 is ignored.

        A descriptor must not be watched any more when it is closed.
        """
        if descriptor >= 0:
            registered = descriptor in self._selector.get_map()
            if events and not registered:
                self._selector.register(descriptor, events, action)
            elif registered and not events:
                self._selector.unregister(descriptor)

    def forget(self, *descriptors: int) -> None:
        """Do not watch these any more."""
        for descriptor in descriptors:
            self.watch(descriptor, 0, lambda: None)

    def turn(self, limit_s: float) -> None:
        """Wait for a descriptor, a call, an alarm, or so many seconds, and act on what came."""
        now = self.clock()
        waits = [limit_s, *(alarm.due_s - now for alarm in self._alarms.values())]
        for key, _ in self._selector.select(0.0 if self._calls else max(0.0, min(waits))):
            key.data()
        while self._calls:
            self._calls.popleft()()
        now = self.clock()
        for name, alarm in list(self._alarms.items()):
            if alarm.due_s <= now and self._alarms.get(name) is alarm:
                del self._alarms[name]
                alarm.action()

    def close(self) -> None:
        """Release its descriptors."""
        self._selector.close()
        self._wake_in.close()
        self._wake_out.close()
