"""Data for ``model.fit`` on ranks of unequal speed."""

from __future__ import annotations

from typing import Any, Dict

import keras

from ..balance.batches import PLACEHOLDERS, Balanced
from ..balance.pace import Pace
from ..docstrings import documented
from ..dtypes import Array
from ..errors import ConfigError


@documented
class BalancedDataset(keras.utils.PyDataset):
    """Arrays for ``model.fit``, from which each rank gets as many samples as it can compute in time.

    The global batch is fixed, so use the learning rate of one process. In an epoch, every sample is in one
    batch of one rank.

    Example::

        data = hvd.BalancedDataset(images, labels, global_batch=96)
        model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(), batches=data), ...)
        model.fit(data, epochs=5)

    On PyTorch, the shares of ranks change as soon as their speeds do; on TensorFlow and JAX, with the next
    epoch.

    A rank whose share of a step is empty gets two samples of another rank, and its gradients have weight 0.

    Args:
        x: the inputs: an array, or a list or a dictionary of arrays with one row per sample.
        y: the targets, in the same form; None: there are none.
        global_batch: samples of all ranks together per step.
        seed: seed for the order of the samples, the same on all ranks.
        **options: ``speeds``, ``min_batch``, ``max_batch``, ``multiple_of``, ``shuffle`` and ``drop_last``,
            as for ``ringcomm.torch.BalancedBatches``. Compiled functions are compiled again for every number
            of samples. ``multiple_of=8`` limits this.

    Raises:
        ConfigError: this version of Keras has no ``PyDataset.on_epoch_begin``, or an argument is invalid.
        {not_initialized}
    """

    def __init__(self, x: Any, y: Any = None, global_batch: int = 96, seed: int = 0, **options: Any) -> None:
        super().__init__()
        if not hasattr(keras.utils.PyDataset, "on_epoch_begin"):
            raise ConfigError(f"BalancedDataset needs a newer Keras than {keras.__version__}.")
        self._x, self._y = x, y
        self._batches = Balanced(_rows(x), global_batch, seed, **options)
        self._step = self._start = self._epoch = 0
        self._running = False
        # TensorFlow prefetches as many batches as it finds useful, and JAX runs ahead of its computations.
        self.pace.by_epoch = keras.backend.backend() in ("tensorflow", "jax")

    @property
    def pace(self) -> Pace:
        """This rank's position in the data and its measurements, for optimizers."""
        return self._batches.pace

    def __len__(self) -> int:
        """Return the number of global batches of this epoch, without those before the loaded position."""
        return len(self._batches) - self._start

    def __getitem__(self, index: int) -> Any:
        """Return this rank's rows of the next global batch; ConfigError if no optimizer has ``batches=``.
        While Keras trains, ``index`` is ignored: ``fit(shuffle=True)`` would use another order on each rank.
        """
        if not self._running:
            # Keras looks at types.
            return self._of(self.pace.division.batch(self._epoch, index)[:PLACEHOLDERS])
        if not self.pace.counted:
            raise ConfigError(
                "No optimizer has this BalancedDataset, so gradients of ranks with few samples would "
                "count as much as those of ranks with many: use DistributedOptimizer(..., batches=data)."
            )
        indices = self.pace.take(self._epoch, self._step)
        if not indices.size:
            indices = self.pace.division.batch(self._epoch, self._step)[:PLACEHOLDERS]
        self._step += 1
        return self._of(indices)

    def _of(self, indices: Array) -> Any:
        x = keras.tree.map_structure(lambda array: array[indices], self._x)
        if self._y is None:
            return x
        return x, keras.tree.map_structure(lambda array: array[indices], self._y)

    def on_epoch_begin(self) -> None:
        """Begin an epoch; Keras calls this."""
        _wait_for_reductions()
        self._step, self._running = self._start, True
        self.pace.begin(self._epoch, self._start)

    def on_epoch_end(self) -> None:
        """End an epoch; Keras calls this."""
        _wait_for_reductions()
        # Before training Keras calls it without an epoch, or after one in which it only looked at a batch.
        if self._running and self.pace.step > self._start:
            self._epoch, self._start = self._epoch + 1, 0
        self._running = False
        if self.pace.ended:
            raise SystemExit(0)  # not before: gradients are reduced in threads of the framework

    def state_dict(self) -> Dict[str, Any]:
        """Return the position in the data. It does not depend on the number of ranks.

        Returns:
            see ``ringcomm.torch.BalancedBatches.state_dict``.
        """
        return self._batches.state_dict()

    def load_state_dict(self, state: Dict[str, Any]) -> None:
        """Continue at a position that :meth:`state_dict` has returned, with any number of ranks.

        Args:
            state: the position.

        Raises:
            ConfigError: it belongs to another data set, seed or global batch.
        """
        self._batches.load_state_dict(state)
        self._epoch, self._start = int(state["epoch"]), int(state["step"])


def _rows(x: Any) -> int:
    lengths = {len(array) for array in keras.tree.flatten(x)}
    if len(lengths) != 1:
        raise ConfigError(f"The inputs must have equally many rows, not {sorted(lengths)}.")
    return int(lengths.pop())


def _wait_for_reductions() -> None:
    """Wait until all steps so far have been reduced. Only JAX runs ahead of its computations."""
    if keras.backend.backend() == "jax":
        from ..jax.programs import wait_for_programs

        wait_for_programs()
