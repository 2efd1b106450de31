"""Local steps for Keras: ranks train by themselves and average their models now and then."""

from __future__ import annotations

from functools import partial
from typing import Any, Callable, List, Optional, Sequence, Tuple, Union

import keras
import numpy as np

from .._adapter.intervals import AUTO
from .._adapter.local_sgd import LocalSGD, host_dtype
from .._adapter.outer import OuterOptimizer
from ..calls.process_set import ProcessSet, global_process_set
from ..docstrings import documented
from ..dtypes import Array
from .callbacks import BroadcastGlobalVariablesCallback, Callback, Logs


@documented
class LocalSGDCallback(OuterOptimizer, Callback):
    """Ranks train by themselves, and average their models now and then.

    Example::

        model.compile(keras.optimizers.SGD(0.1), ...)
        model.fit(x, y, callbacks=[hvd.LocalSGDCallback(sync_every=16)])

    This is another algorithm than averaging gradients. By default ranks synchronize as often as their
    distance demands. With SGD that loses nothing in docs/compression.md; with Adam it acts like a lower
    learning rate. :meth:`diloco` has an outer momentum, for runs with hundreds of synchronizations.

    The model has its own optimizer, not a ``DistributedOptimizer``. When training begins all ranks get rank
    0's weights. Every ``sync_every``-th batch, and when training ends, the average of what the ranks have
    changed is taken for a gradient of an outer step from the last common weights (with the defaults: the
    weights are averaged); weights that are not trained, such as batch-norm statistics, are averaged. All
    ranks must train on equally many batches.

    Args:
        {local_sgd}
    """

    def __init__(
        self,
        sync_every: Union[int, str, Sequence[int]] = AUTO,
        outer_lr: float = 1.0,
        outer_momentum: float = 0.0,
        compression: Any = None,
        process_set: ProcessSet = global_process_set,
        fragments: int = 1,
        overlap: int = 0,
        max_drift: Optional[float] = None,
    ) -> None:
        super().__init__()
        self._core_of = partial(
            LocalSGD, sync_every=sync_every, outer_lr=outer_lr, outer_momentum=outer_momentum,
            compression=compression, process_set=process_set, name="keras.local_sgd", fragments=fragments,
            overlap=overlap, max_drift=max_drift,
        )  # fmt: skip
        self._pairs: List[Tuple[Any, Array]] = []
        self._core: Optional[LocalSGD] = None

    def on_train_begin(self, logs: Logs = None) -> None:
        """Give all ranks rank 0's weights, and begin with local steps."""
        broadcast = BroadcastGlobalVariablesCallback()
        broadcast.set_model(self.model)
        broadcast.on_train_begin()
        trained = list(self.model.trainable_variables)
        others = [
            item
            for item in self.model.non_trainable_variables
            if "float" in keras.backend.standardize_dtype(item.dtype)
        ]
        variables = [*trained, *others]
        types = [host_dtype(keras.backend.standardize_dtype(item.dtype)) for item in variables]
        values = [keras.ops.convert_to_numpy(item.value) for item in variables]
        arrays = [np.array(value, dtype) for value, dtype in zip(values, types)]
        self._pairs = list(zip(variables, arrays))
        self._core = self._core_of(arrays[: len(trained)], averaged=arrays[len(trained) :])

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        """Count a local step, and synchronize if it is time.

        Args:
            batch: index of the batch in the epoch.
            logs: metrics by name.
        """
        if self._core is not None and self._core.due():
            self._exchange(self._core.advance, self._core.touched())

    def on_train_end(self, logs: Logs = None) -> None:
        """Synchronize a last time.

        Args:
            logs: metrics by name.
        """
        if self._core is not None and self._core.steps:
            self._exchange(self._core.synchronize, range(len(self._pairs)))

    def _exchange(self, act: Callable[[], None], places: Sequence[int]) -> None:
        """Let the outer optimizer work on the present values of some variables."""
        if hasattr(self.model, "jax_state_sync"):
            self.model.jax_state_sync()  # on JAX the variables have no values during an epoch
        pairs = [self._pairs[place] for place in places]
        for variable, array in pairs:
            array[...] = keras.ops.convert_to_numpy(variable.value)
        act()
        for variable, array in pairs:
            variable.assign(array)
