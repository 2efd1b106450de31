"""Callbacks for ``model.fit``, for every backend of Keras."""

from __future__ import annotations

import logging
from typing import Any, Dict, Optional

import keras

from .. import api
from .._adapter.callbacks import Multiplier, Schedule, averaged, warmup
from ..docstrings import documented
from ..elastic.state import build, variables_of
from .collectives import broadcast_variables
from .optimizer import check_not_scaled_outside, check_reached, samples_of

_logger = logging.getLogger(__name__)

Logs = Optional[Dict[str, Any]]


class _Keras2Interface:
    """The attributes and methods that Keras 2 requires of callbacks and Keras 3 does not."""

    _supports_tf_logs = False
    _chief_worker_only = None

    def _implements_train_batch_hooks(self) -> bool:
        return True

    def _implements_test_batch_hooks(self) -> bool:
        return False

    _implements_predict_batch_hooks = _implements_test_batch_hooks


class Callback(_Keras2Interface, keras.callbacks.Callback):
    """Base class of these callbacks: a callback of Keras 3 that Keras 2 also accepts."""


@documented
class BroadcastGlobalVariablesCallback(Callback):
    """Broadcasts the model's weights and the optimizer's state from one rank when training begins.

    All ranks then start from the same initial or loaded values. A model that is not built yet is broadcast
    after its first batch, which creates its variables.

    Args:
        {root_rank}
        device: no effect; accepted because Horovod's class has it.
        local_variables: variables that are not broadcast.
    """

    def __init__(self, root_rank: int = 0, device: str = "", local_variables: Any = None) -> None:
        super().__init__()
        self.root_rank = root_rank
        self.broadcast_done = False
        self._local = {id(variable) for variable in local_variables or ()}

    def register_local_var(self, variable: Any) -> None:
        """Exclude a variable from the broadcast.

        Args:
            variable: the variable; call this before training begins.
        """
        self._local.add(id(variable))

    def on_train_begin(self, logs: Logs = None) -> None:
        """Broadcast the variables if the model is built.

        Raises:
            ConfigError: a ``LossScaleOptimizer`` wraps the distributed optimizer.
            {rank_errors}
        """
        check_not_scaled_outside(getattr(self.model, "optimizer", None))
        if self.model.built:
            self._broadcast()

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        """Broadcast the variables after the first batch if the model was not built before."""
        if not self.broadcast_done:
            self._broadcast()

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Check that a distributed optimizer has reduced gradients in this epoch.

        Raises:
            BrokenInvariantError: Keras has not called the method that reduces gradients.
        """
        check_reached(self.model.optimizer)

    def _broadcast(self) -> None:
        if self.broadcast_done:
            return
        variables = list(self.model.weights)
        if any("moving_mean" in getattr(item, "path", "") for item in variables):
            api.context().batch_norm = True
        optimizer = getattr(self.model, "optimizer", None)
        if optimizer is not None:
            build(optimizer, self.model)
            variables += variables_of(optimizer)
        broadcast_variables([item for item in variables if id(item) not in self._local], self.root_rank)
        self.broadcast_done = True


@documented
class MetricAverageCallback(Callback):
    """Replaces metrics by their averages over all ranks at the end of each epoch.

    With a ``BalancedDataset``, training metrics are weighted by the number of samples.

    Place it before callbacks that read metrics, such as ``ReduceLROnPlateau`` and ``EarlyStopping``. These
    then make the same decisions on all ranks.

    Args:
        device: no effect; accepted because Horovod's class has it.
        log_stats: add the numbers of :func:`ringcomm.stats` to the metrics. They are numbers of this rank,
            not averages. Callbacks after this one, such as ``TensorBoard``, ``CSVLogger`` or the one of
            Weights & Biases, then log them.
    """

    def __init__(self, device: str = "", log_stats: bool = False) -> None:
        super().__init__()
        self._log_stats = log_stats

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Average the metrics in ``logs``, in place.

        Raises:
            {rank_errors}
        """
        if logs:
            logs.update(averaged(logs, samples=samples_of(self.model)))
        if logs is not None and self._log_stats:
            logs.update(api.stats())


@documented
class LearningRateScheduleCallback(Callback):
    """Sets the learning rate to ``initial_lr * multiplier(epoch)``.

    Args:
        initial_lr: the learning rate that is multiplied.
        multiplier: a number, or a function of the epoch that returns one.
        start_epoch: the first epoch in which the schedule applies.
        end_epoch: the first epoch in which the schedule no longer applies; None: it applies until the end.
        staircase: change the learning rate only at the beginning of each epoch. Otherwise it changes with
            every batch, and the multiplier is called with fractions of epochs.
        momentum_correction: scale the momentum for one batch when the learning rate changes (Goyal et al.,
            2017). It works only if Keras reads the momentum in every step: on PyTorch, and with
            ``run_eagerly=True``. Otherwise the momentum is a constant of the compiled program.
        {keras_steps_per_epoch}

    Raises:
        ConfigError: ``initial_lr`` is None.
    """

    def __init__(
        self, initial_lr: float, multiplier: Multiplier, start_epoch: int = 0,
        end_epoch: Optional[int] = None, staircase: bool = True, momentum_correction: bool = True,
        steps_per_epoch: Optional[int] = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.schedule = Schedule(initial_lr, multiplier, start_epoch, end_epoch, staircase, steps_per_epoch)
        self.momentum_correction = momentum_correction
        self.current_epoch = 0
        self._momentum: Optional[float] = None

    def on_train_begin(self, logs: Logs = None) -> None:
        """Take the number of batches per epoch from Keras if it was not given."""
        if not self.schedule.steps_per_epoch:
            self.schedule.steps_per_epoch = (self.params or {}).get("steps")

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        """Remember the epoch."""
        self.current_epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Logs = None) -> None:
        """Set the learning rate, and the corrected momentum.

        Raises:
            ConfigError: the number of batches per epoch is needed, but it is not given, and Keras does not
                know it.
        """
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
        """Restore the momentum."""
        if self._momentum is not None:
            self.model.optimizer.momentum, self._momentum = self._momentum, None

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Add the learning rate to the metrics as ``lr``."""
        if logs is not None:
            logs["lr"] = float(self.model.optimizer.learning_rate)


@documented
class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raises the learning rate linearly from ``initial_lr / size`` to ``initial_lr`` (Goyal et al., 2017).

    Args:
        initial_lr: the learning rate at the end: the learning rate of one rank times the number of ranks.
        warmup_epochs: duration of the warm-up in epochs.
        momentum_correction: scale the momentum for one batch when the learning rate changes. It works on
            PyTorch, and with ``run_eagerly=True``.
        {keras_steps_per_epoch}
        verbose: 1: rank 0 logs (level INFO) when the warm-up is over.

    Raises:
        ConfigError: ``initial_lr`` is None.
    """

    def __init__(
        self, initial_lr: float, warmup_epochs: int = 5, momentum_correction: bool = True,
        steps_per_epoch: Optional[int] = None, verbose: int = 0,
    ) -> None:  # fmt: skip
        multiplier: Multiplier = lambda epoch: warmup(api.size(), warmup_epochs, epoch)  # noqa: E731
        super().__init__(
            initial_lr, multiplier, 0, warmup_epochs, False, momentum_correction, steps_per_epoch
        )
        self.verbose = verbose

    def on_train_batch_begin(self, batch: int, logs: Logs = None) -> None:
        """Set the learning rate. In the first batch after the warm-up, set it to ``initial_lr``.

        Raises:
            ConfigError: the number of batches per epoch is needed, but it is not given, and Keras does not
                know it.
        """
        super().on_train_batch_begin(batch, logs)
        if self.current_epoch == self.schedule.end_epoch and batch == 0:
            self.model.optimizer.learning_rate = self.schedule.initial_lr
            if self.verbose and api.rank() == 0:
                _logger.info("Warm-up is over: the learning rate is %g.", self.schedule.initial_lr)


@documented
class BestModelCheckpoint(_Keras2Interface, keras.callbacks.ModelCheckpoint):
    """Saves the best model so far to a file, on rank 0 only.

    Args:
        monitor: the metric that is compared.
        verbose: 1: print a line when the model is saved.
        mode: ``"min"``, ``"max"`` or ``"auto"``: which values of the metric are better.
        save_freq: ``"epoch"``, or the number of batches between comparisons.
        filepath: path of the file. Keras replaces ``{epoch}`` and names of metrics in braces by their values.
    """

    def __init__(
        self, monitor: str = "val_loss", verbose: int = 0, mode: str = "auto", save_freq: Any = "epoch",
        filepath: Any = "best.keras",
    ) -> None:  # fmt: skip
        super().__init__(filepath, monitor, verbose, save_best_only=True, mode=mode, save_freq=save_freq)

    def _save_model(self, epoch: int, batch: Any, logs: Any) -> Any:
        return super()._save_model(epoch, batch, logs) if api.rank() == 0 else None
