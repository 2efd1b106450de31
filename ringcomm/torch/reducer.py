"""Reduces a model's gradients while the backward pass is still computing others."""

from __future__ import annotations

import weakref
from typing import Any, Callable, Dict, List, Optional, Sequence

import torch

from .. import api
from .._adapter.gradients import Arrivals, Gradient, Groups, Reduction, plan_buckets, plan_groups
from .buckets import Bucket, SparseBucket, make_bucket

_alive: weakref.WeakSet[GradientReducer] = weakref.WeakSet()


class GradientReducer:
    """Owns the hooks on parameters, and the buckets that their gradients travel in.

    Args:
        parameters: in an order that is the same on all ranks.
        names: of each, by ``id()``; likewise.
        reduction: how gradients become one.
        compression: how they travel.
        passes: how many backward passes go into one step.
        groups: see :func:`~ringcomm._adapter.gradients.chosen_groups`.
        sparse_as_dense: reduce sparse gradients as if they were dense.

    Attributes:
        fresh: whether gradients have been computed since the last :meth:`synchronize`, also by a single rank,
            which has nobody to reduce them with.
    """

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        names: Dict[int, str],
        reduction: Reduction,
        compression: Any,
        passes: int = 1,
        groups: Groups = None,
        sparse_as_dense: bool = False,
    ) -> None:
        self.parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._frozen = [parameter for parameter in parameters if not parameter.requires_grad]
        self._names_by_id = names
        self.reduction = reduction
        self.fresh = False
        self._names = [names[id(parameter)] for parameter in self.parameters]
        self._numbers = {id(parameter): index for index, parameter in enumerate(self.parameters)}
        self._compression = compression
        self._sparse_as_dense = sparse_as_dense
        plan = plan_buckets(self._gradients(0)) if groups is None else plan_groups(self.parameters, groups)
        self._buckets: List[Optional[Bucket]] = [self._made_of(bucket) for bucket in plan]
        self._arrivals = Arrivals(plan, passes)
        self._submitted: Dict[int, Bucket] = {}
        self._context: Any = None
        self._included = False
        self._hooks: List[Any] = []
        self._look_around()
        self._register_hooks()

    def _gradients(self, first: int) -> List[Gradient]:
        return [
            Gradient(item.numel() * item.element_size(), (item.dtype, item.device))
            for item in self.parameters[first:]
        ]

    def _made_of(self, indices: Sequence[int]) -> Bucket:
        parameters = [self.parameters[index] for index in indices]
        names = [self._names[index] for index in indices]
        return make_bucket(parameters, names, self.reduction, self._compression)

    # ---- hooks -------------------------------------------------------------------------------

    def _look_around(self) -> None:
        """Whether this rank belongs to the process set; if not, its gradients are its own affair."""
        self._context = api.context()
        self._included = self.reduction.process_set.included()

    def active(self) -> bool:
        """Whether there is anybody to reduce with, in the job of the moment."""
        if api.context() is not self._context:
            self._look_around()
        return self._included and self._context.size > 1

    def _register_hooks(self) -> None:
        for other in list(_alive):
            if not self._numbers.keys().isdisjoint(other._numbers):
                # An optimizer that has been wrapped again: two must not handle one gradient. The older
                # one still reduces in its step(), only no earlier.
                other.remove_hooks()
        _alive.add(self)
        self._hook_from(0)

    def _hook_from(self, first: int) -> None:
        owner = weakref.ref(self)
        for index in range(first, len(self.parameters)):
            self._hooks.append(_when_accumulated(self.parameters[index], _hook(owner, index)))

    def remove_hooks(self) -> None:
        """Reduce nothing before :meth:`synchronize` any more."""
        for handle in self._hooks:
            handle.remove()
        self._hooks.clear()

    def computed(self, index: int) -> None:
        """A backward pass has added to a parameter's gradient.

        Raises:
            AssertionError: there were more passes than announced, or the gradient has a history.
        """
        self.fresh = True
        if not self.active():
            return
        parameter = self.parameters[index]
        gradient = parameter.grad
        assert gradient is not None
        assert not gradient.requires_grad, "gradients of gradients (create_graph=True) cannot be reduced"
        if self._is_newly_sparse(index):
            self._separate(index)
        ready = self._arrivals.arrived(index)
        if self._arrivals.complete(index):
            self._bucket(self._arrivals.bucket_of(index)).take(parameter)
        if ready is not None:
            self._submit(ready)

    def _take_in_the_thawed(self) -> None:
        """Reduce parameters, too, that did not require gradients when this was made, and do now."""
        thawed = [parameter for parameter in self._frozen if parameter.requires_grad]
        if not thawed:
            return
        self._frozen = [parameter for parameter in self._frozen if not parameter.requires_grad]
        first = len(self.parameters)
        self.parameters += thawed
        self._names += [self._names_by_id[id(parameter)] for parameter in thawed]
        self._numbers.update({id(parameter): first + place for place, parameter in enumerate(thawed)})
        for places in plan_buckets(self._gradients(first)):
            indices = [first + place for place in places]
            self._buckets.append(self._made_of(indices))
            self._arrivals.extend(indices)
        if self._hooks:
            self._hook_from(first)

    def _is_newly_sparse(self, index: int) -> bool:
        gradient = self.parameters[index].grad
        if gradient is None or not gradient.is_sparse or self._sparse_as_dense:
            return False
        return not isinstance(self._bucket(self._arrivals.bucket_of(index)), SparseBucket)

    def _separate(self, index: int) -> None:
        """Give a parameter with sparse gradients a bucket of its own.

        Nobody can know beforehand that they are sparse. All ranks find out at the same gradient.
        """
        parameter = self.parameters[index]
        number = self._arrivals.bucket_of(index)
        rest = self._bucket(number).without(parameter)
        self._buckets[number] = rest
        complete = self._arrivals.alone(index)
        self._buckets.append(SparseBucket(parameter, self._names[index], self.reduction))
        for item in rest.parameters if rest is not None else ():
            if rest is not None and self._arrivals.complete(self._numbers[id(item)]):
                rest.take(item)
        if complete is not None:
            self._submit(complete)

    def _bucket(self, number: int) -> Bucket:
        bucket = self._buckets[number]
        assert bucket is not None
        return bucket

    def _submit(self, number: int) -> None:
        bucket = self._bucket(number)
        bucket.submit()
        self._submitted[number] = bucket

    # ---- steps -------------------------------------------------------------------------------

    @property
    def started(self) -> bool:
        """Whether gradients have been computed since the last :meth:`synchronize`."""
        return self._arrivals.started

    @property
    def passes(self) -> int:
        """How many backward passes go into one step."""
        return self._arrivals.passes

    def synchronize(self) -> None:
        """Reduce what has not been submitted yet, absent gradients as zeros, and wait for everything.

        Raises:
            RingcommError: a reduction failed; all others have come to their end.
        """
        self.fresh = False
        if not self.active():
            self._arrivals.reset()
            return
        problem: Optional[BaseException] = None
        self._take_in_the_thawed()
        try:
            self._submit_the_rest()
            for bucket in list(self._submitted.values()):
                try:
                    bucket.finish()
                except Exception as error:  # noqa: BLE001 - raised below, when no operation is left over
                    bucket.reset()
                    problem = problem or error
        finally:
            self._submitted.clear()
            self._arrivals.reset()
        if problem is not None:
            raise problem

    def _submit_the_rest(self) -> None:
        for index in range(len(self.parameters)):
            if not self._arrivals.complete(index) and self._is_newly_sparse(index):
                self._separate(index)
        for number, bucket in enumerate(self._buckets):
            if bucket is None or number in self._submitted:
                continue
            for parameter in bucket.parameters:
                if not self._arrivals.complete(self._numbers[id(parameter)]):
                    bucket.take(parameter)
            self._submit(number)

    def reset(self, passes: Optional[int] = None) -> None:
        """Forget everything that is under way."""
        for bucket in self._buckets:
            if bucket is not None:
                bucket.reset()
        self._submitted.clear()
        self._arrivals.reset(passes)


def _hook(owner: Any, index: int) -> Callable[..., None]:
    """What autograd calls. It does not keep the reducer alive, which keeps the parameters alive."""

    def hook(*ignored: Any) -> None:
        reducer = owner()
        if reducer is not None:
            reducer.computed(index)

    return hook


class _OnAccumulator:
    """A hook on the node that accumulates a gradient, for versions of torch that have no better."""

    def __init__(self, parameter: torch.Tensor, hook: Callable[..., None]) -> None:
        with torch.enable_grad():
            self._view = parameter.expand_as(parameter)
        node: Any = self._view.grad_fn
        # The node lives as long as something refers to it.
        self._accumulator = node.next_functions[0][0]
        self._handle = self._accumulator.register_hook(hook)

    def remove(self) -> None:
        """Take it away again."""
        self._handle.remove()


def _when_accumulated(parameter: torch.Tensor, hook: Callable[..., None]) -> Any:
    """Call the hook whenever a backward pass has added to ``parameter.grad``; ``remove()`` ends that."""
    register = getattr(parameter, "register_post_accumulate_grad_hook", None)
    return _OnAccumulator(parameter, hook) if register is None else register(hook)
