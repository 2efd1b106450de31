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

Works in eager mode, in ``tf.function`` and in graphs of TensorFlow 1 (``tf.compat.v1``), but not in functions
compiled with ``jit_compile=True``: XLA cannot call Python.
"""

from .._adapter import common
from .._adapter.common import *  # noqa: F403
from .._adapter.compressed import load_residual_state_dict, residual_state_dict
from .._adapter.compression import Compression, PowerSGD
from ..balance.batches import BalancedBatches
from ..calls.async_calls import join
from . import elastic, mpi_ops
from .balanced import BalancedDataset
from .collectives import allreduce, grouped_allreduce, grouped_reducescatter, reducescatter
from .functions import (
    BroadcastGlobalVariablesHook,
    allgather_object,
    broadcast_,
    broadcast_global_variables,
    broadcast_object,
    broadcast_object_fn,
    broadcast_variables,
    local_rank_op,
    local_size_op,
    process_set_included_op,
    rank_op,
    size_op,
)
from .movement import allgather, alltoall, broadcast, grouped_allgather
from .optimizer import DistributedOptimizer
from .sync_batch_norm import SyncBatchNormalization
from .tape import DistributedGradientTape, PartialDistributedGradientTape
from .util import _executing_eagerly as _executing_eagerly

__all__ = [
    *common.__all__,
    "BalancedBatches",
    "BalancedDataset",
    "BroadcastGlobalVariablesHook",
    "Compression",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "PartialDistributedGradientTape",
    "PowerSGD",
    "SyncBatchNormalization",
    "allgather",
    "allgather_object",
    "allreduce",
    "alltoall",
    "broadcast",
    "broadcast_",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_variables",
    "elastic",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "join",
    "load_residual_state_dict",
    "local_rank_op",
    "local_size_op",
    "mpi_ops",
    "process_set_included_op",
    "rank_op",
    "reducescatter",
    "residual_state_dict",
    "size_op",
]
