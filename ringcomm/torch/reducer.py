"""Reduce a model's gradients while the backward pass computes others."""

from __future__ import annotations

import time
import weakref
from contextlib import suppress
from typing import Any, Callable, Dict, List, Optional, Sequence, Set, Tuple

import numpy as np
import torch

from .. import api
from .._adapter.checking import check_start
from .._adapter.choice import AutoCompression
from .._adapter.compression import Residuals
from .._adapter.gradients import Arrivals, Gradient, plan_buckets, plan_groups
from .._adapter.reduction import Reduction
from .._adapter.submit import finish_earlier, wire_name
from ..calls.process_set import included_in, number_of
from ..errors import ConfigError, MismatchError, NotInitializedError, RingcommError
from ..job.context import Context
from ..ops import ReduceOp
from .buckets import Bucket, SparseBucket, codec_of, make_bucket
from .tensors import first_elements

_DENSE, _SPARSE = 1, 2  # a rank's report about the layout of a gradient; 0: it has none

_alive: weakref.WeakSet[GradientReducer] = weakref.WeakSet()

# Reducers with gradients of a backward pass whose buckets are not all complete. Other ranks may have
# submitted these buckets, so they are submitted even if the optimizer is dropped.
_unsubmitted: Set[GradientReducer] = set()

# Returns the number of the backward pass in which a hook is called.
_current_pass: Callable[[], int] = getattr(torch._C, "_current_graph_task_id", lambda: -1)


class GradientReducer:
    """The owner of the hooks on parameters, and of the buckets in which their gradients are reduced.

    ``parameters`` must be in the same order, and ``names`` equal, on all ranks. Without groups, buckets have
    up to 8 MiB. ``residuals`` come from a reducer that this one replaces. ``fresh``: gradients have been
    computed since the last :meth:`synchronize`, also without other ranks. ``synchronized``: the gradients are
    already reduced for the next step.
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
        self.fresh = self.synchronized = False
        self._pass = -1
        self._names = [names[id(parameter)] for parameter in self.parameters]
        self._numbers = {id(parameter): index for index, parameter in enumerate(self.parameters)}
        given = reduction.compression
        self._auto = given if isinstance(given, AutoCompression) else None
        self.reduction = (
            reduction if self._auto is None else reduction._replace(compression=self._auto.chosen)
        )
        self.residuals = Residuals() if residuals is None else residuals
        self._unknown: Dict[int, None] = {}
        self._make_buckets(passes)
        self._submitted: Dict[int, Bucket] = {}
        self._markers: Dict[int, Tuple[Any, List[int]]] = {}  # the handle, and the sparse gradients
        self._context: Any = None
        self._included = False
        self._hooks: List[Any] = []
        if isinstance(api.placed(), Context):  # otherwise this process joins its job later
            self._read_context()
        self._register_hooks()

    def _make_buckets(self, passes: int) -> None:
        groups = self.reduction.groups
        plan = plan_buckets(self._gradients(0)) if groups is None else plan_groups(self.parameters, groups)
        self._buckets: List[Optional[Bucket]] = [self._made_of(bucket) for bucket in plan]
        self.arrivals = Arrivals(plan, passes)
        self._forget_layouts(0)

    def _forget_layouts(self, first: int) -> None:
        """Record that not all ranks know whether gradients from an index on are sparse."""
        if not self.reduction.all_dense:
            self._unknown.update(dict.fromkeys(range(first, len(self.parameters))))

    def _gradients(self, first: int) -> List[Gradient]:
        return [
            Gradient(
                item.numel() * item.element_size(),
                (item.dtype, item.device, codec_of(item, self.reduction.compression)),
            )
            for item in self.parameters[first:]
        ]

    def _made_of(self, indices: Sequence[int]) -> Bucket:
        parameters = [self.parameters[index] for index in indices]
        names = [self._names[index] for index in indices]
        return make_bucket(parameters, names, self.reduction, self.residuals)

    # ---- hooks -------------------------------------------------------------------------------

    def _read_context(self) -> None:
        """Read the current context, and whether this rank is a member of the process set."""
        self._context = api.context()
        self._included = included_in(self.reduction.process_set)

    def active(self) -> bool:
        """Return whether there are other ranks to reduce with, in the current job, or steps to be counted."""
        if api.context() is not self._context:
            is_first = self._context is None
            self._read_context()
            if not is_first:
                if not self._take_choice() and any(isinstance(item, SparseBucket) for item in self._buckets):
                    self._make_buckets(self.arrivals.passes)  # as ranks have that have joined the job
                self._forget_layouts(0)
        return self._included and (self._context.size > 1 or self.reduction.weight is not None)

    def _take_choice(self) -> bool:
        """Return whether the compression has changed, so that buckets must be rebuilt."""
        if self._auto is None or self._auto.current() is self.reduction.compression:
            return False
        self.reduction = self.reduction._replace(compression=self._auto.chosen)
        self._make_buckets(self.arrivals.passes)
        return True

    def _register_hooks(self) -> None:
        for other in list(_alive):
            if not self._numbers.keys().isdisjoint(other._numbers):
                # The optimizer has been wrapped again: two reducers must not handle one gradient. The older
                # one still reduces in its step(), but not during the backward pass.
                other.remove_hooks()
                other._finish_step()
        _alive.add(self)
        self._hook_from(0)

    def _hook_from(self, first: int) -> None:
        owner = weakref.ref(self)
        for index in range(first, len(self.parameters)):
            parameter = self.parameters[index]
            before, after = _hooks(owner, index)
            self._hooks.append(_OnAccumulator(parameter, before, "register_prehook"))
            self._hooks.append(_when_accumulated(parameter, after))

    def remove_hooks(self) -> None:
        """Remove the hooks: gradients are then reduced in :meth:`synchronize` only."""
        for handle in self._hooks:
            handle.remove()
        self._hooks.clear()

    @property
    def hooked(self) -> bool:
        """Return whether this reducer has the hooks: no later one has its parameters."""
        return bool(self._hooks)

    def expect(self, index: int) -> None:
        """Check that no reduction may hold a gradient that a backward pass is about to change.

        AssertionError: there were more passes than configured. The gradient is unchanged.
        """
        if self.active():
            self.arrivals.expect(index)

    def computed(self, index: int) -> None:
        """Take a gradient to which a backward pass has added.

        AssertionError: there were more passes than configured, or the gradient requires a gradient.
        """
        self.fresh = True
        if not self.active():
            return
        arrivals, parameter = self.arrivals, self.parameters[index]
        gradient = parameter.grad
        assert gradient is not None
        assert not gradient.requires_grad, "gradients of gradients (create_graph=True) cannot be reduced"
        if not arrivals.started:
            self._begin_step()
        ready = arrivals.arrived(index)
        if not arrivals.passes_left[index]:
            self._take(index)
        if ready is not None:
            self._submit(ready)

    def _add_unfrozen(self) -> None:
        """Add the parameters that require gradients now, and did not when this was made."""
        unfrozen = [parameter for parameter in self._frozen if parameter.requires_grad]
        if not unfrozen:
            return
        self._frozen = [parameter for parameter in self._frozen if not parameter.requires_grad]
        first = len(self.parameters)
        self.parameters += unfrozen
        self._names += [self._names_by_id[id(parameter)] for parameter in unfrozen]
        self._numbers.update({id(parameter): first + place for place, parameter in enumerate(unfrozen)})
        for places in plan_buckets(self._gradients(first)):
            indices = [first + place for place in places]
            self._buckets.append(self._made_of(indices))
            self.arrivals.extend(indices)
        self._forget_layouts(first)
        if self._hooks:
            self._hook_from(first)

    def _is_newly_sparse(self, index: int) -> bool:
        gradient = self.parameters[index].grad
        return index in self._unknown and gradient is not None and gradient.is_sparse

    def _unknown_of(self, bucket: Bucket) -> List[int]:
        indices = [self._numbers[id(item)] for item in bucket.parameters] if self._unknown else []
        return [index for index in indices if index in self._unknown]

    def _learn_layouts(self) -> None:
        """Agree on which gradients are sparse where that is not known: on all ranks, if they are on one.

        A rank that has a sparse one submits a bucket of dense gradients without arrays. If others submit it
        with theirs it fails on all ranks, which then ask each other.
        """
        for number, bucket in list(self._submitted.items()):
            unknown = self._unknown_of(bucket)
            if not unknown:
                continue
            handle, sparse = self._markers.get(number, (bucket.handle, []))
            handle.wait_for_end()
            if isinstance(handle.error, MismatchError) or number in self._markers and handle.error is None:
                self._ask(number, bucket, unknown, sparse)
            elif handle.error is None:
                members = bucket.parameters
                absent = {item for place, item in enumerate(members) if handle.absent >> place & 1}
                for index in unknown:
                    if self.parameters[index] not in absent:
                        del self._unknown[index]
        self._markers.clear()
        self._submit_remaining()

    def _ask(self, number: int, bucket: Bucket, unknown: Sequence[int], sparse: Sequence[int]) -> None:
        """Exchange the layouts of a bucket's gradients, and divide it if one is sparse.

        ``sparse`` are those at its submission; the program may have changed them since.
        """
        for parameter in bucket.absent:
            parameter.grad = None  # it is not reduced yet: to be taken again
        own = np.zeros(len(unknown), np.uint8)
        for place, index in enumerate(unknown):
            gradient = self.parameters[index].grad
            own[place] = _SPARSE if index in sparse else _DENSE if gradient is not None else 0
        name, process_set = f"layout.{bucket.name}", number_of(self.reduction.process_set)
        api.context().engine.allreduce(
            [own], ReduceOp.MAX, wire_name("allreduce", name), process_set=process_set, urgent=True
        ).wait()
        if _SPARSE not in own:
            return  # the ranks differ in something else, which _finish_all() raises
        del self._submitted[number]
        for index, layout in zip(unknown, own.tolist()):
            if layout:
                del self._unknown[index]
            if layout == _SPARSE:
                self._separate(index)

    def _separate(self, index: int) -> None:
        """Move a parameter with sparse gradients to a separate bucket."""
        parameter = self.parameters[index]
        number = self.arrivals.bucket_of[index]
        self._buckets[number] = self._bucket(number).without(parameter)
        self.arrivals.alone(index)
        self._buckets.append(SparseBucket(parameter, self._names[index], self.reduction))

    def _bucket(self, number: int) -> Bucket:
        bucket = self._buckets[number]
        assert bucket is not None
        return bucket

    def _take(self, index: int) -> None:
        if self._unknown and self._is_newly_sparse(index):
            return
        bucket = self._buckets[self.arrivals.bucket_of[index]]
        assert bucket is not None
        bucket.take(self.parameters[index])

    def _submit(self, number: int) -> None:
        bucket = self._bucket(number)
        sparse = list(filter(self._is_newly_sparse, self._unknown_of(bucket)))
        if sparse:
            process_set = number_of(self.reduction.process_set)
            finish_earlier("allreduce", bucket.name, self.reduction.process_set)
            name = wire_name("allreduce", bucket.name)
            marker = api.context().engine.allreduce([], self.reduction.op, name, process_set=process_set)
            self._markers[number] = (marker, sparse)
            self._submitted[number] = bucket
            return
        if self._auto is not None:
            self._auto.submitting(sum(4 * item.numel() for item in bucket.parameters))
        bucket.submit()
        self._submitted[number] = bucket
        if len(self._submitted) == sum(item is not None for item in self._buckets):
            _unsubmitted.discard(self)

    # ---- steps -------------------------------------------------------------------------------

    @property
    def started(self) -> bool:
        """Return whether gradients have been computed since the last :meth:`synchronize`."""
        return self.arrivals.started

    @property
    def passes(self) -> int:
        """Return the number of backward passes per step."""
        return self.arrivals.passes

    def synchronize(self) -> None:
        """Reduce the remaining gradients (absent ones as zeros), and wait for all reductions.

        RingcommError: a reduction failed; all others have ended. ConfigError: another reducer has a parameter
        of this one, and is reducing its gradient.
        """
        self.fresh = False
        if not self.active():
            self._end_step()
            return
        problem: Optional[BaseException] = None
        self._refuse_shared()
        waiting_from_s = time.perf_counter()
        self._add_unfrozen()
        try:
            self._submit_remaining()
            self._learn_layouts()
            self._compare_once()
            problem = self._finish_all()
        except BaseException:
            for bucket in self._submitted.values():
                bucket.reset()
            raise
        finally:
            self._end_step()
        if problem is not None:
            raise problem
        if self.reduction.weight is not None:
            self.reduction.weight.reduced()
        if self._auto is not None and self._auto.finished(self._nbytes(), waiting_from_s):
            self._take_choice()

    def _refuse_shared(self) -> None:
        """Refuse to reduce gradients that a later reducer, which has the hooks, is reducing in this step."""
        for other in list(_alive) if len(_alive) > 1 else ():
            for key in other._numbers if other is not self and other.started else ():
                if key in self._numbers:
                    raise ConfigError(
                        f"{self._names[self._numbers[key]]} belongs to two DistributedOptimizers, and the "
                        "other one is reducing its gradient. Let only one have it: an optimizer may have "
                        "several parameter groups."
                    )

    def _compare_once(self) -> None:
        label = f"{self._names[0] if self._names else ''} of {len(self._names)}"
        check_start(self.reduction.process_set, label, lambda: map(first_elements, self.parameters))

    def _nbytes(self) -> int:
        """Return the bytes of all gradients that can be compressed."""
        return sum(4 * item.numel() for item in self.parameters if item.is_floating_point())

    def _finish_all(self) -> Optional[BaseException]:
        """Complete all submitted buckets; return the first error, once no operation is pending."""
        problem: Optional[BaseException] = None
        for bucket in self._submitted.values():
            try:
                bucket.finish()
            except Exception as error:  # noqa: BLE001 - returned
                bucket.reset()
                problem = problem or error
        return problem

    def _submit_remaining(self) -> None:
        for number, bucket in enumerate(self._buckets):
            if bucket is None or number in self._submitted:
                continue
            for parameter in bucket.parameters:
                self._take(self._numbers[id(parameter)])  # also what another bucket had, or was sparse
            self._submit(number)

    def reset(self, passes: Optional[int] = None) -> None:
        """Drop all reductions in progress, once they have ended on all ranks: their names are free then.

        ``passes`` is the new number of backward passes per step; None: unchanged.
        """
        if self._is_under_way:
            without = [item for item in self.parameters if item.grad is None]
            with suppress(RingcommError):
                self._submit_remaining()
                self._learn_layouts()
            for bucket in self._submitted.values():
                with suppress(RingcommError):
                    bucket.wait()
            for parameter in without:
                parameter.grad = None
        for each in self._buckets:
            if each is not None:
                each.reset()
        self._end_step(passes)

    # ---- steps that are left before their end --------------------------------------------------

    @property
    def _is_under_way(self) -> bool:
        """Return whether any rank may have submitted reductions that have not been waited for."""
        if self.arrivals.started and (self._submitted or self.passes == 1):
            with suppress(NotInitializedError):
                return api.placed() is self._context
        return False

    def _begin_step(self) -> None:
        """Submit the remaining reductions of an earlier backward pass that have the names of this one's."""
        self._pass = _current_pass()
        for other in list(_unsubmitted):
            left = other is not self and other._pass != self._pass and other._context is self._context
            if left and other._is_under_way and not other._operations().isdisjoint(self._operations()):
                other._submit_remaining()
                other._learn_layouts()
        _unsubmitted.add(self)

    def _operations(self) -> Set[str]:
        return {bucket.name for bucket in self._buckets if bucket is not None}

    def _finish_step(self) -> None:
        """End a step that was begun, as :meth:`synchronize`: another optimizer gets these parameters."""
        if self._is_under_way:
            without = [item for item in self.parameters if item.grad is None]
            with suppress(RingcommError):  # the next operation raises it again
                self.synchronize()
            for parameter in without:
                parameter.grad = None
            self.synchronized = True
        self._end_step()

    def _end_step(self, passes: Optional[int] = None) -> None:
        self._submitted.clear()
        self._markers.clear()
        self.arrivals.reset(passes)
        _unsubmitted.discard(self)


def _hooks(owner: Any, index: int) -> Tuple[Callable[..., None], Callable[..., None]]:
    """Return hooks for autograd before and after a gradient is added, with a weak reference to the reducer.

    It holds the parameters, on which the hooks are.
    """

    def before(*ignored: Any) -> None:
        reducer = owner()
        if reducer is not None and reducer.arrivals.passes_left[index] <= 0:
            reducer.expect(index)

    def after(*ignored: Any) -> None:
        reducer = owner()
        if reducer is not None:
            reducer.computed(index)

    return before, after


class _OnAccumulator:
    """A hook on the node that adds to ``parameter.grad``; ``torch.autograd.grad()`` does not execute it."""

    def __init__(
        self, parameter: torch.Tensor, hook: Callable[..., None], register: str = "register_hook"
    ) -> None:
        with torch.enable_grad():
            self._view = parameter.expand_as(parameter)
        node: Any = self._view.grad_fn
        # Keeps the node alive.
        self._accumulator = node.next_functions[0][0]
        self._handle = getattr(self._accumulator, register)(hook)

    def remove(self) -> None:
        """Remove the hook."""
        self._handle.remove()


def _when_accumulated(parameter: torch.Tensor, hook: Callable[..., None]) -> Any:
    """Call a hook after each addition to ``parameter.grad``; return a handle with ``remove()``."""
    register = getattr(parameter, "register_post_accumulate_grad_hook", None)
    return _OnAccumulator(parameter, hook) if register is None else register(hook)
