"""What is submitted to the engine, and what the submitter holds in the meantime."""

from __future__ import annotations

import threading
from typing import Any, Callable, List, Optional, Sequence

import numpy as np

from ..collective.mirror import Mirror
from ..collective.weighted import Total
from ..errors import fresh_copy
from ..wire.signature import Signature

_NO_TOTAL = Total(1.0, 0)
MAX_SITES = 4096
"""For how many lines of the program rank 0 is told where they are, so that a number stands for each."""


class Handle:
    """An operation on its way. ``done()`` asks, ``wait()`` waits and gives the result or raises.

    ``on_wait`` waits instead of :meth:`block`. ``convert`` makes the caller's result when it is first
    requested. ``absent`` has, at the end of a reduction, a bit for each part of it that no rank had.
    """

    __slots__ = (
        "_callbacks", "_convert", "_error", "_finished", "_gate", "_on_wait", "_result", "absent", "label",
    )  # fmt: skip

    def __init__(
        self,
        label: str,
        on_wait: Optional[Callable[[Handle, Optional[float], bool], None]] = None,
        convert: Optional[Callable[[Any], Any]] = None,
    ) -> None:
        self.label = label
        self.absent = 0
        self._convert = convert
        # A bare lock, held until the end: a tenth of what an Event costs to make.
        self._gate = threading.Lock()
        self._gate.acquire()
        self._finished = False
        self._result: Any = None
        self._error: Optional[BaseException] = None
        self._callbacks: Optional[List[Callable[[Handle], None]]] = None
        self._on_wait = on_wait

    def done(self) -> bool:
        """Return whether the operation has come to its end, good or bad."""
        return self._finished

    def wait(self, timeout_s: Optional[float] = None) -> Any:
        """Return the result, as soon as it is there; TimeoutError: it was not, and the operation goes on."""
        self.wait_for_end(timeout_s)
        if self._error is not None:
            raise fresh_copy(self._error)
        if self._convert is not None:
            self._carry_out_conversion()
        return self._result

    def wait_for_end(self, timeout_s: Optional[float] = None) -> None:
        """Wait without taking the result or :attr:`error`; TimeoutError as :meth:`wait`."""
        if self._finished:
            return
        if self._on_wait is not None:
            self._on_wait(self, timeout_s, True)
        else:
            self.block(timeout_s)
        if not self._finished:
            raise TimeoutError(f"{self.label} was not done within {timeout_s:g} s")

    def attend(self) -> None:
        """Wait for the end as :meth:`wait`, but of no interest to rank 0, and without result or error."""
        if self._on_wait is None:
            self.block(None)
        elif not self._finished:
            self._on_wait(self, None, False)

    def _carry_out_conversion(self) -> None:
        """Convert the result, once: in the thread that requests it, not in the engine's.

        Other threads that wait sleep until it is converted. Only a conversion that has succeeded is over,
        so that none of them gets what is not converted.
        """
        with self._gate:  # free since the operation has come to its end
            convert = self._convert
            if convert is not None:
                self._result = convert(self._result)
                self._convert = None

    def block(self, timeout_s: Optional[float]) -> bool:
        """Sleep until the end, or for so long; whether it has come."""
        if self._finished:
            return True
        if self._gate.acquire(timeout=-1 if timeout_s is None else max(0.0, timeout_s)):
            self._gate.release()
        return self._finished

    def finish(self, result: Any = None, error: Optional[BaseException] = None) -> None:
        """The end, called once."""
        self._result = result
        self._error = error
        self._finished = True
        self._gate.release()
        for callback in self._callbacks or ():
            callback(self)

    def when_done(self, callback: Callable[[Handle], None]) -> None:
        """Call back at the end, in the engine's thread (at once if it is over). Before submission only."""
        if self._finished:
            callback(self)
        else:
            self._callbacks = [*(self._callbacks or ()), callback]

    @property
    def error(self) -> Optional[BaseException]:
        """What it failed with, if it did."""
        return self._error


class Request:
    """One operation of this rank.

    ``arrays`` are flat and contiguous; reductions and broadcasts overwrite them. ``rows`` are those of each
    array of an allgather, ``splits`` those for each member of an alltoall. ``weight`` is this rank's,
    ``total`` the sum of all ranks' once rank 0 has sent it. ``absent`` has a bit for each part of the
    contribution that this rank does not have and has filled with zeros, then those that no rank has.
    ``residuals`` are float32, of error feedback. ``mirrors`` are those of arrays on devices, of which
    ``arrays`` are the host blocks (None: in host memory). ``operation`` is what the flight recorder
    remembers.
    """

    __slots__ = (
        "absent", "arrays", "handle", "key", "mirrors", "operation", "residuals", "rows", "signature", "site",
        "splits", "total", "urgent", "weight",
    )  # fmt: skip

    def __init__(
        self,
        signature: Signature,
        arrays: Sequence[np.ndarray[Any, Any]],
        handle: Handle,
        site: str = "",
        weight: float = 1.0,
        absent: int = 0,
    ) -> None:
        self.weight = weight
        self.absent = absent
        self.total = _NO_TOTAL
        self.signature = signature
        self.key = signature.key()
        self.arrays = list(arrays)
        self.handle = handle
        self.rows: Sequence[int] = ()
        self.splits: Sequence[int] = ()
        self.site = site
        self.urgent = False
        self.operation: Any = None
        self.residuals: Sequence[np.ndarray[Any, Any]] = ()
        self.mirrors: Sequence[Optional[Mirror]] = ()
