"""Buckets of gradients that are reduced as one operation: in one flat tensor, separately, or sparse.

In a :class:`FlatBucket` the parameters' ``.grad`` are views of the flat tensor after the reduction, so the
engine reduces gradients in place. A gradient to which autograd adds (after ``zero_grad(set_to_none=False)``)
is in its place already; a new gradient is copied there, once.
"""

from __future__ import annotations

import warnings
from functools import cached_property
from typing import Any, Callable, Dict, List, Optional, Sequence, Set

import torch

from .._adapter.compression import BLOCKWISE, NoneCompressor, Residuals, codec_for, is_elementwise
from .._adapter.gradients import bucket_name
from .._adapter.reduction import Reduction
from .._adapter.submit import Operands, finish_earlier, start_allreduce
from ..codec.base import BLOCK_ITEMS
from ..dtypes import Array
from ..transport.arena import shared_room
from . import handles
from .compression import wire_torch_dtype
from .tensors import like_parameter, operand_of

Parameters = Sequence[torch.Tensor]

_CHANGED = (
    "Gradients were changed between loss.backward() and optimizer.step(), for example clipped or unscaled, "
    "while they were being reduced: ranks may train with different ones. Call optimizer.synchronize() first, "
    "and then optimizer.step() within optimizer.skip_synchronize()."
)


class Bucket:
    """The gradients of some parameters, and their reduction."""

    def __init__(self, parameters: Parameters, names: Sequence[str], reduction: Reduction) -> None:
        self.parameters = list(parameters)
        self.names = list(names)
        self.reduction = reduction
        self.handle: Any = None
        self._absent: Set[torch.Tensor] = set()

    @cached_property
    def name(self) -> str:
        """Return the operation's name, by which ranks match it."""
        return bucket_name(self.names, [parameter.shape for parameter in self.parameters])

    @property
    def absent(self) -> Set[torch.Tensor]:
        """Return the members that were taken without a gradient."""
        return self._absent

    def take(self, parameter: torch.Tensor) -> None:
        """Add a member's complete gradient; without a gradient, zeros."""
        if parameter.grad is None:
            self._absent.add(parameter)
            parameter.grad = torch.zeros_like(parameter, memory_format=torch.preserve_format)

    def submit(self) -> None:
        """Start the reduction, after all members have been taken."""
        raise NotImplementedError

    def _start(self, operands: Operands, codec: Any = None, **more: Any) -> None:
        options = self.reduction.call(self.name, self.reduction.weight_now(), codec)
        finish_earlier("allreduce", self.name, options.process_set)
        self.handle = start_allreduce(operands, options, False, True, absent=self._absent_here(), **more)

    def finish(self) -> None:
        """Wait for the reduction, and set every member's gradient to its result."""
        raise NotImplementedError

    def wait(self) -> None:
        """Wait for the reduction, without taking its result."""
        handles.synchronize(self.handle)

    def reset(self) -> None:
        """Drop a reduction in progress: it has failed, or its result is not needed."""
        self.handle = None
        self._absent.clear()

    def _absent_here(self) -> int:
        """Return a bit mask of the members without a gradient on this rank; all ranks exchange it."""
        if not self._absent:
            return 0
        return sum(1 << place for place, item in enumerate(self.parameters) if item in self._absent)

    def _leave_out(self, absent: int) -> None:
        """Remove gradients (a bit mask) that no rank has: momentum and decay must not apply."""
        for place, parameter in enumerate(self.parameters) if absent else ():
            if absent >> place & 1:
                parameter.grad = None
        self._absent.clear()

    def without(self, parameter: torch.Tensor) -> Optional[Bucket]:
        """Return a bucket of the other members, which must be taken again; None if there are none."""
        left = [place for place, item in enumerate(self.parameters) if item is not parameter]
        if not left:
            return None
        return self._like([self.parameters[place] for place in left], [self.names[place] for place in left])

    def _like(self, parameters: Parameters, names: Sequence[str]) -> Bucket:
        raise NotImplementedError


class EachBucket(Bucket):
    """Gradients that are compressed separately: for custom compressions, mixed dtypes and devices."""

    _restore: Callable[[Sequence[Any]], List[Any]]
    # of the gradients at the start of the reduction: PyTorch counts changes in place
    _versions: Sequence[int] = ()

    def submit(self) -> None:
        """Start the reduction, after all members have been taken."""
        gradients = [_dense(_gradient(parameter)) for parameter in self.parameters]
        self._versions = [_gradient(parameter)._version for parameter in self.parameters]
        _, sent, self._restore = self.reduction.prepared(gradients)
        self._start([operand_of(tensor, "allreduce", in_place=True) for tensor in sent])

    def _is_changed(self) -> bool:
        pairs = zip(self.parameters, self._versions)
        return any(item.grad is not None and item.grad._version != version for item, version in pairs)

    def finish(self) -> None:
        """Wait for the reduction, and set every member's gradient to its result."""
        handle, self.handle = self.handle, None
        if self._is_changed():
            warnings.warn(_CHANGED, stacklevel=2)
        for parameter, whole in zip(self.parameters, self._restore(handles.synchronize(handle))):
            _set_gradient(parameter, whole.reshape(parameter.shape))
        self._leave_out(handle.absent)

    def _like(self, parameters: Parameters, names: Sequence[str]) -> Bucket:
        return EachBucket(parameters, names, self.reduction)


class _Place:
    """The place of a parameter's gradient in a flat tensor."""

    def __init__(self, start: int, parameter: torch.Tensor) -> None:
        self._start = start
        self._start_bytes = start * parameter.element_size()
        self._shape = parameter.shape
        self._strides = torch.empty(parameter.shape, device="meta").stride()

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the gradient as a new view each time: only the user's program holds references to it."""
        return flat.as_strided(self._shape, self._strides, self._start)

    def holds(self, gradient: torch.Tensor, address: int) -> bool:
        """Return whether a gradient is at this place already (comparing views takes 20 times as long).

        ``address``: of the flat tensor.
        """
        if gradient.is_sparse or gradient.data_ptr() != address + self._start_bytes:
            return False
        return bool(gradient.is_contiguous())


class FlatBucket(Bucket):
    """Gradients of one dtype and device in one flat tensor, sent with ``codec`` or ``"none"``.

    For codecs with blocks there is error feedback, and each member begins with a new block.
    """

    def __init__(
        self, parameters: Parameters, names: Sequence[str], reduction: Reduction, codec: str = "none",
        residuals: Optional[Residuals] = None,
    ) -> None:  # fmt: skip
        super().__init__(parameters, names, reduction)
        self._codec = codec
        self._residuals = residuals if codec in BLOCKWISE else None
        self._feedback: Optional[Array] = None
        self._places: Dict[int, _Place] = {}  # by id(): a tensor's hash takes longer
        self._starts: List[int] = []
        start = 0
        for parameter in parameters:
            self._places[id(parameter)] = _Place(start, parameter)
            self._starts.append(start)
            start = self._after(start + parameter.numel())
        self._count = start
        self._flat: Optional[torch.Tensor] = None
        self._address = 0
        self._own_references = 0
        self._fresh = False
        self._version = 0  # of the flat tensor, as the reduction has started: PyTorch counts changes in place
        self._wire: Optional[torch.Tensor] = None

    def _after(self, stop: int) -> int:
        """Return where the next member begins."""
        return stop if self._residuals is None else -(-stop // BLOCK_ITEMS) * BLOCK_ITEMS

    def _own_residuals(self) -> Sequence[Array]:
        """Return the error of the last reduction, for the engine to add and to replace."""
        if self._residuals is None:
            return ()
        if self._feedback is None:
            sizes = [parameter.numel() for parameter in self.parameters]
            self._feedback = self._residuals.side_by_side(self.names, sizes, self._starts, self._count)
        return (self._feedback,)

    def take(self, parameter: torch.Tensor) -> None:
        """Add a member's complete gradient; without a gradient, zeros."""
        flat = self._flat if self._fresh and self._flat is not None else self._flat_tensor()
        gradient = parameter.grad
        place = self._places[id(parameter)]
        if gradient is not None and place.holds(gradient, self._address):
            return
        slot = place.of(flat)
        if gradient is None:
            self._absent.add(parameter)
            slot.zero_()
        elif gradient.is_sparse:
            slot.copy_(gradient.to_dense())
            return
        else:
            slot.copy_(gradient)
        if gradient is None:
            parameter.grad = _as_gradient(slot, parameter)
        elif parameter.is_contiguous() and gradient.dtype == slot.dtype:
            parameter.grad = slot

    def submit(self) -> None:
        """Start the reduction, after all members have been taken."""
        flat = self._flat_tensor()
        self._version = flat._version
        smaller = wire_torch_dtype(self.reduction.compression, flat.dtype)
        if smaller is not None:
            if self._wire is None:
                self._wire = torch.empty_like(flat, dtype=smaller)
            flat = self._wire.copy_(flat)
        # Memory of the CPU is reduced in place. Memory of a CUDA device is being copied from here on, in
        # order with the backward pass, which goes on at once.
        operand = operand_of(flat, "allreduce", in_place=True)
        self._start([operand], self._codec, residuals=self._own_residuals())

    def _is_changed(self) -> bool:
        return bool(self._flat_tensor()._version != self._version)

    def finish(self) -> None:
        """Wait for the reduction, and set every member's gradient to its result."""
        handle, self.handle = self.handle, None
        (reduced,) = handles.synchronize(handle)
        if self._is_changed():
            warnings.warn(_CHANGED, stacklevel=2)
        self._deliver(reduced, handle.absent)

    def _deliver(self, reduced: torch.Tensor, absent: int) -> None:
        """Set every member's gradient to its reduced elements, except members that no rank has."""
        flat = self._flat_tensor()
        if reduced is not flat:
            flat.copy_(reduced)
        for parameter, place in zip(self.parameters, self._places.values()):
            gradient = parameter.grad
            if gradient is None or not place.holds(gradient, self._address):
                _set_gradient(parameter, place.of(flat))
        self._fresh = False
        self._leave_out(absent)

    def reset(self) -> None:
        """Drop a reduction in progress, and its memory."""
        if self._residuals is not None and self.handle is not None:
            self._residuals.drop(self.names)
        super().reset()
        # The engine may still write to these.
        self._flat = self._wire = self._feedback = None
        self._fresh = False

    def _like(self, parameters: Parameters, names: Sequence[str]) -> Bucket:
        return FlatBucket(parameters, names, self.reduction, self._codec, self._residuals)

    def _flat_tensor(self) -> torch.Tensor:
        """Return the flat tensor; a new one if the program holds the last step's gradients."""
        if self._flat is None or not (self._fresh or self._is_reusable(self._flat)):
            first = self.parameters[0]
            self._flat = _zeros(self._count, first)
            self._address = self._flat.data_ptr()
            self._own_references = _references(self._flat)
        self._fresh = True
        return self._flat

    def _is_reusable(self, flat: torch.Tensor) -> bool:
        """Return whether the memory may be overwritten.

        A tensor that is still a parameter's ``.grad`` may be: gradients change in place. After
        ``zero_grad(set_to_none=True)`` the program may hold references to the old gradients.
        """
        start, stop = flat.data_ptr(), flat.data_ptr() + flat.numel() * flat.element_size()
        held = [item.grad for item in self.parameters if item.grad is not None and not item.grad.is_sparse]
        attached = sum(1 for item in held if start <= item.data_ptr() < stop)
        return attached > 0 or 0 < _references(flat) <= self._own_references


def _zeros(count: int, like: torch.Tensor) -> torch.Tensor:
    """Return zeros of a parameter's type on its device; in host memory where other ranks can read them."""
    shared = shared_room(count * like.element_size()) if like.device.type == "cpu" else None
    if shared is None:
        return torch.zeros(count, dtype=like.dtype, device=like.device)
    return torch.from_numpy(shared).view(like.dtype)


_count_references: Optional[Callable[[int], int]] = getattr(torch._C, "_storage_Use_Count", None)


def _references(tensor: torch.Tensor) -> int:
    """Return the number of references to a tensor's storage; 0 if torch does not report it."""
    return 0 if _count_references is None else int(_count_references(tensor.untyped_storage()._cdata))


class SparseBucket(Bucket):
    """One parameter with sparse gradients: the entries of all ranks are concatenated."""

    def __init__(self, parameter: torch.Tensor, name: str, reduction: Reduction) -> None:
        super().__init__([parameter], [name], reduction)

    def take(self, parameter: torch.Tensor) -> None:
        """Add the complete gradient; without a gradient, a sparse one without entries."""
        if parameter.grad is None:
            self._absent.add(parameter)
            parameter.grad = torch.zeros_like(parameter.detach(), layout=torch.sparse_coo)

    def submit(self) -> None:
        """Start the reduction, after all members have been taken."""
        gradient, how = _gradient(self.parameters[0]), self.reduction
        gradient = gradient.coalesce() if gradient.is_sparse else gradient
        finish_earlier("allgather", f"{self.name}.sparse", how.process_set)
        self.handle = handles.start_sparse(gradient, self.name, how.op, how.process_set, not self._absent)

    def finish(self) -> None:
        """Wait for the reduction, and set the gradient to its result, or to None if no rank has one."""
        handle, self.handle = self.handle, None
        self._absent.clear()
        (parameter,) = self.parameters
        reduced = handles.synchronize(handle)
        dense = reduced is not None and not reduced.is_sparse
        parameter.grad = _as_gradient(reduced, parameter) if dense else reduced


def _gradient(parameter: torch.Tensor) -> torch.Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _set_gradient(parameter: torch.Tensor, whole: torch.Tensor) -> None:
    """Set a gradient to reduced elements, in the layout and type of a rank that had none.

    Optimizers that compute in another order, or in another type, round differently.
    """
    own = parameter.grad
    strides = torch.empty_like(parameter.detach(), device="meta").stride()
    if own is None or own.is_sparse or own.dtype != _gradient_type(parameter) or own.stride() != strides:
        parameter.grad = _as_gradient(whole, parameter)
    else:
        own.copy_(whole)


def _as_gradient(values: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    return like_parameter(values.contiguous(), parameter).to(_gradient_type(parameter))


def _gradient_type(parameter: torch.Tensor) -> torch.dtype:
    """Return the type of gradients: not the parameter's if the program has set ``grad_dtype``."""
    return getattr(parameter, "grad_dtype", None) or parameter.dtype


def _dense(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.to_dense() if gradient.is_sparse else gradient


def codec_of(parameter: torch.Tensor, compression: Any) -> str:
    """Return the codec for a parameter's gradient; see :func:`ringcomm._adapter.compression.codec_for`."""
    return codec_for(compression, str(parameter.dtype).rpartition(".")[2], parameter.shape)


def make_bucket(
    parameters: Parameters, names: Sequence[str], reduction: Reduction, residuals: Residuals
) -> Bucket:
    """Return a bucket for dense gradients: flat if dtype, device and compression allow it."""
    compression = reduction.compression
    kinds = {(parameter.dtype, parameter.device) for parameter in parameters}
    codecs = {codec_of(parameter, compression) for parameter in parameters}
    if len(kinds) == 1 and is_elementwise(compression):
        # A group that the program has chosen may be of several kinds.
        coarse = sorted(codecs & BLOCKWISE)
        codec = coarse[0] if coarse else "bf16" if "bf16" in codecs else "none"
        return FlatBucket(parameters, names, reduction, codec if reduction.adds else "none", residuals)
    if is_elementwise(compression) and codecs != {"none"}:
        reduction = reduction._replace(compression=NoneCompressor)
    return EachBucket(parameters, names, reduction)
