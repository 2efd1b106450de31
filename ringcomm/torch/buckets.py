"""Buckets of gradients that are reduced as one operation: in one flat tensor, one by one, or sparse.

In a :class:`FlatBucket` the parameters' ``.grad`` are views of the flat tensor after the reduction, so the
engine reduces gradients in place. A gradient to which autograd adds (after ``zero_grad(set_to_none=False)``)
is in its place already; a new gradient is copied there, once.
"""

from __future__ import annotations

import warnings
from typing import Any, Callable, List, Optional, Sequence

import torch

from .. import api
from .._adapter.compression import BLOCKWISE, NoneCompressor, Residuals, codec_for, is_elementwise
from .._adapter.gradients import bucket_name
from .._adapter.reduction import Reduction
from ..arrays.kinds import device_kind
from ..arrays.operands import Operand, mirrors
from ..calls.async_calls import wire_name
from ..calls.process_set import number_of
from ..codec.codecs import BLOCK_ITEMS
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
    """The gradients of some parameters, and their reduction; ``missing`` of them have not been taken."""

    def __init__(self, parameters: Parameters, names: Sequence[str], reduction: Reduction) -> None:
        self.parameters = list(parameters)
        self.names = list(names)
        self.reduction = reduction
        self.name = bucket_name(self.names, [parameter.shape for parameter in self.parameters])
        self.missing = len(self.parameters)
        self.handle: Any = None
        self._wire_name = wire_name("allreduce", self.name)
        self._absent = 0  # a bit for each member that this rank has no gradient of; all ranks exchange it

    def take(self, place: int) -> None:
        """Add a member's complete gradient; without a gradient, zeros."""
        parameter = self.parameters[place]
        if parameter.grad is None:
            self._absent |= 1 << place
            parameter.grad = torch.zeros_like(parameter, memory_format=torch.preserve_format)

    def submit(self) -> None:
        """Start the reduction, after all members have been taken."""
        raise NotImplementedError

    def _start(self, operands: Sequence[Operand], codec: Any = None, residuals: Sequence[Array] = ()) -> None:
        how, engine = self.reduction, api.context().engine
        process_set = number_of(how.process_set)
        engine.finish_earlier(self._wire_name, process_set)
        self.handle = engine.allreduce(
            [item.flat for item in operands], how.call(self.name, how.weight_now(), codec), self._wire_name,
            [item.shape for item in operands], process_set,
            convert=lambda _: [item.finish() for item in operands],
            residuals=residuals, absent=self._absent, mirrors=mirrors(operands),
        )  # fmt: skip

    def finish(self) -> None:
        """Wait for the reduction, and set every member's gradient to its result."""
        raise NotImplementedError

    def reset(self) -> None:
        """Drop a reduction in progress: it has failed, or its result is not needed."""
        self.handle = None
        self._absent = 0

    def _leave_out(self, absent: int) -> None:
        """Remove gradients (a bit mask) that no rank has: momentum and decay must not apply."""
        for place, parameter in enumerate(self.parameters) if absent else ():
            if absent >> place & 1:
                parameter.grad = None
        self._absent = 0


class EachBucket(Bucket):
    """Gradients that are compressed separately: for custom compressions, mixed dtypes and devices."""

    _restore: Callable[[Sequence[Any]], List[Any]]
    # of the gradients at the start of the reduction: PyTorch counts changes in place
    _versions: Sequence[int] = ()

    def submit(self) -> None:
        """Start the reduction, after all members have been taken."""
        gradients = [_gradient(parameter) for parameter in self.parameters]
        self._versions = [item._version for item in gradients]
        dense = [item.to_dense() if item.is_sparse else item for item in gradients]
        _, sent, self._restore = self.reduction.prepared(dense)
        self._start([operand_of(tensor, "allreduce", in_place=True) for tensor in sent])

    def finish(self) -> None:
        """Wait for the reduction, and set every member's gradient to its result."""
        handle, self.handle = self.handle, None
        pairs = zip(self.parameters, self._versions)
        if any(item.grad is not None and item.grad._version != version for item, version in pairs):
            warnings.warn(_CHANGED, stacklevel=2)
        for parameter, whole in zip(self.parameters, self._restore(handle.wait())):
            _set_gradient(parameter, whole.reshape(parameter.shape))
        self._leave_out(handle.absent)


class FlatBucket(Bucket):
    """Gradients of one dtype and device in one flat tensor; with codecs of blocks each begins a block."""

    def __init__(
        self, parameters: Parameters, names: Sequence[str], reduction: Reduction, codec: str = "none",
        residuals: Optional[Residuals] = None,
    ) -> None:  # fmt: skip
        super().__init__(parameters, names, reduction)
        self._codec = codec
        self._residuals = residuals if codec in BLOCKWISE else None
        self._starts: List[int] = []
        stop = 0
        for parameter in parameters:
            self._starts.append(stop)
            stop = self._after(stop + parameter.numel())
        self._count = stop
        # Of each member's gradient in the flat tensor. Views are made anew each time, so that only the user's
        # program holds references to it.
        self._views = [
            (item.shape, torch.empty(item.shape, device="meta").stride(), start)
            for item, start in zip(parameters, self._starts)
        ]
        self._flat: Optional[torch.Tensor] = None
        self._addresses: List[int] = []
        self._own_references = 0
        self._is_begun = False  # the flat tensor has gradients of this step
        self._version = 0  # of the flat tensor, as the reduction has started: PyTorch counts changes in place
        self._wire: Optional[torch.Tensor] = None
        self._operand: Optional[Operand] = None  # what is sent, on the CPU
        self._feedback: Sequence[Array] = ()

    def _after(self, stop: int) -> int:
        """Return where the next member begins."""
        return stop if self._residuals is None else -(-stop // BLOCK_ITEMS) * BLOCK_ITEMS

    def take(self, place: int) -> None:
        """Add a member's complete gradient; without a gradient, zeros."""
        flat = self._flat if self._is_begun and self._flat is not None else self._begin()
        parameter = self.parameters[place]
        gradient = parameter.grad
        at = None if gradient is None or gradient.is_sparse else gradient.data_ptr()
        # Comparing views would take 20 times as long.
        if gradient is not None and at == self._addresses[place] and gradient.is_contiguous():
            return
        slot = flat.as_strided(*self._views[place])
        if gradient is None:
            self._absent |= 1 << place
            slot.zero_()
            parameter.grad = _as_gradient(slot, parameter)
        elif gradient.is_sparse:
            slot.copy_(gradient.to_dense())
        else:
            slot.copy_(gradient)
            if parameter.is_contiguous() and gradient.dtype == slot.dtype:
                parameter.grad = slot

    def submit(self) -> None:
        """Start the reduction, after all members have been taken."""
        flat = self._flat
        assert flat is not None
        self._version = flat._version
        sent = flat if self._wire is None else self._wire.copy_(flat)
        # Memory of the CPU is reduced in place. Memory of a CUDA device is being copied from here on, in
        # order with the backward pass, which goes on at once.
        operand = self._operand or operand_of(sent, "allreduce", in_place=True)
        self._start([operand], self._codec, self._feedback)

    def finish(self) -> None:
        """Wait for the reduction, and set every member's gradient to its result."""
        handle, self.handle = self.handle, None
        (reduced,) = handle.wait()
        flat = self._flat
        assert flat is not None
        if flat._version != self._version:
            warnings.warn(_CHANGED, stacklevel=2)
        if reduced is not flat:
            flat.copy_(reduced)
        for parameter, address, view in zip(self.parameters, self._addresses, self._views):
            own = parameter.grad
            if own is None or own.is_sparse or own.data_ptr() != address or not own.is_contiguous():
                _set_gradient(parameter, flat.as_strided(*view))
        self._is_begun = False
        self._leave_out(handle.absent)

    def reset(self) -> None:
        """Drop a reduction in progress, and its memory."""
        if self._residuals is not None and self.handle is not None:
            self._residuals.drop(self.names)
        super().reset()
        # The engine may still write to these.
        self._flat = self._wire = self._operand = None
        self._feedback = ()
        self._is_begun = False

    def _begin(self) -> torch.Tensor:
        """Return the flat tensor for a step's gradients; a new one if the program holds the last step's."""
        flat = self._flat
        if flat is None or not self._is_reusable(flat):
            flat = self._flat = _zeros(self._count, self.parameters[0])
            self._addresses = [flat.data_ptr() + start * flat.element_size() for start in self._starts]
            smaller = wire_torch_dtype(self.reduction.compression, flat.dtype)
            self._wire = None if smaller is None else torch.empty_like(flat, dtype=smaller)
            sent = flat if self._wire is None else self._wire
            in_place = flat.is_cpu and device_kind(flat) is None
            self._operand = operand_of(sent, "allreduce", in_place=True) if in_place else None
            self._own_references = _references(flat)
            if self._residuals is not None and not self._feedback:
                sizes = [parameter.numel() for parameter in self.parameters]
                whole = self._residuals.side_by_side(self.names, sizes, self._starts, self._count)
                self._feedback = (whole,)
        self._is_begun = True
        return flat

    def _is_reusable(self, flat: torch.Tensor) -> bool:
        """Return whether the memory may be overwritten.

        A tensor that is still a parameter's ``.grad`` may be: gradients change in place. After
        ``zero_grad(set_to_none=True)`` the program may hold references to the old gradients.
        """
        start, stop = flat.data_ptr(), flat.data_ptr() + flat.numel() * flat.element_size()
        for parameter in self.parameters:
            gradient = parameter.grad
            if gradient is not None and not gradient.is_sparse and start <= gradient.data_ptr() < stop:
                return True
        return 0 < _references(flat) <= self._own_references


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
    """One parameter with sparse gradients, of ``dims`` sparse dimensions: all ranks' entries together."""

    def __init__(self, parameter: torch.Tensor, name: str, reduction: Reduction, dims: int) -> None:
        super().__init__([parameter], [name], reduction)
        self._dims = dims

    def take(self, place: int) -> None:
        """Do nothing: the gradient is taken when it is sent."""

    def submit(self) -> None:
        """Start the reduction; without a gradient, of no entries."""
        (parameter,), how = self.parameters, self.reduction
        gradient = parameter.grad
        if gradient is None:
            shape = parameter.shape
            indices = torch.empty(self._dims, 0, dtype=torch.int64, device=parameter.device)
            values = parameter.detach().new_empty(0, *shape[self._dims :])
            gradient = torch.sparse_coo_tensor(indices, values, shape, check_invariants=False)
        elif not gradient.is_sparse:
            gradient = gradient.to_sparse(self._dims)
        name = wire_name("allgather", f"{self.name}.sparse")
        api.context().engine.finish_earlier(name, number_of(how.process_set))
        entries = gradient.coalesce()
        self.handle = handles.sparse_allreduce_async(entries, self.name, how.op, how.process_set)

    def finish(self) -> None:
        """Wait for the reduction, and set the gradient to its result, or to None if no rank has entries."""
        handle, self.handle = self.handle, None
        (parameter,) = self.parameters
        reduced = handle()
        parameter.grad = reduced if reduced._nnz() else None


def _gradient(parameter: torch.Tensor) -> torch.Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _set_gradient(parameter: torch.Tensor, whole: torch.Tensor) -> None:
    """Set a gradient to reduced elements, in its parameter's layout and type, which decide on rounding."""
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
