"""Reduce a model's gradients while the backward pass computes others.

:class:`GradientReducer` has the hooks on parameters. It divides gradients into buckets, each of which is
reduced as one operation. In a :class:`FlatBucket` the parameters' ``.grad`` are views of one flat tensor
after the reduction, so the engine reduces gradients in place. A gradient to which autograd adds (after
``zero_grad(set_to_none=False)``) is in its place already; a new gradient is copied there, once.
"""

from __future__ import annotations

import time
import warnings
import weakref
from contextlib import suppress
from typing import Any, Callable, Dict, Iterable, List, Optional, Sequence, Set, Tuple

import numpy as np
import torch

from .. import api
from .._adapter.compression import (
    AutoCompression,
    NoneCompressor,
    Residuals,
    adviser,
    codec_for,
    dtype_name,
    is_elementwise,
    wire_dtype,
)
from .._adapter.gradients import Gradient, bucket_name, check_start, group_name, plan_buckets, plan_groups
from .._adapter.graph_callbacks import state_of
from .._adapter.reduction import Reduction, VariableReducer, is_coded
from .._adapter.submit import finish_earlier, run_all
from ..arrays.kinds import device_kind
from ..arrays.operands import Operand, mirrors
from ..arrays.torch_tensors import elements_of
from ..calls.async_calls import wire_name
from ..calls.process_set import included_in, number_of
from ..codec.codecs import BLOCK_ITEMS
from ..collective.rows import cumulative
from ..dtypes import Array
from ..errors import ConfigError, NotInitializedError, RingcommError
from ..job.context import Context
from ..ops import BLOCKWISE, CODECS, ReduceOp
from ..transport.arena import shared_room
from .mpi_ops import operand_of, reduced, sparse_allreduce_async, synchronize

_TOO_MANY_PASSES = (
    "Gradients were computed more than backward_passes_per_step times before call to step(). Increase "
    "backward_passes_per_step to accumulate gradients locally."
)
_CHANGED = (
    "Gradients were changed between loss.backward() and optimizer.step(), for example clipped or unscaled, "
    "while they were being reduced: ranks may train with different ones. Call optimizer.synchronize() first, "
    "and then optimizer.step() within optimizer.skip_synchronize()."
)

Parameters = Sequence[torch.Tensor]

_alive: weakref.WeakSet[GradientReducer] = weakref.WeakSet()
# Reducers whose step has begun and not ended. The program may have dropped such an optimizer after some ranks
# submitted buckets that others have not, so it is kept until its names are used again.
_in_step: Set[GradientReducer] = set()

# Returns the number of the backward pass in which a hook is called.
_current_pass: Callable[[], int] = getattr(torch._C, "_current_graph_task_id", lambda: -1)


class GradientReducer:
    """The hooks on parameters, and the buckets in which their gradients are reduced. Before the first step
    ranks do not know which gradients are sparse. They tell each other at its end, and then form the buckets;
    from the second step on buckets are reduced during the backward pass. A gradient that no rank had so far
    counts as a dense one, until the end of the step in which a rank has it.
    """

    def __init__(
        self, parameters: Parameters, names: Dict[int, str], reduction: Reduction, passes: int,
        residuals: Optional[Residuals],
    ) -> None:  # fmt: skip
        self.parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._frozen = [parameter for parameter in parameters if not parameter.requires_grad]
        self._names = names
        given = reduction.compression
        self._auto = given if isinstance(given, AutoCompression) else None
        self.reduction = reduction if self._auto is None else reduction._replace(compression=given.chosen)
        self.residuals = Residuals() if residuals is None else residuals
        self.passes = passes
        self.passes_left = [passes] * len(self.parameters)
        # since the last synchronize(): there are gradients; they are being reduced; they have been
        self.fresh = self.started = self.synchronized = False
        self._pass = -1  # the backward pass that has begun the step
        self.buckets: List[Bucket] = []
        self.places: Dict[int, Tuple[Bucket, int]] = {}  # by parameter: its bucket, and its place there
        self._sparse: Dict[int, int] = {}  # by parameter: sparse dimensions of its gradients
        self._unseen: List[int] = []  # parameters of which no rank has had a gradient yet
        self._context: Any = None
        self._joins = 0
        self._is_included = False
        self.hooks: List[Any] = []  # none if a later reducer has the parameters
        if isinstance(api.placed(), Context):  # otherwise this process joins its job later
            self._read_context()
        for other in list(_alive):
            if self._common(other):
                # The optimizer has been wrapped again: two reducers must not handle one gradient. The older
                # one still reduces in its step(), but not during the backward pass.
                other.remove_hooks()
                other.reset()
        _alive.add(self)
        self._hook_from(0)

    def _common(self, other: GradientReducer) -> List[str]:
        theirs = set(map(id, other.parameters))
        return [self._names[id(item)] for item in self.parameters if id(item) in theirs]

    def _names_of(self, indices: Iterable[int]) -> List[str]:
        return [self._names[id(self.parameters[index])] for index in indices]

    # ---- the plan ----------------------------------------------------------------------------

    def _plan(self, ask: bool = True) -> None:
        """Form buckets of the parameters that are in none; the ranks tell each other which are sparse."""
        first = len(self.places)
        if ask and not self.reduction.all_dense:
            asked = range(first, len(self.parameters))
            self._unseen += self._agree_layouts(asked, self._own_layouts(asked))
        compression, groups = self.reduction.compression, self.reduction.groups
        if groups is not None and not first:
            plan = plan_groups(self.parameters, groups)
        else:
            plan = plan_buckets([
                Gradient(it.numel() * it.element_size(), (it.dtype, it.device, _codec_of(it, compression)))
                for it in self.parameters[first:]
            ])  # fmt: skip
        for group in plan:
            indices = [first + place for place in group if first + place not in self._sparse]
            members = [self.parameters[index] for index in indices]
            if members:
                names = self._names_of(indices)
                self._add_bucket(_make_bucket(members, names, self.reduction, self.residuals), indices)
        for index, dims in self._sparse.items():
            if index >= first:
                (name,) = self._names_of([index])
                self._add_bucket(SparseBucket(self.parameters[index], name, self.reduction, dims), [index])

    def _add_bucket(self, bucket: Bucket, indices: Sequence[int]) -> None:
        self.buckets.append(bucket)
        self.places.update({index: (bucket, place) for place, index in enumerate(indices)})

    def _forget_buckets(self) -> None:
        self.buckets.clear()
        self.places.clear()

    def _own_layouts(self, indices: Sequence[int]) -> List[int]:
        """Return for each gradient 0 if there is none, or one more than its sparse dimensions."""
        gradients = [self.parameters[index].grad for index in indices]
        return [0 if it is None else 1 + it.sparse_dim() if it.is_sparse else 1 for it in gradients]

    def _agree_layouts(self, indices: Sequence[int], layouts: Sequence[int]) -> List[int]:
        """Agree on which gradients are sparse: on all ranks, if they are on one. Return those of no rank."""
        own = np.array(layouts, np.uint8)
        name = bucket_name(self._names_of(indices), [self.parameters[index].shape for index in indices])
        api.context().engine.allreduce(
            [own], ReduceOp.MAX, wire_name("allreduce", f"layouts of {name}"),
            process_set=number_of(self.reduction.process_set), urgent=True,
        ).wait()  # fmt: skip
        agreed = list(zip(indices, own.tolist()))
        self._sparse.update({index: layout - 1 for index, layout in agreed if layout > 1})
        return [index for index, layout in agreed if not layout]

    def _see_first_gradients(self, layouts: Sequence[int]) -> None:
        """Agree on gradients that no rank had before this step; ``layouts``: the own ones of the unseen."""
        pairs = zip(self._unseen, layouts)
        seen = {index: layout for index, layout in pairs if self.parameters[index].grad is not None}
        if not seen:
            return
        self._unseen = [index for index in self._unseen if index not in seen]
        self._agree_layouts(list(seen), list(seen.values()))
        sparse = [index for index in seen if index in self._sparse]
        for index in sparse:
            self.parameters[index].grad = self.parameters[index].grad.to_sparse(self._sparse[index])
        if sparse:
            self._forget_buckets()
            self._plan(ask=False)

    def _take_choice(self) -> None:
        """Use the compression that is chosen now, in new buckets if it has changed."""
        if self._auto is not None and self._auto.current() is not self.reduction.compression:
            self.reduction = self.reduction._replace(compression=self._auto.chosen)
            if self.buckets:
                self._forget_buckets()
                self._plan(ask=False)

    def _add_unfrozen(self) -> None:
        """Add the parameters that require gradients now, and did not when this was made."""
        unfrozen = [parameter for parameter in self._frozen if parameter.requires_grad]
        if unfrozen:
            self._frozen = [parameter for parameter in self._frozen if not parameter.requires_grad]
            first = len(self.parameters)
            self.parameters += unfrozen
            self.passes_left += [self.passes] * len(unfrozen)
            if self.hooks:
                self._hook_from(first)

    # ---- hooks, and the beginning of a step --------------------------------------------------

    def _hook_from(self, first: int) -> None:
        owner = weakref.ref(self)
        for index in range(first, len(self.parameters)):
            parameter, hook = self.parameters[index], _hook(owner, index)
            register = getattr(parameter, "register_post_accumulate_grad_hook", None)
            handle = _OnAccumulator(parameter, hook) if register is None else register(hook)
            self.hooks.append(handle)

    def remove_hooks(self) -> None:
        """Remove the hooks: gradients are then reduced in :meth:`synchronize` only."""
        for handle in self.hooks:
            handle.remove()
        self.hooks.clear()

    def _read_context(self) -> None:
        self._context = api.context()
        self._joins = self._context.engine.joins
        self._is_included = included_in(self.reduction.process_set)
        if self._is_included and (self._auto is None or self._auto.advises):
            self._auto = adviser(self.reduction.compression, self.reduction.process_set)
        if self._auto is not None:
            self._auto.current()  # from this view on it counts steps

    def _is_active(self) -> bool:
        """Return whether there are other ranks to reduce with, in the current job, or steps to be counted."""
        context = api.context()
        if context is not self._context or context.engine.joins != self._joins:
            is_first = self._context is None
            self._read_context()
            if not is_first:  # ranks that are new, or had no data before join(), know no layouts
                self._sparse.clear()
                self._unseen.clear()
                self._forget_buckets()
        self._take_choice()
        return self._is_included and (self._context.size > 1 or self.reduction.weight is not None)

    def begin(self) -> bool:
        """Begin a step with its first gradient; return whether gradients are reduced."""
        if not self._is_active():
            return False
        if not self.buckets and self.reduction.all_dense:
            self._plan()
        self.started, self._pass = True, _current_pass()
        _in_step.add(self)
        self._end_dropped_steps()
        return True

    def _end_dropped_steps(self) -> None:
        """End the reductions of earlier backward passes that have the names of this reducer's."""
        names = {bucket.name for bucket in self.buckets}
        for other in list(_in_step):
            left = other._context is self._context and other._pass != self._pass
            if left and not names.isdisjoint(bucket.name for bucket in other.buckets):
                other.reset()

    def submit(self, bucket: Bucket) -> None:
        """Start the reduction of a bucket, of which all gradients have been taken."""
        if self._auto is not None:
            self._auto.submitting(sum(4 * item.numel() for item in bucket.parameters))
        bucket.submit()

    # ---- the end of a step -------------------------------------------------------------------

    def synchronize(self) -> None:
        """Reduce the remaining gradients (absent ones as zeros), and wait for all reductions to end."""
        self.fresh = False
        if not self._is_active():
            self._end_step()
            return
        self._refuse_shared()
        waiting_from_s = time.perf_counter()
        try:
            self._add_unfrozen()
            self._submit_remaining()
            first = self._names[id(self.parameters[0])] if self.parameters else ""
            label = f"{first} of {len(self.parameters)}"
            check_start(self.reduction.process_set, label, lambda: map(first_elements, self.parameters))
            layouts = self._own_layouts(self._unseen)
            run_all([bucket.finish for bucket in self.buckets])
            if self._unseen:
                self._see_first_gradients(layouts)
        except BaseException:
            self._reset_buckets()
            raise
        finally:
            self._end_step()
        if self.reduction.weight is not None:
            self.reduction.weight.reduced()
        if self._auto is not None:
            nbytes = sum(4 * item.numel() for item in self.parameters if item.is_floating_point())
            if self._auto.finished(nbytes, waiting_from_s):
                self._take_choice()

    def _refuse_shared(self) -> None:
        """Refuse to reduce gradients that a later reducer, which has the hooks, is reducing in this step."""
        for other in list(_alive) if len(_alive) > 1 else ():
            common = self._common(other) if other is not self and other.started else []
            if common:
                raise ConfigError(
                    f"{common[0]} belongs to two DistributedOptimizers, and the other one is reducing its "
                    "gradient. Let only one have it: an optimizer may have several parameter groups."
                )

    def _submit_remaining(self) -> None:
        if len(self.places) < len(self.parameters):
            self._plan()
            self._end_dropped_steps()
        for bucket in self.buckets:
            if bucket.handle is None:
                for place in range(len(bucket.parameters)):
                    bucket.take(place)
                self.submit(bucket)

    def reset(self, passes: Optional[int] = None) -> None:
        """Drop all reductions in progress, once they have ended on all ranks: their names are free then."""
        if self._is_under_way():
            without = [item for item in self.parameters if item.grad is None]
            with suppress(RingcommError):
                self._submit_remaining()
            for bucket in self.buckets:
                with suppress(RingcommError):
                    synchronize(bucket.handle)
            for parameter in without:
                parameter.grad = None
        self._reset_buckets()
        self.passes = passes or self.passes
        self._end_step()

    def _reset_buckets(self) -> None:
        for bucket in self.buckets:
            bucket.reset()

    def _is_under_way(self) -> bool:
        """Return whether any rank may have submitted reductions that have not been waited for."""
        if self.started and (self.passes == 1 or any(item.handle is not None for item in self.buckets)):
            with suppress(NotInitializedError):
                return bool(self.buckets) and api.placed() is self._context
        return False

    def _end_step(self) -> None:
        self.started = False
        _in_step.discard(self)
        self.passes_left = [self.passes] * len(self.parameters)
        for bucket in self.buckets:
            bucket.missing = len(bucket.parameters)


def _hook(owner: Callable[[], Optional[GradientReducer]], index: int) -> Callable[..., None]:
    """Return the hook for autograd after a gradient is added; it holds the reducer weakly."""

    def computed(*ignored: Any) -> None:
        reducer = owner()
        if reducer is None:
            return
        reducer.fresh = True
        if not reducer.started and not reducer.begin():
            return
        gradient = reducer.parameters[index].grad
        assert not gradient.requires_grad, "gradients of gradients (create_graph=True) cannot be reduced"
        left = reducer.passes_left
        if left[index] <= 0:
            raise AssertionError(_TOO_MANY_PASSES)
        left[index] -= 1
        if left[index] or index not in reducer.places:
            return
        bucket, place = reducer.places[index]
        bucket.take(place)
        bucket.missing -= 1
        if not bucket.missing:
            reducer.submit(bucket)

    return computed


class _OnAccumulator:
    """A hook on the node that adds to ``parameter.grad``, for PyTorch before 2.1."""

    def __init__(self, parameter: torch.Tensor, hook: Callable[..., None]) -> None:
        with torch.enable_grad():
            self._view = parameter.expand_as(parameter)
        node: Any = self._view.grad_fn
        self._accumulator = node.next_functions[0][0]  # keeps the node alive
        self._handle = self._accumulator.register_hook(hook)

    def remove(self) -> None:
        self._handle.remove()


# ---- buckets -----------------------------------------------------------------------------------------------


class Bucket:
    """Gradients that are reduced as one operation; ``missing`` of them have not been taken. Here each is
    compressed separately: for custom compressions, and groups of several dtypes or devices.
    """

    _restore: Callable[[Sequence[Any]], List[Any]]
    _versions: Sequence[int] = ()  # of the gradients, as the reduction has started: PyTorch counts changes

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
        gradients = [parameter.grad for parameter in self.parameters]
        self._versions = [item._version for item in gradients]
        dense = [item.to_dense() if item.is_sparse else item for item in gradients]
        _, sent, self._restore = self.reduction.prepared(dense)
        self._start([operand_of(tensor, "allreduce", in_place=True) for tensor in sent])

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
        handle, self.handle = self.handle, None
        pairs = zip(self.parameters, self._versions)
        if any(item.grad is not None and item.grad._version != version for item, version in pairs):
            warnings.warn(_CHANGED, stacklevel=2)
        for parameter, whole in zip(self.parameters, self._restore(handle.wait())):
            _set_gradient(parameter, whole.reshape(parameter.shape))
        self._leave_out(handle.absent)

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


class FlatBucket(Bucket):
    """Gradients of one dtype and device in one flat tensor; with codecs of blocks each begins a block."""

    def __init__(
        self, parameters: Parameters, names: Sequence[str], reduction: Reduction, codec: str,
        residuals: Residuals,
    ) -> None:  # fmt: skip
        super().__init__(parameters, names, reduction)
        self._codec = codec
        self._residuals = residuals if codec in BLOCKWISE else None
        block = BLOCK_ITEMS if codec in BLOCKWISE else 1
        *self._starts, self._count = cumulative([-(-it.numel() // block) for it in parameters], block)
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

    def take(self, place: int) -> None:
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
        flat = self._flat
        assert flat is not None
        self._version = flat._version
        sent = flat if self._wire is None else self._wire.copy_(flat)
        # Memory of the CPU is reduced in place. Memory of a CUDA device is being copied from here on, in
        # order with the backward pass, which goes on at once.
        operand = self._operand or operand_of(sent, "allreduce", in_place=True)
        self._start([operand], self._codec, self._feedback)

    def finish(self) -> None:
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
        """Drop a reduction in progress, and its memory, to which the engine may still write."""
        if self._residuals is not None and self.handle is not None:
            self._residuals.drop(self.names)
        super().reset()
        self._flat = self._wire = self._operand = None
        self._feedback = ()
        self._is_begun = False

    def _begin(self) -> torch.Tensor:
        """Return the flat tensor for a step's gradients; a new one if the program holds the last step's."""
        flat = self._flat
        if flat is None or not self._is_reusable(flat):
            flat = self._flat = _zeros(self._count, self.parameters[0])
            self._addresses = [flat.data_ptr() + start * flat.element_size() for start in self._starts]
            smaller = wire_dtype(self.reduction.compression.kind, dtype_name(flat))
            self._wire = None if smaller is None else torch.empty_like(flat, dtype=getattr(torch, smaller))
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
        """Return whether the memory may be overwritten. That of a ``.grad`` may: gradients change in place.
        After ``zero_grad(set_to_none=True)`` the program may hold references to the old gradients.
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
            indices = torch.empty(self._dims, 0, dtype=torch.int64, device=parameter.device)
            values = parameter.detach().new_empty(0, *parameter.shape[self._dims :])
            gradient = torch.sparse_coo_tensor(indices, values, parameter.shape, check_invariants=False)
        elif not gradient.is_sparse:
            gradient = gradient.to_sparse(self._dims)
        name = wire_name("allgather", f"{self.name}.sparse")
        api.context().engine.finish_earlier(name, number_of(how.process_set))
        self.handle = sparse_allreduce_async(gradient.coalesce(), self.name, how.op, how.process_set)

    def finish(self) -> None:
        """Wait for the reduction, and set the gradient to its result, or to None if no rank has entries."""
        handle, self.handle = self.handle, None
        reduced = handle()
        self.parameters[0].grad = reduced if reduced._nnz() else None


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


def like_parameter(values: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return ``values`` with the strides of a parameter of their shape, which fused optimizers rely on."""
    if parameter.is_contiguous() or values.shape != parameter.shape:
        return values
    return torch.empty_like(parameter.detach(), dtype=values.dtype, device=values.device).copy_(values)


def first_elements(tensor: torch.Tensor) -> Array:
    """Return the first elements of a tensor's first row as float32; none of complex ones and subclasses."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.is_complex() or not tensor.numel():
        return np.empty(0, np.float32)
    row = tensor.detach()[(0,) * (tensor.dim() - 1)].reshape(-1)[:8]
    return elements_of(row.to("cpu", torch.float32))


def _codec_of(parameter: torch.Tensor, compression: Any) -> str:
    return codec_for(compression, dtype_name(parameter), parameter.shape)


def _make_bucket(
    parameters: Parameters, names: Sequence[str], reduction: Reduction, residuals: Residuals
) -> Bucket:
    """Return a bucket for dense gradients: flat if dtype, device and compression allow it."""
    compression = reduction.compression
    kinds = {(parameter.dtype, parameter.device) for parameter in parameters}
    codecs = {_codec_of(parameter, compression) for parameter in parameters}
    if len(kinds) == 1 and is_elementwise(compression):
        # A group that the program has chosen may be of several kinds.
        codec = max(codecs, key=CODECS.index)
        return FlatBucket(parameters, names, reduction, codec if reduction.adds else "none", residuals)
    if is_elementwise(compression) and codecs != {"none"}:
        reduction = reduction._replace(compression=NoneCompressor)
    return Bucket(parameters, names, reduction)


class KerasReducer(VariableReducer):
    """Reduce gradients of Keras variables on PyTorch, made dense."""

    def reduce_shared(
        self, gradients: Sequence[Any], variables: Sequence[Any], absent: Sequence[Any],
        scope: str = "gradients", *args: Any,
    ) -> List[Any]:  # fmt: skip
        """Reduce gradients of variables that all ranks have, in one grouped allreduce."""
        with torch.no_grad():
            dense = [gradient.to_dense() if gradient.is_sparse else gradient for gradient in gradients]
            how, sent, restore = self.how.prepared(dense)
            state = state_of([*variables, *absent][0]) if is_coded(how.compression) else None
            name = group_name(variables, scope, absent)
            check_start(how.process_set, name, lambda: [first_elements(item.value) for item in variables])
            finish_earlier("allreduce", name, how.process_set)  # of a fit() that was interrupted
            results = reduced(how, name, sent, how.weight_now(), state)
            if how.weight is not None:
                how.weight.reduced()
            return restore(results)
