"""Training that goes on after a rank is lost, on every backend of Keras: ``hvd.elastic``."""

from __future__ import annotations

from typing import Any, Dict, List, Optional, Sequence

from ..elastic.parts import PartsState, VariablesPart, check_built
from ..elastic.state import ObjectState, State, run
from .callbacks import Callback
from .collectives import as_array, broadcast_variables

__all__ = [
    "CommitStateCallback", "KerasState", "ObjectState", "State", "UpdateBatchStateCallback",
    "UpdateEpochStateCallback", "run",
]  # fmt: skip

Logs = Optional[Dict[str, Any]]


class KerasState(PartsState):
    """A model and its optimizer, and plain values: all are attributes.

    ::

        state = hvd.elastic.KerasState(model, batch=0, epoch=0)

    Args:
        model: a built one.
        optimizer: if the model was not compiled with one.
        kwargs: plain values.

    Raises:
        ConfigError: the model is not built yet.
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


class CommitStateCallback(Callback):
    """Commits the state after every so many batches, and at the end of each epoch.

    Args:
        state: of this training.
        batches_per_commit: a commit copies the whole model; with more batches there are fewer copies,
            and more to do again after a loss.
    """

    def __init__(self, state: State, batches_per_commit: int = 1) -> None:
        super().__init__()
        self.state = state
        self.batches_per_commit = batches_per_commit
        self.batches_remaining = batches_per_commit

    def on_train_begin(self, logs: Logs = None) -> None:
        """Count from here, on all ranks alike."""
        self.batches_remaining = self.batches_per_commit

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        """Commit if it is time."""
        self.batches_remaining -= 1
        if self.batches_remaining == 0:
            self._commit()
            self.batches_remaining = self.batches_per_commit

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Commit."""
        self._commit()

    def _commit(self) -> None:
        # On JAX variables get their new values when a callback asks for the model.
        assert self.model is not None
        self.state.commit()


class UpdateBatchStateCallback(Callback):
    """Keeps ``state.batch`` at the last batch of the epoch that is done; 0 between epochs.

    Args:
        state: with an attribute ``batch``. Put this callback before :class:`CommitStateCallback`.
    """

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        """See the class."""
        self.state.batch = batch

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """See the class."""
        self.state.batch = 0


class UpdateEpochStateCallback(Callback):
    """Keeps ``state.epoch`` at the number of epochs that are done, those before the last loss included.

    So train with ``model.fit(..., epochs=epochs - state.epoch)``.

    Args:
        state: with an attribute ``epoch``. Put this callback before :class:`CommitStateCallback`.
    """

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state
        self.initial_epoch = state.epoch

    def on_train_begin(self, logs: Logs = None) -> None:
        """Keras counts from 0 each time."""
        self.initial_epoch = self.state.epoch

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """See the class."""
        self.state.epoch = self.initial_epoch + epoch + 1
