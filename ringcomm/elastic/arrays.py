"""Elastic state of NumPy programs: arrays that are changed in place, without copies."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any, Dict, Iterator

import numpy as np

from .. import api
from ..calls import direct
from ..errors import HostsUpdatedInterrupt, Misuse, Recoverable
from ..ops import Max
from .state import State


class ArrayState(State):
    """Elastic state of NumPy arrays and plain Python values, which are its attributes.

    The position in the training belongs to the state: :attr:`step` counts the updates. So nothing is copied
    while training runs, and nothing is rolled back after a loss: the ranks that are alive have finished the
    same step, or some have finished one more, and then the others take the state of one of those.

    Example::

        @rc.elastic.run
        def train(state):
            while state.step < 1000:
                gradient = rc.allreduce(gradient_of(state.weights, state.step))
                with state.update():
                    state.weights -= 0.1 * gradient

        train(rc.elastic.ArrayState(weights=np.zeros(1000)))

    Args:
        check_every: after how many updates to check whether processes are to join or to leave: a short
            all-reduce.
        values: the arrays, which must have the same shape and element type on all ranks, and initial values
            of further attributes, which must be picklable.

    Attributes:
        step: how many updates the state contains.
    """

    def __init__(self, check_every: int = 1, **values: Any) -> None:
        super().__init__()
        self.step = 0
        self._check_every = check_every
        self._changes = 0
        self._names = sorted(values)
        for name, value in values.items():
            setattr(self, name, value)

    @contextmanager
    def update(self) -> Iterator[None]:
        """Change the state: one step. Other ranks may be lost before or after it, but not within.

        The block must not call collectives, and attributes may be changed nowhere else.

        Raises:
            HostsUpdatedInterrupt: the step is finished, and processes are to join or to leave.
            PeerLostError: the step is finished, and a rank was lost.
            Misuse: a collective in the block failed, so that the state is only partly changed.
        """
        try:
            yield
        except Recoverable as error:
            raise Misuse(
                "A collective was called inside `with state.update():` and failed, so the state is only "
                "partly changed. Call collectives before the block."
            ) from error
        self.step += 1
        self._position += 1
        if self.step % self._check_every == 0:
            self.check_host_updates()

    def on_reset(self) -> None:
        """Called after the ranks have connected again: calls :meth:`reset` and the registered functions."""
        self._changes = 0  # What they were about is in the new view: its exchange may have failed before.
        super().on_reset()

    def commit(self) -> None:
        """Check for processes that are to join or to leave. Every update is a commit."""
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Raise HostsUpdatedInterrupt on all ranks if processes are to join or to leave.

        Raises:
            HostsUpdatedInterrupt: processes are to join or to leave.
            PeerLostError: a rank was lost.
        """
        self._changes |= api.take_changes()
        if api.is_initialized() and direct.allreduce(np.array([self._changes], np.int32), Max)[0]:
            self._changes = 0
            raise HostsUpdatedInterrupt

    def save(self) -> None:
        """Do nothing: the present state is the saved one."""

    def restore(self) -> None:
        """Do nothing: the present state is that of the last update."""

    def sync(self) -> None:
        """Give all ranks rank 0's state.

        Raises:
            PeerLostError: a rank was lost.
        """
        plain: Dict[str, Any] = {name: getattr(self, name) for name in self._names}
        arrays = {name: plain.pop(name) for name in self._names if isinstance(plain[name], np.ndarray)}
        self.step, plain = self._bcast_object((self.step, plain))
        for name, value in plain.items():
            setattr(self, name, value)
        for array in arrays.values():
            whole = np.ascontiguousarray(array)
            direct.broadcast_(whole)
            if whole is not array:
                array[...] = whole
