"""PyTorch's tensors: on a CUDA device with streams and events, on the CPU by sharing memory."""

from __future__ import annotations

import sys
from functools import lru_cache
from typing import Any, Hashable, Optional, Sequence, Tuple

import numpy as np

from ..dtypes import Array, dtype_named
from ..errors import DeviceError, Misuse, UnsupportedDtypeError
from .kinds import CopyEngine, DeviceKind, Done
from .operands import Operand

NO_VALUES = (
    "on the device meta, where tensors have no values: make it on a device (model.to_empty(device=...), then "
    "its initialization) before it is sent."
)


def not_dense(tensor: Any) -> str:
    """Return a tensor's kind and the remedy, if more than its elements would have to be sent; else ""."""
    if tensor.is_nested:
        return (
            "nested ones, whose parts have shapes of their own: pass the parts (tensor.unbind()) one by one, "
            "or torch.nested.to_padded_tensor(tensor, 0.0)."
        )
    return "" if tensor.layout is _torch().strided else f"{tensor.layout}: use tensor.to_dense()."


def _torch() -> Any:
    return sys.modules["torch"]


class _Elements:
    """The memory of a tensor on the CPU, for NumPy; an array of it keeps the tensor alive."""

    __slots__ = ("__array_interface__", "_tensor")

    def __init__(self, tensor: Any, typestr: str, itemsize: int) -> None:
        self._tensor = tensor
        self.__array_interface__ = {
            "version": 3, "typestr": typestr, "shape": tuple(tensor.shape),
            "strides": tuple(step * itemsize for step in tensor.stride()),
            "data": (tensor.data_ptr(), False),
        }  # fmt: skip


@lru_cache(maxsize=None)
def _element_type(dtype: Any) -> Tuple[np.dtype[Any], str]:
    """Return NumPy's type of elements, and the type string of their memory; or UnsupportedDtypeError."""
    name = str(dtype).rpartition(".")[2]
    try:
        found = dtype_named(name)
    except TypeError:
        found = np.dtype("V")
    if found.kind == "V" and name != "bfloat16":
        raise UnsupportedDtypeError(f"a tensor of {dtype} cannot be sent: NumPy itself has no such type.")
    return found, np.dtype("int16").str if name == "bfloat16" else found.str


def elements_of(tensor: Any) -> Array:
    """Return the elements of a dense CPU tensor as an array that shares its memory. ``Tensor.numpy()`` does
    the same, but then the tensor's storage can never be resized, which FullyShardedDataParallel does.
    """
    dtype, typestr = _element_type(tensor.dtype)
    try:
        array: Array = np.asarray(_Elements(tensor, typestr, dtype.itemsize))
    except (TypeError, RuntimeError) as problem:
        raise UnsupportedDtypeError(f"a tensor of {tensor.dtype} cannot be sent: {problem}") from None
    return array.view(dtype) if dtype.kind == "V" else array


def tensor_of(array: Array) -> Any:
    """Return a tensor that shares the memory of an array; the inverse of :func:`elements_of`."""
    torch, flat = _torch(), array.reshape(-1)
    half = array.dtype.kind == "V"
    made = torch.from_numpy(flat.view(np.int16)).view(torch.bfloat16) if half else torch.from_numpy(flat)
    return made.view(array.shape)


class TensorOperand(Operand):
    """A dense tensor without a copy engine: in host memory, or the caller waits for a copy there. ``copied``:
    the result is a new tensor; otherwise it overwrites ``tensor``, whose memory ``flat`` shares if possible.
    """

    __slots__ = ("_device", "_host", "_shared", "_target", "flat")

    def __init__(self, tensor: Any, copied: bool = False) -> None:
        bare = tensor.detach() if tensor.requires_grad else tensor
        self._target = None if copied else tensor
        self._device, self._shared = None, False
        if not bare.is_cpu:
            self._device = bare.device
            host = _torch().empty(bare.shape, dtype=bare.dtype).copy_(bare)
        elif not bare.is_contiguous() or bare.is_conj() or bare.is_neg():
            host = bare.resolve_conj().resolve_neg().contiguous()
        elif copied:
            host = bare.clone()
        else:
            host, self._shared = bare, True
        self._host = host
        self.flat = self._elements(host)

    def _elements(self, host: Any) -> Array:
        """Return the elements of the tensor in host memory, which is in C order."""
        return elements_of(host.view(-1))

    @property
    def shape(self) -> Tuple[int, ...]:  # type: ignore[override]
        return tuple(self._host.shape)

    def finish(self, shape: Optional[Tuple[int, ...]] = None) -> Any:
        if self._target is None:
            made = self._on_device(self._host)
            return made if shape is None else made.view(shape)
        if not self._shared:
            self._target.detach().copy_(self._host)
        return self._target

    def deliver(self, rows: Array) -> Any:
        return self._on_device(tensor_of(rows))

    def _on_device(self, host: Any) -> Any:
        return host if self._device is None else host.to(self._device)


class TorchEngine(CopyEngine):
    """Copies of one CUDA device through ``torch.cuda``. ``device`` must have an index."""

    def __init__(self, device: Any) -> None:
        cuda = _torch().cuda
        self.device = device
        self._out, self._in = cuda.Stream(device=device), cuda.Stream(device=device)

    def locked(self, nbytes: int) -> Array:
        torch = _torch()
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).numpy()

    def mark(self) -> Done:
        event = _torch().cuda.Event()
        event.record(_torch().cuda.current_stream(self.device))
        return Done(event, event.query)

    def to_host(self, array: Any, start: int, stop: int, block: Array, after: Optional[Done]) -> Done:
        target = _torch().from_numpy(block[start:stop])
        return self._copy(self._out, target, _bytes(array)[start:stop], array, after)

    def to_device(self, block: Array, array: Any, start: int, stop: int, after: Optional[Done]) -> Done:
        source = _torch().from_numpy(block[start:stop])
        return self._copy(self._in, _bytes(array)[start:stop], source, array, after)

    def _copy(self, stream: Any, target: Any, source: Any, array: Any, after: Optional[Done]) -> Done:
        cuda = _torch().cuda
        event = cuda.Event()
        try:
            with cuda.stream(stream):
                if after is not None:
                    stream.wait_event(after.event)
                target.copy_(source, non_blocking=True)
                event.record(stream)
            # The tensor's memory is not reused before this stream has reached this point.
            array.record_stream(stream)
        except RuntimeError as problem:
            raise DeviceError(f"a copy could not be started on {self.device}: {problem}") from problem
        return Done(event, event.query)

    def follow(self, done: Done) -> None:
        _torch().cuda.current_stream(self.device).wait_event(done.event)


def _bytes(flat: Any) -> Any:
    return flat.view(_torch().uint8)


class TorchKind(DeviceKind):
    """``torch.Tensor``."""

    name = "torch"

    def on_device(self, value: Any) -> bool:
        return bool(value.is_cuda)

    def device(self, value: Any) -> Hashable:
        return str(value.device)

    def engine(self, value: Any) -> CopyEngine:
        return TorchEngine(value.device)

    def describe(self, value: Any) -> Tuple[Tuple[int, ...], np.dtype[Any]]:
        return tuple(value.shape), _element_type(value.dtype)[0]

    def flat(self, value: Any) -> Tuple[Any, bool]:
        other = not_dense(value)
        if other:
            raise Misuse(f"collectives work on dense tensors, not on {other}")
        bare = value.detach().resolve_conj().resolve_neg().contiguous()
        return bare.view(-1), bare.data_ptr() == value.data_ptr()

    def empty(self, like: Any, shape: Sequence[int]) -> Any:
        return _torch().empty(tuple(shape), dtype=like.dtype, device=like.device)

    def assign(self, target: Any, source: Any) -> None:
        target.detach().copy_(source)

    def reshaped(self, flat: Any, shape: Sequence[int]) -> Any:
        return flat.view(tuple(shape))

    def host_memory(self, value: Any) -> Optional[Array]:
        if value.is_meta:
            raise UnsupportedDtypeError(f"a tensor of shape {tuple(value.shape)} is {NO_VALUES}")
        other = not_dense(value)
        if other:
            raise UnsupportedDtypeError(f"collectives work on dense tensors, not on {other}")
        if value.device.type != "cpu":
            return None
        bare = value.detach()
        if bare.is_conj() or bare.is_neg():
            return None
        return elements_of(bare)


KIND = TorchKind()
