"""Groups of fake devices: what NCCL is for GPUs, over sockets, between threads or processes of one host.

Work is done in a stream of the group. The first member collects all arrays, computes, and sends results. As
with NCCL, a member whose peer is lost waits for ever, until the group is aborted. What a member does not hold
after a reduce-scatter is poison.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
import threading
from contextlib import contextmanager
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

import numpy as np

from ringcomm.collective.device_group import DeviceGroup, DevicePort
from ringcomm.errors import DeviceError
from ringcomm.ops import ReduceOp

logger = logging.getLogger("ringcomm")

_UFUNC = {ReduceOp.MIN: np.minimum, ReduceOp.MAX: np.maximum, ReduceOp.PRODUCT: np.multiply}
_LENGTH = struct.Struct("<Q")
_MEETING_S = 60.0
Reduce = Callable[["List[np.ndarray[Any, Any]]"], "List[np.ndarray[Any, Any]]"]


class FakePort(DevicePort):
    """The way of a fake device into groups.

    Args:
        device: the device.
        fails: what fails: ``ticket``, ``join``, or nothing.

    Attributes:
        groups: those that it has joined.
    """

    name = "fake NCCL 1.0"
    version = 1

    def __init__(self, device: Any, fails: str = "") -> None:
        self.identity = (os.getpid() << 32 ^ id(device)) & ((1 << 62) - 1)
        self.groups: List[FakeGroup] = []
        self._device = device
        self._fails = fails
        self._listener: Optional[socket.socket] = None
        self._opened: List[socket.socket] = []

    def ticket(self) -> bytes:
        if self._fails == "ticket":
            raise DeviceError("this ticket was to fail")
        self._listener = socket.create_server(("127.0.0.1", 0))
        return str(self._listener.getsockname()[1]).encode()

    def close(self) -> None:
        """Close all connections; the device's streams have ended."""
        for peer in self._opened:
            peer.close()

    def join(self, ticket: bytes, rank: int, size: int) -> DeviceGroup:
        peers: Dict[int, socket.socket] = {}
        if rank == 0:
            assert self._listener is not None
            with self._listener as listener:
                listener.settimeout(_MEETING_S)
                for _ in range(size - 1):
                    peer, _ = listener.accept()
                    self._opened.append(peer)
                    peer.settimeout(None)
                    (number,) = _receive(peer) or (0,)
                    if not number:
                        raise DeviceError("a member has failed")
                    peers[number] = peer
        else:
            peers[0] = socket.create_connection(("127.0.0.1", int(ticket)), _MEETING_S)
            self._opened.append(peers[0])
            peers[0].settimeout(None)
            _send(peers[0], b"" if self._fails == "join" else bytes([rank]))
        if self._fails == "join":
            raise DeviceError("this device was not to join")
        group = FakeGroup(self._device, rank, size, peers)
        self.groups.append(group)
        return group


class FakeGroup(DeviceGroup):
    """A group of fake devices. Made by :meth:`FakePort.join`.

    Attributes:
        calls: how many reductions and gathers have been queued.
    """

    def __init__(self, device: Any, rank: int, size: int, peers: Dict[int, socket.socket]) -> None:
        self.calls = 0
        self._device = device
        self._rank = rank
        self._size = size
        self._peers = peers
        self._stream = device.stream()
        self._over = threading.Event()

    @property
    def aborted(self) -> bool:
        """Whether it was aborted."""
        return self._over.is_set()

    @contextmanager
    def current(self) -> Iterator[None]:
        before = self._device.current
        self._device.use(self._stream)
        try:
            yield
        finally:
            self._device.use(before)

    def follow(self, mark: Any) -> None:
        self._stream.wait_event(mark)

    def queued(self) -> Any:
        return self._stream.put()

    def all_reduce(self, array: Any, op: ReduceOp) -> None:
        memory = array.memory

        def reduce(arrays: List[np.ndarray[Any, Any]]) -> List[np.ndarray[Any, Any]]:
            return [_total(arrays, op)] * self._size

        self._queue(lambda: np.copyto(memory, self._exchange(memory, reduce)))

    def reduce_scatter(self, array: Any, bounds: Tuple[int, ...], op: ReduceOp) -> None:
        memory = array.memory

        def reduce(arrays: List[np.ndarray[Any, Any]]) -> List[np.ndarray[Any, Any]]:
            total = _total(arrays, op)
            return [total[start:stop] for start, stop in zip(bounds, bounds[1:])]

        def run() -> None:
            chunk = self._exchange(memory, reduce)
            memory.view(np.uint8)[:] = 0xFF
            memory[bounds[self._rank] : bounds[self._rank + 1]] = chunk

        self._queue(run)

    def all_gather(self, array: Any, bounds: Tuple[int, ...]) -> None:
        memory = array.memory

        def join(arrays: List[np.ndarray[Any, Any]]) -> List[np.ndarray[Any, Any]]:
            return [np.concatenate(arrays)] * self._size

        def run() -> None:
            memory[:] = self._exchange(memory[bounds[self._rank] : bounds[self._rank + 1]], join)

        self._queue(run)

    def scale(self, array: Any, divisor: int, factor: float) -> None:
        memory = array.memory

        def run() -> None:
            if divisor != 1:
                np.divide(memory, memory.dtype.type(divisor), out=memory)
            if factor != 1.0:
                np.multiply(memory, memory.dtype.type(factor), out=memory)

        self._stream.put(run)

    def abort(self) -> None:
        self._over.set()
        for peer in self._peers.values():
            try:
                peer.shutdown(socket.SHUT_RDWR)
            except OSError as problem:
                logger.debug("a member had left the group already: %s", problem)

    def _queue(self, run: Callable[[], None]) -> None:
        self.calls += 1
        self._stream.put(run)

    def _exchange(self, own: np.ndarray[Any, Any], reduce: Reduce) -> np.ndarray[Any, Any]:
        try:
            if self._rank:
                _send(self._peers[0], own.tobytes())
                return np.frombuffer(_receive(self._peers[0]), own.dtype)
            received = {rank: np.frombuffer(_receive(peer), own.dtype) for rank, peer in self._peers.items()}
            arrays = [own, *(received[rank] for rank in sorted(received))]
            results = reduce(arrays)
            for rank, peer in self._peers.items():
                _send(peer, results[rank].tobytes())
            return results[0]
        except OSError:
            self._over.wait()
            raise


def _total(arrays: List[np.ndarray[Any, Any]], op: ReduceOp) -> np.ndarray[Any, Any]:
    """The arrays combined in the order of the members."""
    combine: Any = _UFUNC.get(op, np.add)
    total: np.ndarray[Any, Any] = arrays[0].copy()
    with np.errstate(all="ignore"):
        for array in arrays[1:]:
            combine(total, array, out=total)
    return total


def _send(peer: socket.socket, data: bytes) -> None:
    peer.sendall(_LENGTH.pack(len(data)) + data)


def _receive(peer: socket.socket) -> bytes:
    (length,) = _LENGTH.unpack(_exactly(peer, _LENGTH.size))
    return _exactly(peer, length)


def _exactly(peer: socket.socket, length: int) -> bytes:
    data = bytearray()
    while len(data) < length:
        piece = peer.recv(length - len(data))
        if not piece:
            raise ConnectionResetError("a member of the group is lost")
        data += piece
    return bytes(data)
