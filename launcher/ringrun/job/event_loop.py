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
    :meth:`run_once` until the job has ended. An exception of an action leaves :meth:`run_once`.

    Args:
        clock: the time in seconds; timers use it.
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
        """Run a function in the loop's thread and return its result. For other threads only.

        Args:
            question: the function; what it raises is raised here.
            limit_s: how long to wait for the loop, in seconds.

        Raises:
            ConfigError: the loop is busy, or has ended.
        """
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
        """Set a timer; it replaces a timer with the same name.

        Args:
            name: identifies the timer for :meth:`is_set` and :meth:`cancel`.
            seconds: from now.
            action: called once.
        """
        self._timers[name] = _Timer(self.clock() + seconds, action)

    def is_set(self, name: str) -> bool:
        """Return whether a timer with this name is set."""
        return name in self._timers

    def cancel(self, *names: str) -> None:
        """Cancel timers; names of which none is set are ignored.

        Args:
            *names: of timers, or their first words: ``retry`` cancels ``retry 0``, ``retry 1`` and so on.
        """
        for name in list(self._timers):
            if name in names or name.split()[0] in names:
                del self._timers[name]

    def watch(self, descriptor: int, events: int, action: Callable[[], None]) -> None:
        """Call ``action`` whenever a descriptor is ready.

        Stop watching a descriptor before it is closed.

        Args:
            descriptor: the descriptor; -1 is ignored.
            events: ``READ`` or ``WRITE``; 0 stops watching.
            action: called without arguments.
        """
        if descriptor >= 0:
            registered = descriptor in self._selector.get_map()
            if events and not registered:
                self._selector.register(descriptor, events, action)
            elif registered and not events:
                self._selector.unregister(descriptor)

    def forget(self, *descriptors: int) -> None:
        """Stop watching these descriptors."""
        for descriptor in descriptors:
            self.watch(descriptor, 0, lambda: None)

    def run_once(self, limit_s: float) -> None:
        """One cycle: wait for a descriptor, a call or a timer, and run the actions that are due.

        Args:
            limit_s: maximum time to wait, in seconds.
        """
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
        """Close the loop's descriptors."""
        self._selector.close()
        self._wake_up.close()
