"""Data for training loops of TensorFlow on ranks of unequal speed."""

from __future__ import annotations

from typing import Any, List

import tensorflow as tf

from ..balance.batches import BalancedBatches
from ..docstrings import documented
from ..errors import ConfigError


@documented
class BalancedDataset(BalancedBatches):
    """Tensors for a training loop: each rank gets as many rows as it can compute in time. ::

        data = hvd.BalancedDataset(images, labels, global_batch=96)
        for epoch in range(epochs):
            for x, y in data:
                with tf.GradientTape() as tape:
                    loss = loss_of(model(x), y)  # the mean over the rows, as with one process
                tape = hvd.DistributedGradientTape(tape, batches=data)

    A rank without rows in a step gets two of another rank's, and its gradients have weight 0.

    Args:
        *arrays: arrays or tensors of equally many rows.
        global_batch: rows of all ranks together per step.
        seed: of the order of rows, the same on all ranks.
        **options: ``speeds``, ``min_batch``, ``max_batch``, ``multiple_of``, ``shuffle`` and ``drop_last``,
            as for ``BalancedBatches``. A ``tf.function`` is traced again for every number of rows:
            ``multiple_of=8`` keeps these few, or ``reduce_retracing=True``.

    Raises:
        {balanced_errors}
    """

    def __init__(self, *arrays: Any, global_batch: int = 96, seed: int = 0, **options: Any) -> None:
        lengths = {len(array) for array in arrays}
        if len(lengths) != 1:
            raise ConfigError(f"BalancedDataset takes arrays of equally many rows, not {sorted(lengths)}.")
        super().__init__(lengths.pop(), global_batch, seed, **options)
        self._arrays = arrays

    def _item(self, epoch: int, step: int) -> Any:
        indices: List[int] = super()._item(epoch, step)
        rows = tuple(tf.gather(array, indices) for array in self._arrays)
        return rows if len(rows) > 1 else rows[0]
