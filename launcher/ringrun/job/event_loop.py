"""The supervisor's event loop: descriptors, timers, and calls from other threads."""

from __future__ import annotations

import selectors
from collections import deque
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Callable, Deque, Dict, NamedTuple, TypeVar

from ringcomm.clock import Clock
from ringcomm.errors import ConfigError
from ringcomm.transport.wake_up import WakeUp

READ, WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE
_Answer = TypeVar("_Answer")


class _Timer(NamedTuple):
    due_s: float
    action: Callable[[], None]


class Loop:
    """An event loop. Only :meth:`call`, :meth:`ask` and :meth:`wake` may be called from other threads.

    There is one, in the thread that runs the job: :class:`~.supervise.Supervisor` makes it and calls
    :meth:`run_once` until the job has ended. An exception of an action leaves :meth:`run_once`. Times are in
    seconds of `clock`.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._timers: Dict[str, _Timer] = {}
        self._calls: Deque[Callable[[], None]] = deque()
        self._selector = selectors.DefaultSelector()
        self._wake_up = WakeUp()
        self._selector.register(self._wake_up, READ, self._wake_up.clear)

    def call(self, action: Callable[[], None]) -> None:
        """Run a function in the loop's thread. For other threads and signal handlers."""
        self._calls.append(action)
        self.wake()

    def ask(self, question: Callable[[], _Answer], limit_s: float = 5.0) -> _Answer:
        """Run a function in the loop's thread and return its result or raise its exception."""
        future: Future[_Answer] = Future()

        def run() -> None:
            try:
                future.set_result(question())
            except BaseException as problem:  # noqa: BLE001  raised in the caller's thread
                future.set_exception(problem)

        self.call(run)
        try:
            return future.result(limit_s)
        except FutureTimeoutError:
            raise ConfigError(f"The job has not answered within {limit_s:g} s.") from None

    def wake(self) -> None:
        """Make :meth:`run_once` return now; no effect once the loop has ended."""
        self._wake_up.wake()

    def after(self, name: str, seconds: float, action: Callable[[], None]) -> None:
        """Set a timer by name, which replaces a timer with the same name."""
        self._timers[name] = _Timer(self.clock() + seconds, action)

    def is_set(self, name: str) -> bool:
        return name in self._timers

    def cancel(self, *names: str) -> None:
        """Cancel timers by their names or first words: ``retry`` cancels ``retry 0``, ``retry 1``, …."""
        for name in list(self._timers):
            if name in names or name.split()[0] in names:
                del self._timers[name]

    def watch(self, descriptor: int, events: int, action: Callable[[], None]) -> None:
        """Call `action` whenever a descriptor (-1 is ignored) is ready for ``READ`` or ``WRITE``; 0 stops
        watching. Stop watching a descriptor before it is closed.
        """
        if descriptor >= 0:
            registered = descriptor in self._selector.get_map()
            if events and not registered:
                self._selector.register(descriptor, events, action)
            elif registered and not events:
                self._selector.unregister(descriptor)

    def forget(self, *descriptors: int) -> None:
        for descriptor in descriptors:
            self.watch(descriptor, 0, lambda: None)

    def run_once(self, limit_s: float) -> None:
        """Wait up to `limit_s` seconds for a descriptor, a call or a timer, and run the due actions."""
        now = self.clock()
        waits = [limit_s, *(timer.due_s - now for timer in self._timers.values())]
        for key, _ in self._selector.select(0.0 if self._calls else max(0.0, min(waits))):
            key.data()
        while self._calls:
            self._calls.popleft()()
        now = self.clock()
        for name, timer in list(self._timers.items()):
            if timer.due_s <= now and self._timers.get(name) is timer:
                del self._timers[name]
                timer.action()

    def close(self) -> None:
        self._selector.close()
        self._wake_up.close()
