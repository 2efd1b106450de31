"""State that survives the loss of a rank, whole or in parts, and the loop that restarts training from it."""

from __future__ import annotations

import copy
import functools
import queue
import random
import time
from contextlib import contextmanager
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Set, Sized, Tuple, Union

import numpy as np

from .. import api
from .._adapter.submit import broadcast_object, with_causes
from ..calls import direct
from ..errors import ConfigError, HostsUpdatedInterrupt, Misuse, Recoverable
from ..ops import Max

# ``update_res`` of State.on_hosts_updated, with the numbers of Horovod's ``HostUpdateResult``.
NO_UPDATE, REMOVED, ADDED, MIXED = range(4)


class State:
    """Base class of the state from which training continues after a loss.

    Subclasses such as :class:`ObjectState` and the states of the adapters implement :meth:`save`,
    :meth:`restore` and :meth:`sync`.

    Args:
        bcast_object: function that sends a Python object from rank 0 to all ranks and returns it.
        get_rank: function that returns this process's rank.
    """

    def __init__(
        self,
        bcast_object: Callable[[Any], Any] = broadcast_object,
        get_rank: Callable[[], int] = api.rank,
    ) -> None:
        self._bcast_object = bcast_object
        self._rank = get_rank
        self._host_messages: queue.Queue[Tuple[float, int]] = queue.Queue()
        self._last_updated_timestamp = 0.0
        self._reset_callbacks: List[Callable[[], Any]] = []
        self._listens = False
        self._heard_at = 0.0
        self._announced: Set[float] = set()
        # How many commits the state contains; 0 before the first synchronization. After a loss all ranks
        # take the state of one with the highest position.
        self._position = 0

    def register_reset_callbacks(self, callbacks: Sequence[Callable[[], Any]]) -> None:
        """Register functions that are called after the number of ranks may have changed.

        Args:
            callbacks: functions without arguments, for example to scale the learning rate.
        """
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Called after the ranks have connected again: calls :meth:`reset` and the registered functions."""
        self._host_messages = queue.Queue()
        self._announced.clear()
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """Report that hosts were added or removed. May be called from any thread.

        While a function of :func:`run` runs, the thread that receives such reports calls this method at once.
        It does so when processes are being started on a host (which changes nothing yet), when they are ready
        to join, and when they are to leave. Programs may replace the method, and look for reports in the
        queue ``_host_messages``.

        Args:
            timestamp: time of the change in seconds; older reports are ignored.
            update_res: 1: hosts were removed; 2: hosts were added; 3: both.
        """
        self._host_messages.put((timestamp, update_res))

    def commit(self) -> None:
        """Save the state, which a loss restores, and check for changed hosts.

        Raises:
            HostsUpdatedInterrupt: hosts were added or removed.
            PeerLostError: a rank was lost.
        """
        self.save()
        self._position += 1
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Raise HostsUpdatedInterrupt on all ranks if rank 0 has received a report of changed hosts.

        Raises:
            HostsUpdatedInterrupt: hosts were added or removed.
            PeerLostError: a rank was lost.
        """
        changes = api.take_changes()
        if changes and not self._listens:
            self.on_hosts_updated(self._next_timestamp(), changes)
        before = newest = self._last_updated_timestamp
        changes = 0
        while not self._host_messages.empty():
            timestamp, change = self._host_messages.get()
            if timestamp in self._announced:
                self._announced.discard(timestamp)  # there is nothing to do before they are ready
            elif timestamp > newest:
                newest = timestamp
                changes |= change
        before, newest, changes = self._bcast_object((before, newest, changes))
        self._last_updated_timestamp = newest
        if newest > before:
            raise HostsUpdatedInterrupt(changes == REMOVED)

    def _take_change(self, changes: int, ready: bool) -> None:
        timestamp = self._next_timestamp()
        if not ready:
            self._announced.add(timestamp)
        self.on_hosts_updated(timestamp, changes)

    def _next_timestamp(self) -> float:
        """Return a time after all earlier ones, also those of another rank 0 with another clock."""
        self._heard_at = max(time.time(), self._heard_at + 1e-3, self._last_updated_timestamp + 1e-3)
        return self._heard_at

    def save(self) -> None:
        """Save the state in memory."""
        raise NotImplementedError

    def restore(self) -> None:
        """Restore the state from the last save."""
        raise NotImplementedError

    def sync(self) -> None:
        """Broadcast the state of rank 0 to all ranks, then save it.

        Raises:
            PeerLostError: a rank was lost.
        """
        raise NotImplementedError

    def reset(self) -> None:
        """Prepare for another number of ranks, before :meth:`sync`. It does nothing by default."""


class ObjectState(State):
    """Elastic state of plain Python values, which are its attributes: ``ObjectState(epoch=0, batch=0)``.

    Args:
        bcast_object: function that sends a Python object from rank 0 to all ranks and returns it.
        get_rank: function that returns this process's rank.
        kwargs: initial values of the attributes, which must be picklable.
    """

    def __init__(
        self, bcast_object: Callable[[Any], Any] = broadcast_object, get_rank: Callable[[], int] = api.rank,
        **kwargs: Any,
    ) -> None:  # fmt: skip
        super().__init__(bcast_object, get_rank)
        self._saved_state: Dict[str, Any] = kwargs
        self._set_attributes()

    def save(self) -> None:
        """Save the values of the attributes (references, not copies)."""
        self._saved_state = {name: getattr(self, name) for name in self._saved_state}

    def restore(self) -> None:
        """Set the attributes to their saved values."""
        self._set_attributes()

    def sync(self) -> None:
        """Set the attributes of all ranks to rank 0's present values, then save them.

        Raises:
            PeerLostError: a rank was lost.
        """
        if self._saved_state:
            # The present values, not the saved ones: after HostsUpdatedInterrupt nothing was restored.
            self.save()
            self._saved_state = self._bcast_object(self._saved_state)
            self._set_attributes()

    def _set_attributes(self) -> None:
        for name, value in self._saved_state.items():
            setattr(self, name, value)


class ArrayState(State):
    """Elastic state of NumPy arrays and plain Python values, which are its attributes.

    The state includes the position in the training: :attr:`step` counts the updates. Therefore nothing is
    copied while training runs, and nothing is rolled back after a loss. All living ranks have finished the
    same step, or some have finished one step more. In the second case the others take the state of one of
    these ranks.

    Example::

        @rc.elastic.run
        def train(state):
            while state.step < 1000:
                gradient = rc.allreduce(gradient_of(state.weights, state.step))
                with state.update():
                    state.weights -= 0.1 * gradient

        train(rc.elastic.ArrayState(weights=np.zeros(1000)))

    Args:
        check_every: number of updates between checks whether processes are to join or to leave. A check is a
            short all-reduce.
        values: the arrays, with the same shape and element type on all ranks, and initial values of further
            attributes, which must be picklable.

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
        """Context manager in which you change the state: one step. A loss never interrupts it.

        Do not call collectives in this block, and change attributes nowhere else. Losses of ranks are
        reported before or after it.

        Raises:
            HostsUpdatedInterrupt: processes are to join or to leave; the step is finished.
            PeerLostError: a rank was lost; the step is finished.
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
        """Do nothing: the present state is the state after the last update."""

    def sync(self) -> None:
        """Give all ranks the state of rank 0.

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


# ---- states of parts, each with its own way to save, restore and synchronize ------------------------------


class StatePart:
    """A member of a state that saves, restores and synchronizes its object, such as a model."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def save(self) -> None:
        """Save the object's present state in memory."""
        raise NotImplementedError

    def restore(self) -> None:
        """Restore the object's saved state."""
        raise NotImplementedError

    def sync(self) -> None:
        """Give the object of every rank the state of rank 0's, then save it."""
        raise NotImplementedError

    def reset(self) -> None:
        """Prepare the object for other ranks, before :meth:`sync`. Does nothing by default."""

    def set_value(self, value: Any) -> None:
        """Replace the object and save the state of the new one."""
        self.value = value
        self.save()


class DictPart(StatePart):
    """A part with ``state_dict()``; ``send`` gives all ranks rank 0's, by default as an object."""

    def __init__(self, value: Any, send: Optional[Callable[[Any], None]] = None) -> None:
        super().__init__(value)
        self._send = send
        self.save()

    def save(self) -> None:
        self._saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        # A copy: the object may use the loaded tensors themselves, which training changes in place.
        self.value.load_state_dict(copy.deepcopy(self._saved))

    def sync(self) -> None:
        if self._send is None:
            self.value.load_state_dict(broadcast_object(self.value.state_dict()))
        else:
            self._send(self.value)
        self.save()


class SamplerPart(DictPart):
    """A part for a sampler, which distributes samples again when ranks change, also if no state is sent."""

    def reset(self) -> None:
        self.value.reset()


class PartsState(ObjectState):
    """Elastic state of parts and plain Python values, each an attribute of the state.

    Args:
        parts: the parts by the names of their attributes.
        kwargs: initial values of further attributes, which must be picklable, or samplers.
    """

    def __init__(self, parts: Dict[str, StatePart], **kwargs: Any) -> None:
        parts = dict(parts)
        for name, value in list(kwargs.items()):
            if isinstance(value, ElasticSampler):
                parts[name] = SamplerPart(kwargs.pop(name))
        self._handlers = parts
        for name, part in parts.items():
            super().__setattr__(name, part.value)
        super().__init__(**kwargs)

    def save(self) -> None:
        """Save all parts and values in memory."""
        for part in self._handlers.values():
            part.save()
        super().save()

    def restore(self) -> None:
        """Restore all parts and values from the last save."""
        for part in self._handlers.values():
            part.restore()
        super().restore()

    def sync(self) -> None:
        """Broadcast all parts and values from rank 0 to all ranks, then save them.

        Raises:
            PeerLostError: a rank was lost.
        """
        for part in self._handlers.values():
            part.sync()
        super().sync()

    def reset(self) -> None:
        """Prepare all parts for other ranks."""
        for part in self._handlers.values():
            part.reset()
        super().reset()

    def __setattr__(self, name: str, value: Any) -> None:
        part = self.__dict__.get("_handlers", {}).get(name)
        if part is not None:
            part.set_value(value)
        super().__setattr__(name, value)


class VariablesPart(StatePart):
    """Save the values of a framework's variables. ``value`` is a model, an optimizer, or a list of variables;
    ``read`` copies values, ``assign`` sets them, and ``send`` sets rank 0's on all ranks.
    """

    def __init__(
        self, value: Any, read: Callable[[List[Any]], Sequence[Any]],
        assign: Callable[[List[Any], Sequence[Any]], Any], send: Callable[[List[Any]], Any],
    ) -> None:  # fmt: skip
        super().__init__(value)
        self._read, self._assign, self._send = read, assign, send
        self.save()

    def save(self) -> None:
        self._saved = self._read(variables_of(self.value))

    def restore(self) -> None:
        # Variables created after the save keep their values.
        self._assign(variables_of(self.value)[: len(self._saved)], self._saved)

    def sync(self) -> None:
        self._send(variables_of(self.value))
        self.save()


def variables_of(thing: Any) -> List[Any]:
    """Return the variables of a model or an optimizer (in older versions ``variables`` is a method)."""
    listed = getattr(thing, "variables", thing)
    return list(listed() if callable(listed) else listed)


def check_built(model: Any, optimizer: Any) -> Any:
    """Return the optimizer (None: the compiled one) with its variables; ConfigError if the model is not
    built.
    """
    if not getattr(model, "built", True):
        raise ConfigError("The model must be built first: model.build(input_shape), or call it once.")
    chosen = getattr(model, "optimizer", None) if optimizer is None else optimizer
    if chosen is not None:
        build(chosen, model)
    return chosen


def build(optimizer: Any, model: Any) -> None:
    """Create an optimizer's variables if it has a method for it and has not done so."""
    if not getattr(optimizer, "built", getattr(optimizer, "_built", True)):
        optimizer.build(model.trainable_variables)


# ---- the loop ----------------------------------------------------------------------------------------------


def run(func: Callable[..., Any], reset: Optional[Callable[[], None]] = None) -> Callable[..., Any]:
    """Decorate a training function: it is called again after a loss, in the processes that are alive.

    If a rank is lost, the state is restored from the last commit. If processes are to join or to leave, the
    state stays as it is. Then the ranks connect again. If the states of the ranks differ, all ranks take the
    state of rank 0, which is the newest. Then the function is called again. Errors of the program itself
    (:class:`~ringcomm.errors.Misuse`) are raised, because they would occur again.

    Example::

        @rc.elastic.run
        def train(state):
            while state.step < 1000:
                ...
                state.step += 1
                state.commit()

        train(rc.elastic.ObjectState(step=0))

    Args:
        func: the training function; its first argument is a :class:`State`.
        reset: function that connects the ranks again; None: :func:`ringcomm.api.restart`.

    Returns:
        a function with the arguments and the result of ``func``. If this process must leave the job because
        its host was removed, the function raises :class:`~ringcomm.errors.ExcludedError`, which ends the
        program with exit code 0.
    """

    @functools.wraps(func)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> Any:
        again = False
        while True:
            try:
                if again:
                    connect(state._position)
                    state.on_reset()  # functions of the program, which may call collectives
                elif api.join_now():
                    state.on_reset()
                state._listens = api.on_changes(state._take_change)
                _synchronize(state)
                with with_causes():  # of a framework's error about a failed collective
                    return func(state, *args, **kwargs)
            except Recoverable:
                state.restore()
            except HostsUpdatedInterrupt:
                # The present state counts, which may be newer than the last commit; see _synchronize().
                state._position += 1
            finally:
                api.on_changes(None)
                state._listens = False
            again = True

    def connect(position: int) -> None:
        if reset is None:
            api.restart(position)
        else:
            reset()

    return wrapper


def _synchronize(state: State) -> None:
    """Give all ranks rank 0's state, unless all have the same position. Equal positions mean equal states: a
    position is counted at the same points of the program on every rank, and the ranks compute the same. A new
    process has position 0.
    """
    positions = api.gather_positions(state._position)
    if positions[0] and len(set(positions)) == 1:
        state.save()
        return
    if state._position != positions[0]:
        state._position = 0  # until all of it is there: a part of each of two states is none
    state.sync()
    state._position = max(1, positions[0])


# ---- the samples of an epoch --------------------------------------------------------------------


class ElasticSampler:
    """Distributes samples over the ranks, and redistributes the remaining ones when the ranks change.

    Make it an attribute of an elastic state. Call :meth:`record_batch` after each batch and before the
    commit, and :meth:`set_epoch` at the end of each epoch. Then every sample of an epoch counts once,
    whatever ranks are lost or join meanwhile: after a loss, the batches since the last commit are repeated,
    and their first results are dropped. All ranks get the same number of samples. If the remaining samples
    cannot be divided evenly, some of them are repeated at the end of the epoch.

    Example::

        sampler = hvd.elastic.ElasticSampler(len(images))
        state = hvd.elastic.KerasState(model, sampler=sampler)
        for start in range(0, len(sampler), 32):
            chosen = sampler.indices[start : start + 32]
            train_on(images[chosen])
            sampler.record_batch(start // 32, len(chosen))
            state.commit()

    Args:
        dataset: the data set, or its number of samples, which must not change.
        shuffle: whether to shuffle the samples, in a different order in each epoch.
        seed: seed for the shuffling; the same on all ranks.

    Attributes:
        epoch: the index of the epoch.
        processed_num: number of samples of this epoch that all ranks together have processed.
        indices: the indices of the samples that remained for this rank at the last :meth:`reset`.
        remaining_indices: the indices of the samples that remained for all ranks.
        num_replicas: number of ranks.
        rank: this process's rank.
    """

    def __init__(self, dataset: Union[Sized, int], shuffle: bool = True, seed: int = 0) -> None:
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.processed_num = 0
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Start an epoch, with all samples.

        Args:
            epoch: the index of the epoch.
        """
        self.epoch = epoch
        self.processed_num = 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Record that every rank has processed a batch.

        Args:
            batch_idx: the index of the batch; not used.
            batch_size: the number of samples of the batch on each rank.
        """
        self.processed_num += batch_size * self.num_replicas

    def state_dict(self) -> Dict[str, Any]:
        """Return the epoch, and the number of samples processed in it."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: Dict[str, Any]) -> None:
        """Continue from a state, with the current ranks.

        Args:
            state_dict: a state that :meth:`state_dict` has returned.
        """
        self.epoch = state_dict["epoch"]
        self.processed_num = state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Distribute the samples that have not been processed over the current ranks."""
        self.num_replicas, self.rank = api.size(), api.rank()
        order = list(range(self.dataset if isinstance(self.dataset, int) else len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(order)
        self.remaining_indices = order[self.processed_num :]
        self.num_samples = -(-len(self.remaining_indices) // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas
        # Repeat some, more than once if fewer samples remain than there are ranks.
        repeated = self.remaining_indices * (1 + self.num_replicas)
        self.indices: List[int] = repeated[: self.total_size][self.rank :: self.num_replicas]

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices)

    def __len__(self) -> int:
        return self.num_samples
