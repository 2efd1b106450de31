"""The ``torch.distributed.Work`` of the backend: a pending operation and its future."""

from __future__ import annotations

import threading
from collections import deque
from datetime import timedelta
from typing import Any, Callable, Deque, List, Optional

import torch
import torch.distributed as dist

from ...collective.call_sites import Site, site_text
from ...errors import PeerStalledError, RingcommError
from ._dispatch import uncompiled
from ._staged import Staged

# Called by a thread that waits for a work, before it sleeps: it may run queued works.
Helper = Callable[["RingcommWork"], None]
# Called by a thread whose wait for a work is interrupted (for example by Ctrl-C): it ends the group.
Interrupted = Callable[["RingcommWork", BaseException], None]

_MAX_KEPT_ITEMS = 16
# The newest works with small results, to keep their Python objects alive. Within ``join()`` DDP counts the
# ranks that still train by an all-reduce, and its reducer holds only the C++ part of that work until the
# backward pass. Without the Python object that part has no methods ("Work::getFuture not implemented").
_kept: Deque[RingcommWork] = deque(maxlen=64)


@uncompiled()
class RingcommWork(dist.Work):
    """A collective or a point-to-point message. Any thread may run it, once; any number may wait for it.

    ``run`` executes it, in the thread that calls :meth:`perform`. Each waiting thread calls ``helper`` before
    it sleeps, and ``interrupted`` if it is interrupted. ``on_device`` has the tensors, if a device holds
    them.
    """

    any_made = False

    def __init__(
        self,
        what: str,
        result: Any,
        run: Optional[Callable[[RingcommWork], None]] = None,
        helper: Optional[Helper] = None,
        interrupted: Optional[Interrupted] = None,
        on_device: Optional[Staged] = None,
    ) -> None:
        super().__init__()
        RingcommWork.any_made = True
        self.what = what
        self.waiters = 0
        self.source = -1  # the sender's rank, of a received message
        self.epilogue: Optional[Callable[[], None]] = None  # called on success, before waiting threads wake
        self.site: Optional[Site] = None
        self.noted: Any = None  # record and history of a recorded message
        self.ended: Optional[Callable[[], None]] = None  # called once on success or failure
        self._result = result
        self._run = run
        self._helper = helper
        self._interrupted = interrupted
        self._on_device = on_device
        self._lock = threading.Lock()
        self._completed_event: Optional[threading.Event] = None
        self._root: Any = None
        self._future: Any = None
        self._done = False
        self._error: Optional[BaseException] = None
        if len(result) == 1 and isinstance(result[0], torch.Tensor) and result[0].numel() <= _MAX_KEPT_ITEMS:
            _kept.append(self)

    # ---- called by the executing thread ------------------------------------------------------

    def perform(self) -> None:
        """Run it, and finish it with success or its error."""
        run, self._run = self._run, None
        assert run is not None
        try:
            run(self)
        except Exception as error:  # noqa: BLE001 - raised in the waiting threads
            self.finish(error)
        except BaseException as error:
            self.finish(error)
            raise  # Ctrl-C in a user's thread that runs the work
        else:
            self.finish()

    def finish(self, error: Optional[BaseException] = None) -> None:
        """Mark it as done or failed: wake waiting threads, and run its future's callbacks."""
        epilogue = self.epilogue
        if error is None and epilogue is not None and not self._done:
            epilogue()
        with self._lock:
            if self._done:
                return
            self._error = error
            self._done = True
            self._helper = self._interrupted = self.epilogue = None
            completed, root = self._completed_event, self._root
        if completed is not None:
            completed.set()
        if self.ended is not None:
            self.ended()
        if root is not None:
            self._complete(root)

    def _complete(self, root: Any) -> None:
        """Set the future; on a device, its callbacks come after the result in the stream."""
        if self._on_device is None:
            root.set_result(None)
        else:
            with self._on_device.stream():
                root.set_result(None)

    def where(self) -> str:
        """Return the place of the call, for error texts; "" if unknown."""
        return "" if self.site is None else f" at {site_text(self.site)}"

    # ---- called by waiting threads -----------------------------------------------------------

    def wait(self, timeout: Optional[timedelta] = None) -> bool:
        """Wait until it is done, for ``timeout`` (None or zero: its time limit), and return True.

        RingcommError: it failed. PeerStalledError: it is not done within ``timeout``.
        """
        if not self._done:
            self._block(timeout.total_seconds() if timeout else None)
        self._raise_error()
        if self._on_device is not None:
            self._on_device.follow()
        return True

    def _raise_error(self) -> None:
        if isinstance(self._error, RingcommError):
            # The message has all facts; a traceback through ringcomm's own code adds none.
            raise self._error.with_traceback(None)
        if self._error is not None:
            raise self._error

    def _block(self, timeout_s: Optional[float]) -> None:
        self.waiters += 1
        history, message = self.noted or (None, None)
        wait = None if history is None else history.begin_wait(message, self)
        try:
            helper = self._helper
            if helper is not None and timeout_s is None:
                helper(self)
            with self._lock:
                if self._done:
                    return
                if self._completed_event is None:
                    self._completed_event = threading.Event()
                completed = self._completed_event
            in_time = completed.wait(timeout_s)
        except BaseException as problem:
            if not self._done and self._interrupted is not None:
                self._interrupted(self, problem)
                self._wait_for_end()
            raise
        finally:
            self.waiters -= 1
            if history is not None:
                history.end_wait(wait)
        if not in_time:
            raise PeerStalledError(f"{self.what} is not done within {timeout_s:g} s.")

    def _wait_for_end(self) -> None:
        """Wait, after the group has been ended, until no peer can read the work's tensors any more."""
        with self._lock:
            if self._done:
                return
            completed = self._completed_event = self._completed_event or threading.Event()
        completed.wait()

    def is_completed(self) -> bool:
        """Return whether it is done or has failed."""
        return self._done

    def is_success(self) -> bool:
        """Return whether it is done without an error."""
        return self._done and self._error is None

    def exception(self) -> Optional[BaseException]:
        """Return its error, if it has failed."""
        return self._error

    def synchronize(self) -> None:
        """Wait until it is done, without an additional time limit."""
        self.wait()

    def result(self) -> List[torch.Tensor]:
        """Return the tensors that hold the result."""
        return self._result  # type: ignore[no-any-return]

    def source_rank(self) -> int:
        """Return the sender's rank in the group, of a received message; -1 otherwise."""
        return self.source

    _source_rank = source_rank

    def get_future(self) -> Any:
        """Return a ``torch.futures.Future`` of the result.

        Its callbacks run in the thread that executes the operation, before the next operation, so collectives
        that they start have the same position in the order on every rank.
        """
        with self._lock:
            if self._future is None:
                on_device = self._on_device
                self._root = torch.futures.Future() if on_device is None else on_device.future()
                # Only a callback that raises makes a future fail in C++ too, where DDP waits.
                self._future = self._root.then(self._outcome)
                if self._done:
                    self._complete(self._root)
            return self._future

    def _outcome(self, _: Any) -> Any:
        self._raise_error()
        return self._result


@uncompiled()
class Together(RingcommWork):
    """Several works as one: done when all are done."""

    def __init__(self, works: List[RingcommWork]) -> None:
        super().__init__("a group of operations", [work.result() for work in works])
        self._works = works

    def wait(self, timeout: Optional[timedelta] = None) -> bool:
        """Wait for all of them."""
        for work in self._works:
            work.wait(timeout)
        self.finish()
        return True

    def is_completed(self) -> bool:
        """Return whether all are done."""
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        """Return whether all are done without an error."""
        return all(work.is_success() for work in self._works)

    def exception(self) -> Optional[BaseException]:
        """Return the first failure."""
        return next((work.exception() for work in self._works if work.exception() is not None), None)

    def get_future(self) -> Any:
        """Return a future that is complete when all works are."""
        return torch.futures.collect_all([work.get_future() for work in self._works])
