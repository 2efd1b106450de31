"""Collectives on arrays that devices hold: copies are flows beside sending, receiving and folding.

The schedule runs on a block of host memory, the array's *mirror*. Loads (device to host) and stores (host to
device) of :mod:`ringcomm.schedule.staging` are flows with positions: a send chases the load of its span as it
chases a fold, and a store chases the receive that finishes its span. So copying out, sending, adding and
copying back overlap, piece by piece.

Copies are asynchronous. A load's position moves when its pieces are done (:class:`Done`). A store's position
moves when a piece is handed over: the collective does not wait for it, because the mirror keeps its block of
memory until the copy is done, and the caller's stream waits on the device.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from typing import Any, Deque, List, NamedTuple, Optional, Sequence, Tuple, Union

import numpy as np

from ..schedule.staging import Copies, Span
from ..schedule.steps import DATA, Send, Step
from ..transport.base import Fabric, Watch
from ..wire.frames import Header
from .device_group import DeviceGroup, DevicePort
from .execute import Execution
from .flows import Flow, Receipt, SegmentPool
from .reduce import Kernel

_MAX_COPIES = 4
"""How many loads are handed to the device at once, so that it always has the next one."""


class Done(ABC):
    """The end of an asynchronous copy."""

    @abstractmethod
    def poll(self) -> bool:
        """Return whether the copy is done.

        Raises:
            DeviceError: it failed.
        """

    def elapsed_s(self) -> Optional[float]:
        """Return how long the device took for it, once it is done; None if that is not known."""
        return None


class Mirror(ABC):
    """An array on a device, and the block of host memory through which it is sent.

    Attributes:
        host: as many elements, flat; what they are is defined only where a load is done.
        piece_bytes: how much to copy at once.
        shared: whether :attr:`host` is the array itself. Then nothing is copied, and the host must not write
            to it before :meth:`fetch` has returned.
    """

    host: np.ndarray[Any, Any]
    piece_bytes: int
    shared = False

    @abstractmethod
    def load(self, start: int, stop: int) -> Done:
        """Start copying the bytes ``[start, stop)`` of the array to the host."""

    @abstractmethod
    def store(self, start: int, stop: int) -> None:
        """Start copying the bytes ``[start, stop)`` of the host's block to the array."""

    @abstractmethod
    def fetch(self, watch: Optional[Watch] = None) -> np.ndarray[Any, Any]:
        """Copy the whole array to the host, wait for that, and return :attr:`host`.

        Args:
            watch: interrupts the wait.
        """

    def port(self, owner: object) -> Union[DevicePort, str]:
        """Return how the array's device becomes a member of a group, or why it cannot.

        Args:
            owner: makes the group. Only one owner is served, because devices of different ranks could begin
                with the work of different groups, and wait for each other for ever.
        """
        del owner
        return "its arrays are in host memory"

    def enter(self, group: DeviceGroup) -> Any:
        """The array in which the result grows, for a group's work, which comes after the program's."""
        raise NotImplementedError

    def part(self, array: Any, start: int, stop: int) -> Mirror:
        """A mirror of the elements ``[start, stop)`` of what :meth:`enter` gave, after the current stream."""
        raise NotImplementedError

    def leave(self, group: DeviceGroup) -> None:
        """The result is in the array when the group has come here."""
        raise NotImplementedError

    def finish(self) -> None:
        """Let the calling thread's current stream wait for the result; see the kinds of mirrors."""
        raise NotImplementedError


class Staging(NamedTuple):
    """The arrays on devices of one call.

    Attributes:
        data: of the array in which the result grows.
        results: the spans of it, in elements, that the device is to hold in the end.
        source: of the array that is only read, for calls that have one.
    """

    data: Mirror
    results: Tuple[Span, ...]
    source: Optional[Mirror] = None


class _Load(Flow):
    """A span that is copied from the device: ``position`` is how far that is done."""

    __slots__ = ("asked", "buffer", "pieces", "readers")

    def __init__(self, start: int, stop: int, buffer: int) -> None:
        super().__init__(start, stop)
        self.buffer = buffer
        self.asked = start
        self.readers: List[Flow] = []
        self.pieces: Deque[Tuple[Done, int]] = deque()

    def rewind(self) -> None:
        super().rewind()
        self.asked = self.start
        self.pieces.clear()

    def ahead(self) -> int:
        """Return how much has been requested that no reader has used yet."""
        used = max((min(flow.position, self.stop) for flow in self.readers), default=self.start)
        return self.asked - max(used, self.start)


class StagedExecution(Execution):
    """A part that runs a schedule on mirrors.

    :meth:`attach` it to them before :meth:`arm`, with their host blocks as ``data`` and ``source``.

    Args:
        schedule, fabric, header, dtype, pool, kernel: as for :class:`~.execute.Execution`.
        copies: the loads and stores of the schedule.
    """

    def __init__(
        self,
        schedule: Sequence[Step],
        fabric: Fabric,
        header: Header,
        dtype: np.dtype[Any],
        pool: SegmentPool,
        kernel: Optional[Kernel],
        copies: Copies,
    ) -> None:
        super().__init__(schedule, fabric, header, dtype, pool, kernel)
        item = dtype.itemsize
        self._loads = [_Load(load.start * item, load.stop * item, load.buffer) for load in copies.loads]
        self._stores = [Flow(store.start * item, store.stop * item) for store in copies.stores]
        for step, flow in zip(schedule, self._flows):
            buffer = step.buffer if isinstance(step, Send) else DATA
            self._connect(flow, buffer)
        self._prepares = kernel is not None and kernel.prescale != 1.0
        self._mirrors: Tuple[Mirror, ...] = ()
        self._loading: List[_Load] = []
        self._storing: List[Flow] = []

    def _connect(self, flow: Flow, buffer: int) -> None:
        """Make a step wait for the loads of its span, and the stores of its span wait for what it writes."""
        loads = [load for load in self._loads if load.buffer == buffer and _meet(flow, load)]
        flow.before = (*flow.before, *loads)
        for load in loads:
            load.readers.append(flow)
        if isinstance(flow, Receipt):
            for store in self._stores:
                if _meet(flow, store):
                    store.before = (*store.before, flow)

    def attach(self, staging: Staging) -> None:
        """Copy these arrays from the next :meth:`arm` on, until :meth:`disarm`."""
        self._mirrors = (staging.data, staging.data if staging.source is None else staging.source)

    def arm(
        self,
        sequence: int,
        data: np.ndarray[Any, Any],
        source: Optional[np.ndarray[Any, Any]] = None,
        site: int = 0,
    ) -> None:
        super().arm(sequence, data, source, site)
        for flow in (*self._loads, *self._stores):
            flow.rewind()
        self._loading = [load for load in self._loads if load.start < load.stop]
        self._storing = [store for store in self._stores if store.start < store.stop]

    def disarm(self) -> None:
        super().disarm()
        self._mirrors = ()
        for load in self._loads:
            load.pieces.clear()

    @property
    def copying(self) -> bool:
        return bool(self._loading)

    def advance(self) -> bool:
        while True:
            before = self.moved_bytes
            if self._loading:
                self._advance_loads()
            if self._sends:
                self._advance_sends()
            if self._receives:
                self._advance_receives()
            if self._storing:
                self._advance_stores()
            if not (self._sends or self._receives or self._loading or self._storing):
                unsettled = [link for link in self._links if not link.settled()]
                return not unsettled
            if self.moved_bytes == before and not self._fold_partial():
                return False

    def _advance_loads(self) -> None:
        """Move loads as far as their copies are done, and hand over the copies that are needed next."""
        open_copies = 0
        for load in self._loading:
            while load.pieces and load.pieces[0][0].poll():
                self._loaded(load, load.pieces.popleft()[1])
            open_copies += len(load.pieces)
        self._loading = [load for load in self._loading if load.position < load.stop]
        while open_copies < _MAX_COPIES:
            waiting = [load for load in self._loading if load.asked < load.stop]
            if not waiting:
                break
            # First what is needed first; of several that are needed at once each gets a piece in turn.
            load = min(waiting, key=_Load.ahead)
            mirror = self._mirrors[load.buffer]
            end = min(load.stop, load.asked + mirror.piece_bytes)
            load.pieces.append((mirror.load(load.asked, end), end))
            load.asked = end
            open_copies += 1

    def _loaded(self, load: _Load, end: int) -> None:
        if self._prepares and self._kernel is not None:
            self._kernel.prepare(self._data[load.position // self._item : end // self._item])
        self.moved_bytes += end - load.position
        load.position = end

    def _advance_stores(self) -> None:
        """Hand over to the device what is finished, in whole pieces."""
        mirror = self._mirrors[DATA]
        for store in self._storing:
            limit = store.limit()
            while store.position < limit:
                end = min(limit, store.position + mirror.piece_bytes)
                if end - store.position < mirror.piece_bytes and end < store.stop:
                    break
                mirror.store(store.position, end)
                self.moved_bytes += end - store.position
                store.position = end
        self._storing = [store for store in self._storing if store.position < store.stop]


def _meet(one: Flow, other: Flow) -> bool:
    return one.start < other.stop and other.start < one.stop
