"""Distributed training with MLX, on trees of arrays, with Horovod's interface.

::

    import ringcomm.mlx as hvd

    hvd.init()
    hvd.broadcast_parameters(model)
    optimizer = hvd.DistributedOptimizer(optim.Adam(1e-3))
    ...
    loss, gradients = loss_and_gradients(model, images, labels)     # of mlx.nn.value_and_grad
    optimizer.update(model, gradients)                              # averages them over all ranks

Everything else in the training loop stays as it is. Collectives are called outside of ``mx.compile``.
"""

from .._adapter import common
from .._adapter.common import *  # noqa: F403
from .._adapter.compression import Compression, PowerSGD
from .._adapter.objects import allgather_object, broadcast_object
from .collectives import allgather, allreduce, alltoall, broadcast, reducescatter
from .training import DistributedOptimizer, average_gradients, broadcast_parameters

__all__ = [
    *common.__all__,
    "Compression",
    "DistributedOptimizer",
    "PowerSGD",
    "allgather",
    "allgather_object",
    "allreduce",
    "alltoall",
    "average_gradients",
    "broadcast",
    "broadcast_object",
    "broadcast_parameters",
    "reducescatter",
]
