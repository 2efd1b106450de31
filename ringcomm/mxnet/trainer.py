"""``DistributedTrainer``: a ``gluon.Trainer`` that averages gradients over all ranks before each step."""

from __future__ import annotations

import warnings
from typing import Any, Dict, Optional

import mxnet as mx
import numpy as np

from .. import api
from .._adapter.reduction import of_gradients
from .._adapter.submit import wire_name
from ..calls.process_set import ProcessSet, global_process_set, number_of
from ..docstrings import documented
from ..errors import ConfigError
from ..ops import ReduceOp
from .compression import Compression
from .optimizer import DistributedOptimizer
from .reducer import GradientReducer


@documented
class DistributedTrainer(mx.gluon.Trainer):
    """A ``gluon.Trainer`` that averages gradients over all ranks before each step.

    Example: ``trainer = hvd.DistributedTrainer(model.collect_params(), "sgd", {"learning_rate": 0.1})``.

    ``step(batch_size)`` divides gradients by the batch size of this rank, and they are averaged over the
    ranks. So ranks of equal batch sizes together make the step of one process with all their samples.

    Args:
        params: ``Block.collect_params()``, a dict or a list of parameters, in the same order on all ranks.
        optimizer: an optimizer of MXNet or its name.
        optimizer_params: arguments for an optimizer given by name.
        {gradient_compression}
            A class with methods ``compress`` and ``decompress`` does as well.
        {mx_gradient_predivide_factor}
        prefix: of the operations' names. Trainers that are used at the same time in several threads need
            different ones.
        {mx_num_groups}
        {process_set}

    Raises:
        ConfigError: an argument has an invalid value, or a parameter is in several contexts: every rank
            trains in one.
    """

    def __init__(
        self,
        params: Any,
        optimizer: Any,
        optimizer_params: Optional[Dict[str, Any]] = None,
        compression: Any = Compression.none,
        gradient_predivide_factor: float = 1.0,
        prefix: Optional[str] = None,
        num_groups: int = 0,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        if isinstance(optimizer, DistributedOptimizer):
            optimizer = optimizer._optimizer
            warnings.warn(
                "DistributedTrainer does not take DistributedOptimizer as its optimizer. We have unwrapped "
                "it for you.",
                stacklevel=2,
            )
        if prefix is not None and not isinstance(prefix, str):
            raise ConfigError(f"DistributedTrainer: prefix={prefix!r} is not a string.")
        super().__init__(params, optimizer, optimizer_params=optimizer_params, kvstore=None)
        if len(self._contexts or ()) > 1:
            listed = ", ".join(map(str, self._contexts))
            raise ConfigError(
                f"DistributedTrainer: parameters are in the contexts {listed}. Every rank trains in one "
                "context: start one rank for each."
            )
        self._prefix = prefix or ""
        how = of_gradients(
            ReduceOp.AVERAGE, gradient_predivide_factor, process_set, compression, num_groups=num_groups
        )
        self._reducer = GradientReducer(how)

    def step(self, batch_size: int, ignore_stale_grad: bool = False) -> None:
        """Average gradients over all ranks and update the parameters.

        Args:
            batch_size: the number of samples of this rank, by which gradients are divided.
            ignore_stale_grad: update only parameters of which a rank has a new gradient since the last step;
                ranks that have none contribute zeros. If it is False, all ranks need one of every parameter.

        Raises:
            UserWarning: a gradient is not new, and ``ignore_stale_grad`` is False.
            PeerLostError: a rank was lost.
        """
        if ignore_stale_grad and self._reducer.how.active():
            self._agree_on_new_gradients()
        super().step(batch_size, ignore_stale_grad)

    def _agree_on_new_gradients(self) -> None:
        """Zero the gradients that are new on other ranks only, so that they are used here too."""
        trained = [parameter for parameter in self._params if parameter.grad_req != "null"]
        new = np.array([parameter.list_data()[0]._fresh_grad for parameter in trained], np.uint8)
        new_anywhere = new.copy()
        api.context().engine.allreduce(
            [new_anywhere], ReduceOp.MAX, wire_name("allreduce", f"{self._prefix}new gradients"),
            process_set=number_of(self._reducer.how.process_set), urgent=True,
        ).wait()  # fmt: skip
        for parameter, here, anywhere in zip(trained, new, new_anywhere):
            if anywhere and not here:
                parameter.list_grad()[0][:] = 0
                parameter.list_data()[0]._fresh_grad = True

    def _allreduce_grads(self) -> None:
        trained = [
            (f"{self._prefix}{index}", parameter)
            for index, parameter in enumerate(self._params)
            if parameter.grad_req != "null"
        ]
        self._reducer.reduce(
            [name for name, _ in trained],
            [parameter.list_grad()[0] for _, parameter in trained],
            [parameter.list_data()[0] for _, parameter in trained],
        )
