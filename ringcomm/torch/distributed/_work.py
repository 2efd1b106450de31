"""An operation on its way, as PyTorch sees it."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any, Callable, List, Optional

import torch
import torch.distributed as dist

from ...collective.call_sites import Site, site_text
from ...errors import PeerStalledError, RingcommError

Helper = Callable[["RingcommWork"], None]
"""What a thread that has to wait for a work may do instead of sleeping."""


class RingcommWork(dist.Work):
    """A collective or a message: run once, by whichever thread, and waited for by any number.

    Args:
        what: its name, for messages.
        result: the tensors that hold the result when it is done.
        run: carries it out, in the thread that calls :meth:`perform`.
        helper: called by whoever waits, before it sleeps.

    Attributes:
        waiters: how many threads are waiting for it.
        source: who sent it, if it was received.
        epilogue: called when it has succeeded, before anybody learns of that.
        site: where it was called, if that is known.
    """

    def __init__(
        self,
        what: str,
        result: Any,
        run: Optional[Callable[[RingcommWork], None]] = None,
        helper: Optional[Helper] = None,
    ) -> None:
        super().__init__()
        self.what = what
        self.waiters = 0
        self.source = -1
        self.epilogue: Optional[Callable[[], None]] = None
        self.site: Optional[Site] = None
        self._result = result
        self._run = run
        self._helper = helper
        self._lock = threading.Lock()
        self._bell: Optional[threading.Event] = None
        self._root: Any = None
        self._future: Any = None
        self._done = False
        self._error: Optional[BaseException] = None

    # ---- for those who carry it out ----------------------------------------------------------

    def perform(self) -> None:
        """Run it, and finish with what comes of it."""
        run, self._run = self._run, None
        assert run is not None
        try:
            run(self)
        except Exception as error:  # noqa: BLE001 - whatever it is belongs to whoever waits
            self.finish(error)
        except BaseException as error:
            self.finish(error)
            raise  # Ctrl-C reached the thread that lent itself
        else:
            self.finish()

    def finish(self, error: Optional[BaseException] = None) -> None:
        """It is done, or has failed: wake whoever waits, and run what hangs on its future."""
        if error is None and self.epilogue is not None and not self._done:
            self.epilogue()
        with self._lock:
            if self._done:
                return
            self._error = error
            self._done = True
            self._helper = None
            bell, root = self._bell, self._root
        if bell is not None:
            bell.set()
        if root is not None:
            root.set_result(None)

    def where(self) -> str:
        """Where it was called, for messages; empty if that is not known."""
        return "" if self.site is None else f" at {site_text(self.site)}"

    # ---- for those who wait for it -----------------------------------------------------------

    def wait(self, timeout: Optional[timedelta] = None) -> bool:
        """Sleep until it is done.

        Args:
            timeout: at most so long; None or zero: as long as its own limit lets it last.

        Raises:
            RingcommError: what made it fail.
        """
        if not self._done:
            self._block(timeout.total_seconds() if timeout else None)
        self._raise_error()
        return True

    def _raise_error(self) -> None:
        if isinstance(self._error, RingcommError):
            # The message says it all; where inside ringcomm it was composed helps nobody.
            raise self._error.with_traceback(None)
        if self._error is not None:
            raise self._error

    def _block(self, timeout_s: Optional[float]) -> None:
        self.waiters += 1
        try:
            helper = self._helper
            if helper is not None and timeout_s is None:
                helper(self)
            with self._lock:
                if self._done:
                    return
                if self._bell is None:
                    self._bell = threading.Event()
                bell = self._bell
            if not bell.wait(timeout_s):
                raise PeerStalledError(f"{self.what} has not come to its end within {timeout_s:g} s.")
        finally:
            self.waiters -= 1

    def is_completed(self) -> bool:
        """Whether it is done, well or not."""
        return self._done

    def is_success(self) -> bool:
        """Whether it is done well."""
        return self._done and self._error is None

    def exception(self) -> Optional[BaseException]:
        """What made it fail, if anything did."""
        return self._error

    def synchronize(self) -> None:
        """Like :meth:`wait`."""
        self.wait()

    def result(self) -> List[torch.Tensor]:
        """The tensors that hold the result."""
        return self._result  # type: ignore[no-any-return]

    def source_rank(self) -> int:
        """Who sent it, in the group's numbering, if it was received from anybody."""
        return self.source

    _source_rank = source_rank

    def get_future(self) -> Any:
        """A ``torch.futures.Future`` of the result.

        What hangs on it runs in the thread that carries the operation out, before the next one, so
        collectives that are started there come at the same place on every rank.
        """
        with self._lock:
            if self._future is None:
                self._root = torch.futures.Future()
                # Only a callback that raises makes a future fail in C++ too, where DDP waits.
                self._future = self._root.then(self._outcome)
                if self._done:
                    self._root.set_result(None)
            return self._future

    def _outcome(self, _: Any) -> Any:
        self._raise_error()
        return self._result


class Together(RingcommWork):
    """Several works as one: done when all are."""

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
        """Whether all are done."""
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        """Whether all are done well."""
        return all(work.is_success() for work in self._works)

    def exception(self) -> Optional[BaseException]:
        """The first failure."""
        return next((work.exception() for work in self._works if work.exception() is not None), None)

    def get_future(self) -> Any:
        """A future that is complete when the last of them is."""
        return torch.futures.collect_all([work.get_future() for work in self._works])
