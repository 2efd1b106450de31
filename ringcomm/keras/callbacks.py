"""Callbacks for ``model.fit``, on every backend of Keras."""

from __future__ import annotations

import logging
from typing import Any, Dict, List, Optional, Tuple

import keras

from .. import api
from .._adapter.callbacks import Multiplier, Schedule, averaged, warmup
from .._adapter.checking import StepCheck
from ..elastic.parts import build, variables_of
from ..process_set import ProcessSet, global_process_set
from .collectives import broadcast_variables
from .optimizer import check_reached

_logger = logging.getLogger(__name__)

Logs = Optional[Dict[str, Any]]


class _AskedByKeras2:
    """What Keras 2 asks callbacks besides what Keras 3 does: with it one class serves both."""

    _supports_tf_logs = False
    _chief_worker_only = None

    def _implements_train_batch_hooks(self) -> bool:
        return True

    def _implements_test_batch_hooks(self) -> bool:
        return False

    _implements_predict_batch_hooks = _implements_test_batch_hooks


class Callback(_AskedByKeras2, keras.callbacks.Callback):
    """What the callbacks here derive from: one of Keras 3 that Keras 2 takes as well."""


class BroadcastGlobalVariablesCallback(Callback):
    """Gives all ranks the weights, and the optimizer's state, of one when training begins.

    So they start from the same ones, be they random or loaded. Horovod does this after the first batch,
    because there were variables then that were made by it; Keras 3 makes them before.

    Args:
        root_rank: the rank whose variables are taken.
        device: without effect; Horovod has it.
        local_variables: variables that every rank keeps its own of.
    """

    def __init__(self, root_rank: int = 0, device: str = "", local_variables: Any = None) -> None:
        super().__init__()
        self.root_rank = root_rank
        self.broadcast_done = False
        self._local = {id(variable) for variable in local_variables or ()}

    def register_local_var(self, variable: Any) -> None:
        """Leave this variable as it is on every rank."""
        self._local.add(id(variable))

    def on_train_begin(self, logs: Logs = None) -> None:
        """See the class."""
        if self.model.built:
            self._broadcast()

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        """Late, for models of which nobody could know the shapes before."""
        if not self.broadcast_done:
            self._broadcast()

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Make sure that what has begun together has gone on together."""
        check_reached(self.model.optimizer)

    def _broadcast(self) -> None:
        if self.broadcast_done:
            return
        variables = list(self.model.weights)
        optimizer = getattr(self.model, "optimizer", None)
        if optimizer is not None:
            build(optimizer, self.model)
            variables += variables_of(optimizer)
        broadcast_variables([item for item in variables if id(item) not in self._local], self.root_rank)
        self.broadcast_done = True


class CheckSameCallback(Callback):
    """Compares what the ranks train, bit by bit, after as many batches as ``RINGCOMM_CHECK_EVERY`` says.

    ``fit`` ends with :class:`ringcomm.DesyncError` on all ranks if it is not the same.

    Args:
        process_set: the ranks that train together.
    """

    def __init__(self, process_set: ProcessSet = global_process_set) -> None:
        super().__init__()
        self._check = StepCheck(process_set)

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        """See the class."""
        self._check.stepped(self._weights)

    def _weights(self) -> List[Tuple[str, Any]]:
        if hasattr(self.model, "jax_state_sync"):
            self.model.jax_state_sync()  # JAX keeps them elsewhere during an epoch
        weights = self.model.trainable_variables
        return [(item.path, keras.ops.convert_to_numpy(item)) for item in weights]


class MetricAverageCallback(Callback):
    """Replaces metrics by their averages over all ranks at the end of each epoch.

    Put it before callbacks that look at metrics, such as ``ReduceLROnPlateau`` and ``EarlyStopping``:
    these then decide the same on all ranks.

    Args:
        device: without effect; Horovod has it.
    """

    def __init__(self, device: str = "") -> None:
        super().__init__()

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """See the class."""
        if logs:
            logs.update(averaged(logs))


class LearningRateScheduleCallback(Callback):
    """Sets the learning rate to ``initial_lr * multiplier(epoch)``.

    Args:
        initial_lr: what is multiplied.
        multiplier: a number, or a function of the epoch.
        start_epoch, end_epoch: it applies from the one on and before the other.
        staircase: change it at the beginning of an epoch only; else with every batch, and the function gets
            fractions of epochs.
        momentum_correction: scale the momentum for one batch when the learning rate changes (Goyal et al.,
            2017), where it is a number that is read in every step: on PyTorch, and with
            ``run_eagerly=True``. Elsewhere Keras compiles it in.
        steps_per_epoch: batches per epoch, if Keras cannot tell.
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: Multiplier,
        start_epoch: int = 0,
        end_epoch: Optional[int] = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: Optional[int] = None,
    ) -> None:
        super().__init__()
        self.schedule = Schedule(initial_lr, multiplier, start_epoch, end_epoch, staircase, steps_per_epoch)
        self.momentum_correction = momentum_correction
        self.current_epoch = 0
        self._momentum: Optional[float] = None

    def on_train_begin(self, logs: Logs = None) -> None:
        """Find out how many batches there are."""
        if not self.schedule.steps_per_epoch:
            self.schedule.steps_per_epoch = (self.params or {}).get("steps")

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        """Remember the epoch."""
        self.current_epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Logs = None) -> None:
        """Set the learning rate."""
        rate = self.schedule.rate(self.current_epoch, batch)
        if rate is None:
            return
        optimizer = self.model.optimizer
        old = float(optimizer.learning_rate)
        optimizer.learning_rate = rate
        if self.momentum_correction and self._reads_momentum() and old and rate != old:
            self._momentum = optimizer.momentum
            optimizer.momentum = self._momentum * rate / old

    def _reads_momentum(self) -> bool:
        momentum = getattr(self.model.optimizer, "momentum", None)
        each_step = keras.backend.backend() == "torch" or self.model.run_eagerly
        return isinstance(momentum, float) and momentum > 0 and each_step

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        """Put the momentum back."""
        if self._momentum is not None:
            self.model.optimizer.momentum, self._momentum = self._momentum, None

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Report the learning rate."""
        if logs is not None:
            logs["lr"] = float(self.model.optimizer.learning_rate)


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raises the learning rate from ``initial_lr / size`` to ``initial_lr`` over some epochs.

    Args:
        initial_lr: where it ends: the learning rate for one rank, multiplied by their number.
        warmup_epochs: how long that takes.
        momentum_correction, steps_per_epoch: see :class:`LearningRateScheduleCallback`.
        verbose: 1 to log (level INFO) when it is over.
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: Optional[int] = None,
        verbose: int = 0,
    ) -> None:
        super().__init__(
            initial_lr,
            lambda epoch: warmup(api.size(), warmup_epochs)(epoch),
            0,
            warmup_epochs,
            False,
            momentum_correction,
            steps_per_epoch,
        )
        self.verbose = verbose

    def on_train_batch_begin(self, batch: int, logs: Logs = None) -> None:
        """Set the learning rate; in the first batch after the warm-up to what was to be reached."""
        super().on_train_batch_begin(batch, logs)
        if self.current_epoch == self.schedule.end_epoch and batch == 0:
            self.model.optimizer.learning_rate = self.schedule.initial_lr
            if self.verbose and api.rank() == 0:
                _logger.info("Warm-up is over: the learning rate is %g.", self.schedule.initial_lr)


class BestModelCheckpoint(_AskedByKeras2, keras.callbacks.ModelCheckpoint):
    """Keeps the best model so far in a file, which rank 0 writes.

    Args:
        monitor, verbose, mode, save_freq: see ``keras.callbacks.ModelCheckpoint``.
        filepath: of the file; ``{epoch}`` and metrics in braces are filled in.
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        mode: str = "auto",
        save_freq: Any = "epoch",
        filepath: Any = "best.keras",
    ) -> None:
        super().__init__(filepath, monitor, verbose, save_best_only=True, mode=mode, save_freq=save_freq)

    def _save_model(self, epoch: int, batch: Any, logs: Any) -> Any:
        return super()._save_model(epoch, batch, logs) if api.rank() == 0 else None
