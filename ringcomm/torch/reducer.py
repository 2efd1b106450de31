"""Reduce a model's gradients while the backward pass computes others."""

from __future__ import annotations

import time
import weakref
from contextlib import suppress
from typing import Any, Callable, Dict, List, Optional, Sequence, Set, Tuple

import numpy as np
import torch

from .. import api
from .._adapter.compression import AutoCompression, Residuals
from .._adapter.gradients import Gradient, bucket_name, check_start, plan_buckets, plan_groups
from .._adapter.reduction import Reduction
from ..calls.async_calls import wire_name
from ..calls.process_set import included_in, number_of
from ..errors import ConfigError, NotInitializedError, RingcommError
from ..job.context import Context
from ..ops import ReduceOp
from . import handles
from .buckets import Bucket, SparseBucket, codec_of, make_bucket
from .tensors import first_elements

_TOO_MANY_PASSES = (
    "Gradients were computed more than backward_passes_per_step times before call to step(). Increase "
    "backward_passes_per_step to accumulate gradients locally."
)

_alive: weakref.WeakSet[GradientReducer] = weakref.WeakSet()
# Reducers whose step has begun and not ended. The program may have dropped such an optimizer after some ranks
# submitted buckets that others have not, so it is kept until its names are used again.
_in_step: Set[GradientReducer] = set()

# Returns the number of the backward pass in which a hook is called.
_current_pass: Callable[[], int] = getattr(torch._C, "_current_graph_task_id", lambda: -1)


class GradientReducer:
    """The owner of the hooks on parameters, and of the buckets in which their gradients are reduced.

    ``parameters`` must be in the same order, and ``names`` equal, on all ranks. Without groups, buckets have
    up to 8 MiB. ``residuals`` come from a reducer that this one replaces. ``fresh``: gradients have been
    computed since the last :meth:`synchronize`, also without other ranks; ``started``: with other ranks.
    ``synchronized``: the gradients are already reduced for the next step.

    Before the first step ranks do not know which gradients are sparse. They tell each other at its end, and
    then form the buckets; from the second step on buckets are reduced during the backward pass. A gradient
    that no rank had so far counts as a dense one, until the end of the step in which a rank has it.
    """

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        names: Dict[int, str],
        reduction: Reduction,
        passes: int = 1,
        residuals: Optional[Residuals] = None,
    ) -> None:
        self.parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._frozen = [parameter for parameter in parameters if not parameter.requires_grad]
        self._names_by_id = names
        self._names = [names[id(parameter)] for parameter in self.parameters]
        given = reduction.compression
        self._auto = given if isinstance(given, AutoCompression) else None
        self.reduction = reduction if self._auto is None else reduction._replace(compression=given.chosen)
        self.residuals = Residuals() if residuals is None else residuals
        self.passes = passes
        self.passes_left = [passes] * len(self.parameters)
        self.fresh = self.started = self.synchronized = False
        self._pass = -1  # the backward pass that has begun the step
        self.buckets: List[Bucket] = []
        self.places: Dict[int, Tuple[Bucket, int]] = {}  # by parameter: its bucket, and its place there
        self._sparse: Dict[int, int] = {}  # by parameter: sparse dimensions of its gradients
        self._unseen: List[int] = []  # parameters of which no rank has had a gradient yet
        self._context: Any = None
        self._is_included = False
        self._hooks: List[Any] = []
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
        """Return the names of the parameters that another reducer has as well."""
        theirs = set(map(id, other.parameters))
        return [name for item, name in zip(self.parameters, self._names) if id(item) in theirs]

    # ---- buckets -----------------------------------------------------------------------------

    def _plan(self, ask: bool = True) -> None:
        """Form buckets of the parameters that are in none; the ranks tell each other which are sparse."""
        first = len(self.places)
        if ask and not self.reduction.all_dense:
            asked = range(first, len(self.parameters))
            self._unseen += self._agree_layouts(asked, self._own_layouts(asked))
        gradients = [
            Gradient(
                item.numel() * item.element_size(),
                (item.dtype, item.device, codec_of(item, self.reduction.compression)),
            )
            for item in self.parameters[first:]
        ]
        groups = self.reduction.groups
        chosen = groups is not None and not first
        plan = plan_groups(self.parameters, groups or 1) if chosen else plan_buckets(gradients)
        for group in plan:
            indices = [first + place for place in group if first + place not in self._sparse]
            members = [self.parameters[index] for index in indices]
            names = [self._names[index] for index in indices]
            if members:
                self._add_bucket(make_bucket(members, names, self.reduction, self.residuals), indices)
        for index, dims in self._sparse.items():
            if index >= first:
                one = SparseBucket(self.parameters[index], self._names[index], self.reduction, dims)
                self._add_bucket(one, [index])

    def _add_bucket(self, bucket: Bucket, indices: Sequence[int]) -> None:
        self.buckets.append(bucket)
        self.places.update({index: (bucket, place) for place, index in enumerate(indices)})

    def _own_layouts(self, indices: Sequence[int]) -> List[int]:
        """Return for each gradient 0 if there is none, or one more than its sparse dimensions."""
        gradients = [self.parameters[index].grad for index in indices]
        return [0 if it is None else 1 + it.sparse_dim() if it.is_sparse else 1 for it in gradients]

    def _agree_layouts(self, indices: Sequence[int], layouts: Sequence[int]) -> List[int]:
        """Agree on which gradients are sparse: on all ranks, if they are on one. Return those of no rank."""
        own = np.array(layouts, np.uint8)
        name = bucket_name(
            [self._names[index] for index in indices], [self.parameters[index].shape for index in indices]
        )
        api.context().engine.allreduce(
            [own], ReduceOp.MAX, wire_name("allreduce", f"layouts of {name}"),
            process_set=number_of(self.reduction.process_set), urgent=True,
        ).wait()  # fmt: skip
        agreed = list(zip(indices, own.tolist()))
        self._sparse.update({index: layout - 1 for index, layout in agreed if layout > 1})
        return [index for index, layout in agreed if not layout]

    def _see_first_gradients(self, layouts: Sequence[int]) -> None:
        """Agree on gradients that no rank had before this step; ``layouts``: the own ones of the unseen."""
        seen = {
            index: layout
            for index, layout in zip(self._unseen, layouts)
            if self.parameters[index].grad is not None
        }
        if not seen:
            return
        self._unseen = [index for index in self._unseen if index not in seen]
        self._agree_layouts(list(seen), list(seen.values()))
        sparse = [index for index in seen if index in self._sparse]
        for index in sparse:
            gradient = self.parameters[index].grad
            assert gradient is not None
            self.parameters[index].grad = gradient.to_sparse(self._sparse[index])
        if sparse:
            self._forget_buckets()
            self._plan(ask=False)

    def _forget_buckets(self) -> None:
        self.buckets.clear()
        self.places.clear()

    def _add_unfrozen(self) -> None:
        """Add the parameters that require gradients now, and did not when this was made."""
        unfrozen = [parameter for parameter in self._frozen if parameter.requires_grad]
        if not unfrozen:
            return
        self._frozen = [parameter for parameter in self._frozen if not parameter.requires_grad]
        first = len(self.parameters)
        self.parameters += unfrozen
        self._names += [self._names_by_id[id(parameter)] for parameter in unfrozen]
        self.passes_left += [self.passes] * len(unfrozen)
        if self._hooks:
            self._hook_from(first)

    # ---- hooks -------------------------------------------------------------------------------

    def _hook_from(self, first: int) -> None:
        owner = weakref.ref(self)
        for index in range(first, len(self.parameters)):
            self._hooks.append(_when_accumulated(self.parameters[index], _hook(owner, index)))

    def remove_hooks(self) -> None:
        """Remove the hooks: gradients are then reduced in :meth:`synchronize` only."""
        for handle in self._hooks:
            handle.remove()
        self._hooks.clear()

    @property
    def hooked(self) -> bool:
        """Return whether this reducer has the hooks: no later one has its parameters."""
        return bool(self._hooks)

    def _read_context(self) -> None:
        """Read the current context, and whether this rank is a member of the process set."""
        self._context = api.context()
        self._is_included = included_in(self.reduction.process_set)

    def _is_active(self) -> bool:
        """Return whether there are other ranks to reduce with, in the current job, or steps to be counted."""
        if api.context() is not self._context:
            is_first = self._context is None
            self._read_context()
            if not is_first:  # ranks that have joined the job know no layouts
                self._sparse.clear()
                self._unseen.clear()
                self._forget_buckets()
                self._take_choice()
        return self._is_included and (self._context.size > 1 or self.reduction.weight is not None)

    def _take_choice(self) -> None:
        """Use the compression that is chosen now, in new buckets if it has changed."""
        if self._auto is not None and self._auto.current() is not self.reduction.compression:
            self.reduction = self.reduction._replace(compression=self._auto.chosen)
            if self.buckets:
                self._forget_buckets()
                self._plan(ask=False)

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

    # ---- steps -------------------------------------------------------------------------------

    def synchronize(self) -> None:
        """Reduce the remaining gradients (absent ones as zeros), and wait for all reductions.

        RingcommError: a reduction failed; all others have ended. ConfigError: another reducer has a parameter
        of this one, and is reducing its gradient.
        """
        self.fresh = False
        if not self._is_active():
            self._end_step()
            return
        self._refuse_shared()
        waiting_from_s = time.perf_counter()
        try:
            self._add_unfrozen()
            self._submit_remaining()
            label = f"{self._names[0] if self._names else ''} of {len(self._names)}"
            check_start(self.reduction.process_set, label, lambda: map(first_elements, self.parameters))
            layouts = self._own_layouts(self._unseen)
            problem = self._finish_all()
            if problem is None and self._unseen:
                self._see_first_gradients(layouts)
        except BaseException:
            self._reset_buckets()
            raise
        finally:
            self._end_step()
        if problem is not None:
            raise problem
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

    def _finish_all(self) -> Optional[BaseException]:
        """Complete all buckets; return the first error, once no operation is pending."""
        problem: Optional[BaseException] = None
        for bucket in self.buckets:
            try:
                bucket.finish()
            except Exception as error:  # noqa: BLE001 - returned
                bucket.reset()
                problem = problem or error
        return problem

    def reset(self, passes: Optional[int] = None) -> None:
        """Drop all reductions in progress, once they have ended on all ranks: their names are free then.

        ``passes`` is the new number of backward passes per step; None: unchanged.
        """
        if self._is_under_way():
            without = [item for item in self.parameters if item.grad is None]
            with suppress(RingcommError):
                self._submit_remaining()
            for bucket in self.buckets:
                with suppress(RingcommError):
                    handles.synchronize(bucket.handle)
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
        assert gradient is not None
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
        """Remove the hook."""
        self._handle.remove()


def _when_accumulated(parameter: torch.Tensor, hook: Callable[..., None]) -> Any:
    """Call a hook after each addition to ``parameter.grad``; return a handle with ``remove()``."""
    register = getattr(parameter, "register_post_accumulate_grad_hook", None)
    return _OnAccumulator(parameter, hook) if register is None else register(hook)
