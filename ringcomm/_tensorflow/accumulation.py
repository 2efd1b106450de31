"""Sum the gradients of several batches before each optimizer step, in eager mode and ``tf.function``."""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Tuple

import tensorflow as tf

from ..errors import ConfigError

Pairs = List[Tuple[Any, Any]]


class Accumulator:
    """The sums of gradients since the last step, one for each variable.

    ``average``: divide them by ``passes``, the number of batches per step. ``counter`` is the number of
    batches in the sums, from 0 to ``passes - 1``. Without ``sparse_as_dense``, ``tf.IndexedSlices`` are
    refused.
    """

    def __init__(self, passes: int, average: bool, sparse_as_dense: bool) -> None:
        self._passes = passes
        self._average = average
        self._factor = 1.0 / passes if average else 1.0
        self._sparse_as_dense = sparse_as_dense
        self._sums: Dict[Any, Any] = {}
        with tf.init_scope():
            self.counter = tf.Variable(0, trainable=False, dtype=tf.int64)

    def fresh(self) -> Accumulator:
        """Return another accumulator with the same options, without sums."""
        return Accumulator(self._passes, self._average, self._sparse_as_dense)

    def step(self, pairs: Pairs, apply: Callable[[Pairs], Any], otherwise: Callable[[], Any]) -> None:
        """Add pairs (gradient, variable); ``apply`` and reset the sums if a step is complete.

        Else call ``otherwise``. ConfigError: a gradient is sparse, and ``sparse_as_dense`` is False.
        """
        present = [(self._dense(gradient), variable) for gradient, variable in pairs if gradient is not None]
        sums = [self._sum_for(variable) for _, variable in present]
        for total, (gradient, _) in zip(sums, present):
            total.assign_add(tf.cast(gradient, total.dtype))

        def make_step() -> Any:
            values = [total.read_value() * tf.cast(self._factor, total.dtype) for total in sums]
            for total in sums:
                total.assign(tf.zeros_like(total))
            self.counter.assign(0)
            apply([(value, variable) for value, (_, variable) in zip(values, present)])
            return tf.constant(True)

        def only_add() -> Any:
            otherwise()
            return tf.constant(False)

        tf.cond(tf.equal(self.counter.assign_add(1), self._passes), make_step, only_add)

    def _dense(self, gradient: Any) -> Any:
        if isinstance(gradient, tf.IndexedSlices) and not self._sparse_as_dense:
            raise ConfigError(
                "backward_passes_per_step sums dense gradients only; this one is tf.IndexedSlices: use "
                "sparse_as_dense=True."
            )
        return tf.convert_to_tensor(gradient)

    def _sum_for(self, variable: Any) -> Any:
        key = variable.ref()
        if key not in self._sums:
            with tf.init_scope():
                zeros = tf.zeros(variable.shape, variable.dtype)
                self._sums[key] = tf.Variable(zeros, trainable=False)
        return self._sums[key]
