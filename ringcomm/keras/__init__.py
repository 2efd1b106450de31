"""Distributed training with Keras 3 on TensorFlow, PyTorch or JAX, with Horovod's interface.

::

    import ringcomm.keras as hvd

    hvd.init()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.001 * hvd.size()))
    model.compile(optimizer=optimizer, loss=..., metrics=[...])
    model.fit(..., callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])

The program divides the data among the ranks; the rest of it stays as for one process.
"""

from .._adapter import common
from .._adapter.common import *  # noqa: F403
from .._adapter.compressed import load_residual_state_dict, residual_state_dict
from .._adapter.compression import Compression, PowerSGD
from .._adapter.objects import allgather_object, broadcast_object
from . import callbacks, elastic
from .balanced import BalancedDataset
from .collectives import allgather, allreduce, alltoall, broadcast, broadcast_variables, reducescatter
from .local_sgd import LocalSGDCallback
from .models import load_model
from .optimizer import DistributedOptimizer, PartialDistributedOptimizer

__all__ = [
    *common.__all__,
    "BalancedDataset",
    "Compression",
    "DistributedOptimizer",
    "LocalSGDCallback",
    "PartialDistributedOptimizer",
    "PowerSGD",
    "allgather",
    "allgather_object",
    "allreduce",
    "alltoall",
    "broadcast",
    "broadcast_object",
    "broadcast_variables",
    "callbacks",
    "elastic",
    "load_model",
    "load_residual_state_dict",
    "reducescatter",
    "residual_state_dict",
]
