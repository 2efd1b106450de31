"""Operations on tensors of devices: they run on host memory, between asynchronous copies."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, Callable, ContextManager, Dict, List, Optional, Sequence, Tuple

import torch

from ...arrays.kinds import BlockMirror, DeviceKind, StagingPool, Wait, device_kind
from ...arrays.operands import DeviceOperand
from ...collective.runner import Runner
from ...errors import Misuse
from ._collectives import movable


class _Shadow:
    """A tensor in host memory in place of one on a device; ``read``: the operation reads it."""

    def __init__(self, pool: StagingPool, kind: DeviceKind, tensor: torch.Tensor, read: bool) -> None:
        if tensor.layout is not torch.strided:
            raise Misuse(f"The backend 'ringcomm' supports dense tensors on devices, not {tensor.layout}.")
        self._tensor = tensor.detach()
        self._operand = DeviceOperand(pool, kind, movable(self._tensor), "the operation")
        self.mirror = self._operand.mirror
        self.host = torch.from_numpy(self._operand.flat).view(tensor.dtype).view(tensor.shape)
        if read:
            self.mirror.preload()

    def publish(self) -> None:
        """Let the current stream wait for the result, and copy it to a tensor of another layout."""
        self._operand.finish()
        own, moved = self._tensor, self._operand.on_device
        if own.is_cuda and moved.data_ptr() != own.data_ptr():  # pragma: no cover - needs a CUDA device
            for used in (own, moved):
                used.record_stream(torch.cuda.current_stream(own.device))


class Staged:
    """The tensors of one operation on a device; ``arguments`` becomes the same with host memory.

    The calling thread makes it, so that copies come after the queue of its current stream. ``arguments`` may
    hold (nested) lists and tuples of tensors; ``in_place``: the operation also reads the ``written`` tensors.
    """

    def __init__(
        self, pool: StagingPool, arguments: Sequence[Any], written: Sequence[torch.Tensor], in_place: bool
    ) -> None:
        self._pool = pool
        self._in_place = in_place
        self._written = {id(tensor) for tensor in written}
        self._shadows: Dict[int, _Shadow] = {}
        self._arrived: Optional[Any] = None
        self._device: Optional[torch.device] = None
        self.arguments: Tuple[Any, ...] = tuple(self._on_host(item) for item in arguments)

    def _on_host(self, item: Any) -> Any:
        if isinstance(item, (list, tuple)) and not hasattr(item, "_fields"):
            return type(item)(self._on_host(part) for part in item)
        if not isinstance(item, torch.Tensor):
            return item
        kind = device_kind(item)
        if kind is None:
            raise Misuse("The tensors of one operation must be on one device; this one has some on the CPU.")
        shadow = self._shadows.get(id(item))
        if shadow is None:
            read = self._in_place or id(item) not in self._written
            shadow = self._shadows[id(item)] = _Shadow(self._pool, kind, item, read)
            self._device = item.device
        return shadow.host

    def run(self, do: Callable[..., None], runner: Runner) -> None:
        """Run the operation between the loads and the stores, in the thread that runs operations."""
        for mirror in self._read():
            runner.fetch(mirror)
        do(*self.arguments)
        self.deliver()

    def _read(self) -> List[BlockMirror]:
        shadows = self._shadows.items()
        return [shadow.mirror for key, shadow in shadows if self._in_place or key not in self._written]

    def fetched(self, wait: Wait) -> Any:
        """Wait for the loads; return the first argument."""
        for mirror in self._read():
            mirror.fetch(wait)
        return self.arguments[0]

    def deliver(self) -> None:
        """Start the stores of the written tensors."""
        with self.stream():
            for key, shadow in self._shadows.items():
                if key in self._written:
                    shadow.mirror.store_all()
                    shadow.publish()
                else:
                    shadow.mirror.release()
            if self._device is not None and self._device.type == "cuda":
                self._arrived = torch.cuda.Event()
                self._arrived.record()
        self.arguments = ()
        self._shadows = {}

    def stream(self) -> ContextManager[Any]:
        """Return a stream for the stores: the program's streams do not wait until they ask for the result."""
        if self._device is None or self._device.type != "cuda":
            return nullcontext()
        own: ContextManager[Any] = torch.cuda.stream(_stream_of(self._device))
        return own

    def follow(self) -> None:
        """Let the calling thread's current stream wait for the result."""
        if self._arrived is not None and self._device is not None:
            torch.cuda.current_stream(self._device).wait_event(self._arrived)

    def future(self) -> Any:
        """Return a future whose waiting threads' streams wait for the result."""
        if self._device is None or self._device.type != "cuda":
            return torch.futures.Future()
        return torch.futures.Future(devices=[self._device])  # pragma: no cover - needs a CUDA device


_streams: Dict[torch.device, Any] = {}


def _stream_of(device: torch.device) -> Any:
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device=device)
    return _streams[device]


def tensors_in(value: Any) -> List[torch.Tensor]:
    """Return all tensors in (nested) lists."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in tensors_in(item)]
    return []


def staged(pool: StagingPool, arguments: Sequence[Any], result: Any, in_place: bool) -> Optional[Staged]:
    """Return the tensors of an operation on a device; None if they are on the CPU."""
    first = arguments[0] if arguments else None
    if not isinstance(first, torch.Tensor):
        tensors = tensors_in(arguments)
        if not tensors:
            return None
        first = tensors[0]
    if device_kind(first) is None:
        return None
    return Staged(pool, arguments, tensors_in(result), in_place)
