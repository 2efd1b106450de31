"""Elastic state and callbacks for Keras: training continues after the loss of a rank (``hvd.elastic``)."""

from __future__ import annotations

from typing import Any, Dict, List, Optional, Sequence

from ..docstrings import documented
from ..elastic.state import ElasticSampler, ObjectState, PartsState, State, VariablesPart, check_built, run
from .callbacks import Callback
from .collectives import as_array, broadcast_variables

__all__ = [
    "CommitStateCallback", "ElasticSampler", "KerasState", "ObjectState", "State",
    "UpdateBatchStateCallback", "UpdateEpochStateCallback", "run",
]  # fmt: skip

Logs = Optional[Dict[str, Any]]


class KerasState(PartsState):
    """Elastic state of a Keras model, its optimizer and plain Python values, each an attribute of the state.

    ::

        state = hvd.elastic.KerasState(model, batch=0, epoch=0)

    Args:
        model: a built model.
        optimizer: the optimizer; None: the one that the model was compiled with.
        kwargs: initial values of further attributes, which must be picklable.

    Raises:
        ConfigError: the model is not built, so its variables do not exist yet.
    """

    def __init__(self, model: Any, optimizer: Any = None, **kwargs: Any) -> None:
        chosen = check_built(model, optimizer)
        named = {"model": model, "optimizer": chosen} if chosen is not None else {"model": model}
        super().__init__(
            {name: VariablesPart(value, _read, _assign, _send) for name, value in named.items()}, **kwargs
        )


def _read(variables: List[Any]) -> List[Any]:
    # Copies: on some backends an array shares the variable's memory.
    return [as_array(variable).copy() for variable in variables]


def _assign(variables: List[Any], values: Sequence[Any]) -> None:
    for variable, saved in zip(variables, values):
        variable.assign(saved)


def _send(variables: List[Any]) -> None:
    broadcast_variables(variables, root_rank=0)


@documented
class CommitStateCallback(Callback):
    """Commits the elastic state every ``batches_per_commit`` batches and at the end of each epoch.

    Args:
        state: the elastic state of this training.
        batches_per_commit: number of batches between commits. A commit copies the whole model in memory. A
            larger number means fewer copies, but more batches to repeat after a loss.
    """

    def __init__(self, state: State, batches_per_commit: int = 1) -> None:
        super().__init__()
        self.state = state
        self.batches_per_commit = batches_per_commit
        self.batches_remaining = batches_per_commit

    def on_train_begin(self, logs: Logs = None) -> None:
        """Start counting batches."""
        self.batches_remaining = self.batches_per_commit

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        """Commit after every ``batches_per_commit`` batches.

        Raises:
            HostsUpdatedInterrupt: the hosts of the job have changed.
        """
        self.batches_remaining -= 1
        if self.batches_remaining == 0:
            self._commit()
            self.batches_remaining = self.batches_per_commit

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Commit.

        Raises:
            HostsUpdatedInterrupt: the hosts of the job have changed.
        """
        self._commit()

    def _commit(self) -> None:
        # On JAX, Keras writes the new values to the variables when a callback reads self.model.
        assert self.model is not None
        self.state.commit()


@documented
class UpdateBatchStateCallback(Callback):
    """Sets ``state.batch`` to the index of the last completed batch, and to 0 between epochs.

    Place it before :class:`CommitStateCallback` in the list of callbacks.

    Args:
        state: an elastic state with an attribute ``batch``.
    """

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        """Set ``state.batch``."""
        self.state.batch = batch

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Set ``state.batch`` to 0."""
        self.state.batch = 0


@documented
class UpdateEpochStateCallback(Callback):
    """Sets ``state.epoch`` to the number of completed epochs, including those before a restart.

    Train with ``model.fit(..., epochs=epochs - state.epoch)``. Place it before :class:`CommitStateCallback`
    in the list of callbacks.

    Args:
        state: an elastic state with an attribute ``epoch``.
    """

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state
        self.initial_epoch = state.epoch

    def on_train_begin(self, logs: Logs = None) -> None:
        """Remember ``state.epoch``: Keras counts epochs from 0 in every call of ``fit``."""
        self.initial_epoch = self.state.epoch

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Set ``state.epoch``."""
        self.state.epoch = self.initial_epoch + epoch + 1
