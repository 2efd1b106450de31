"""MXNet on any number of ranks, with Horovod's interface.

::

    import ringcomm.mxnet as hvd

    hvd.init()
    params = model.collect_params()
    hvd.broadcast_parameters(params, root_rank=0)
    trainer = hvd.DistributedTrainer(params, optimizer)

Everything else in the training loop stays as it is.
"""

from .._adapter import common
from .._adapter.common import *  # noqa: F403
from .._adapter.objects import allgather_object, broadcast_object
from . import mpi_ops
from .compression import Compression, PowerSGD
from .movement import allgather, alltoall, broadcast, broadcast_, grouped_allgather
from .optimizer import DistributedOptimizer
from .parameters import broadcast_parameters
from .reductions import (
    allreduce,
    allreduce_,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_reducescatter,
    reducescatter,
)
from .trainer import DistributedTrainer

__all__ = [
    *common.__all__,
    "Compression",
    "DistributedOptimizer",
    "DistributedTrainer",
    "PowerSGD",
    "allgather",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "alltoall",
    "broadcast",
    "broadcast_",
    "broadcast_object",
    "broadcast_parameters",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_reducescatter",
    "mpi_ops",
    "reducescatter",
]
