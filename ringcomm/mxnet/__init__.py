"""MXNet on any number of ranks, with Horovod's interface.

::

    import ringcomm.mxnet as hvd

    hvd.init()
    params = model.collect_params()
    hvd.broadcast_parameters(params, root_rank=0)
    trainer = hvd.DistributedTrainer(params, optimizer)

Everything else in the training loop stays as it is.
"""

from .._adapter.common import *  # noqa: F403
from ..calls.exports import export as _export
from . import mpi_ops as mpi_ops
from .movement import allgather as allgather
from .movement import alltoall as alltoall
from .movement import broadcast as broadcast
from .movement import broadcast_ as broadcast_
from .movement import grouped_allgather as grouped_allgather
from .optimizer import DistributedOptimizer as DistributedOptimizer
from .parameters import broadcast_parameters as broadcast_parameters
from .reductions import allreduce as allreduce
from .reductions import allreduce_ as allreduce_
from .reductions import grouped_allreduce as grouped_allreduce
from .reductions import grouped_allreduce_ as grouped_allreduce_
from .reductions import grouped_reducescatter as grouped_reducescatter
from .reductions import reducescatter as reducescatter
from .trainer import DistributedTrainer as DistributedTrainer

_export(globals(), "mpi_ops")
