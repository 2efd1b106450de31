"""Updates of parameters that overlap the next forward pass: each layer waits for its own gradients only.

The idea is that of ByteScheduler (Peng et al., "A Generic Communication Scheduler for Distributed DNN
Training Acceleration", 2019) and of BytePS's ``CrossBarrier``: ``step()`` starts what is left to be reduced
and returns. Before a module's forward pass computes with its parameters, their reduction is waited for and
the optimizer's step is made for them. The first layers' gradients, which the backward pass computes last,
are reduced first.

Whenever the program computes with a parameter, it has the value that it would have without this: the same
updates are made with the same gradients and the options (learning rates) that the optimizer had at
``step()``, and then its gradient is what the program's calls of ``zero_grad()`` since then have made of it.
Hooks on steps expect all gradients and all parameters, so a step with hooks waits.
"""

from __future__ import annotations

import copy
from contextlib import contextmanager
from typing import Any, Callable, Dict, Iterator, List, Sequence, Set, Tuple

import torch

from .. import api
from .._adapter.arguments import wire_name
from ..errors import ConfigError
from .buckets import Bucket
from .optimizer import _Distributed, make_own_step

_CHANGED = (
    "Gradients were changed in place between optimizer.step() and the next forward pass of their layers, "
    "while CrossBarrier was reducing them. Reset them with optimizer.zero_grad() or model.zero_grad(), not "
    "with model.zero_grad(set_to_none=False), and read or change them only after optimizer.synchronize()."
)


class _Update:
    """A bucket whose reduction has been started, and what the optimizer's step needs for its parameters.

    Attributes:
        options: of each parameter group, as they were at ``step()``.
        forget, zero: what ``zero_grad()`` is to do with the gradients, once the parameters are updated.
    """

    def __init__(self, bucket: Bucket, options: List[Dict[str, Any]]) -> None:
        self.bucket = bucket
        self.options = options
        self.forget = self.zero = False


class CrossBarrier:
    """Let the reduction of gradients overlap the next forward pass, layer by layer.

    Example::

        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        hvd.CrossBarrier(model, optimizer)
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss_of(model(inputs), targets).backward()
            optimizer.step()

    From now on ``optimizer.step()`` does not wait. The parameters of a module are updated before its next
    forward pass. Results are those of the same program without this. What reads parameters elsewhere, such as
    an average of the model's weights (EMA), must call :meth:`finish` before, as ``model.state_dict()``,
    ``optimizer.state_dict()`` and ``optimizer.synchronize()`` do.

    It pays where the network is slower than the backward pass. A program that clips gradients calls
    ``optimizer.synchronize()``, and one with hooks on the optimizer's steps needs all parameters in them, so
    there is nothing to gain for these.

    Args:
        model: the ``torch.nn.Module`` with the optimizer's parameters. A parameter that is used outside of
            its own module's forward pass is waited for at the closest enclosing module that is called; which
            modules are called is learned before the first step.
        optimizer: a ``DistributedOptimizer`` whose class updates every parameter by itself, as those of
            ``torch.optim`` do, except LBFGS.

    Raises:
        ConfigError: the optimizer is not distributed, reduces by Adasum, has weights of batches, or is LBFGS.
            Later, where an update is made: the optimizer's step changes options of its parameter groups, or
            the program has changed gradients that were being reduced.
    """

    def __init__(self, model: torch.nn.Module, optimizer: Any) -> None:
        if not isinstance(optimizer, _Distributed):
            raise ConfigError("CrossBarrier works on a DistributedOptimizer that reduces gradients.")
        if isinstance(optimizer, torch.optim.LBFGS) or optimizer._reducer.reduction.weight is not None:
            raise ConfigError("CrossBarrier works neither with LBFGS nor with balanced batches.")
        self._model, self._optimizer = model, optimizer
        self._waiting: Dict[torch.Tensor, _Update] = {}
        self._called: Set[torch.nn.Module] = set()
        self._owned: Dict[torch.nn.Module, List[torch.Tensor]] = {}
        self._names: Tuple[str, ...] = ()
        self._engine: Any = None
        self._hooks = [module.register_forward_pre_hook(self._before) for module in model.modules()]
        for module in model.modules():
            register = getattr(module, "register_state_dict_pre_hook", None)
            if register is not None:
                self._hooks.append(register(lambda *ignored: self.finish()))
        optimizer._barrier = self
        optimizer._reducer.waiting = self._waiting

    @property
    def pending(self) -> bool:
        """Whether parameters are still to be updated."""
        return bool(self._waiting)

    def close(self) -> None:
        """Make the updates that are left; from now on the optimizer's ``step()`` waits for them itself."""
        self.finish()
        for hook in self._hooks:
            hook.remove()
        self._optimizer._barrier = None
        if self._engine is not None:
            self._engine.prioritize(())

    def step(self) -> None:
        """Start what is left to be reduced; the optimizer's ``step()`` calls this instead of its own step."""
        self.finish()
        reducer = self._optimizer._reducer
        reducer.waiting = self._waiting  # it is made anew when parameters are added
        self._learn()
        names, engine = reducer.names_by_need(), api.context().engine
        if (names, engine) != (self._names, self._engine):
            self._names, self._engine = names, engine
            engine.prioritize([wire_name("allreduce", name) for name in names])
        # By value: a learning rate may be a tensor, which a scheduler changes in place.
        options = [
            {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}
            for group in self._optimizer.param_groups
        ]
        for bucket in reducer.detach():
            update = _Update(bucket, options)
            self._waiting.update(dict.fromkeys(bucket.parameters, update))

    def finish(self) -> None:
        """Wait for all reductions, and make all updates.

        Raises:
            RingcommError: a reduction failed.
        """
        self._update(list(self._waiting))

    def zero_grad(self, own: Callable[[], None], set_to_none: bool) -> None:
        """Reset gradients; of parameters that are still to be updated, after their update.

        Args:
            own: the optimizer's own ``zero_grad()``.
            set_to_none: None instead of zeros.
        """
        for update in self._waiting.values():
            update.forget = update.forget or set_to_none
            update.zero = True
        groups = self._optimizer.param_groups
        with self._param_groups([
            {**group, "params": [item for item in group["params"] if item not in self._waiting]}
            for group in groups
        ]):  # fmt: skip
            own()

    # ---- forward passes ----------------------------------------------------------------------

    def _before(self, module: torch.nn.Module, *ignored: Any) -> None:
        """A module is about to compute."""
        if not self._owned:
            self._called.add(module)
        elif self._waiting:
            self._update(self._owned.get(module, ()))

    def _learn(self) -> None:
        """Which parameters each module needs, once it is known which modules are called."""
        if self._owned:
            return
        self._owned = {self._model: []}

        def visit(module: torch.nn.Module, closest: torch.nn.Module) -> None:
            closest = module if module in self._called else closest
            self._owned.setdefault(closest, []).extend(module.parameters(recurse=False))
            for child in module.children():
                visit(child, closest)

        visit(self._model, self._model)

    # ---- updates -----------------------------------------------------------------------------

    def _update(self, parameters: Sequence[torch.Tensor]) -> None:
        """Wait for the reductions of parameters, and update all that were reduced with them."""
        updates = {id(item): item for item in map(self._waiting.get, parameters) if item is not None}
        try:
            for update in updates.values():
                update.bucket.advance()
            for update in updates.values():
                if update.bucket.changed:
                    raise ConfigError(_CHANGED)
                # model.zero_grad() has removed these; the reduction brings them back for the update.
                removed = [item for item in update.bucket.parameters if item.grad is None]
                update.bucket.finish()
                for parameter in update.bucket.parameters:
                    self._waiting.pop(parameter, None)
                self._step_of(update)
                _reset(update.bucket.parameters if update.zero else removed, update.forget or not update.zero)
        except BaseException:
            for update in {id(item): item for item in self._waiting.values()}.values():
                update.bucket.reset()
            self._waiting.clear()
            raise

    def _step_of(self, update: _Update) -> None:
        """Make the optimizer's own step for the parameters of one bucket."""
        members = set(update.bucket.parameters)
        parts = []
        for group, options in zip(self._optimizer.param_groups, update.options):
            chosen = [parameter for parameter in group["params"] if parameter in members]
            if chosen:
                parts.append({**options, "params": chosen})
        before = [dict(part) for part in parts]
        with self._param_groups(parts):
            make_own_step(self._optimizer)
        for part, given in zip(parts, before):
            changed = sorted(key for key in part if part[key] is not given.get(key))
            if changed:
                raise ConfigError(
                    f"CrossBarrier cannot be used with {type(self._optimizer).__name__}: its step() changes "
                    f"options of its parameter groups ({', '.join(changed)}), once per bucket with it."
                )

    @contextmanager
    def _param_groups(self, groups: List[Dict[str, Any]]) -> Iterator[None]:
        """For the block, let the optimizer have these parameter groups only."""
        own, self._optimizer.param_groups = self._optimizer.param_groups, groups
        try:
            yield
        finally:
            self._optimizer.param_groups = own


def _reset(parameters: Sequence[torch.Tensor], set_to_none: bool) -> None:
    """What ``zero_grad()`` does."""
    for parameter in parameters:
        if set_to_none:
            parameter.grad = None
        elif parameter.grad is not None:
            parameter.grad.zero_()
