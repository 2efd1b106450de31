"""Distributed training with TensorFlow, with Horovod's interface.

::

    import ringcomm.tensorflow as hvd

    hvd.init()
    ...
    tape = hvd.DistributedGradientTape(tape)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))
    if first_batch:
        hvd.broadcast_variables(model.variables, root_rank=0)

It works in eager mode, in ``tf.function`` and in graphs of TensorFlow 1 (``tf.compat.v1``). It does not work
in functions compiled with ``jit_compile=True``, because XLA cannot call Python.
"""

import sys as _sys

from .._adapter import compression
from .._adapter.basics import *  # noqa: F403
from .._adapter.graph_callbacks import load_residual_state_dict as load_residual_state_dict
from .._adapter.graph_callbacks import residual_state_dict as residual_state_dict
from ..balance.batches import BalancedBatches as BalancedBatches
from ..calls.async_calls import join as join
from ..docstrings import export as _export
from . import elastic as elastic
from . import mpi_ops as mpi_ops
from .collectives import *  # noqa: F403
from .functions import *  # type: ignore[assignment]  # noqa: F403
from .mpi_ops import _executing_eagerly as _executing_eagerly
from .training import *  # noqa: F403

util = mpi_ops
# Horovod's names of modules, which scripts import.
_sys.modules.update({f"{__name__}.compression": compression, f"{__name__}.util": util})
_export(globals(), "elastic", "mpi_ops")
