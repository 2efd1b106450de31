"""MXNet on any number of ranks, with Horovod's interface.

::

    import ringcomm.mxnet as hvd

    hvd.init()
    params = model.collect_params()
    hvd.broadcast_parameters(params, root_rank=0)
    trainer = hvd.DistributedTrainer(params, optimizer)

Everything else in the training loop stays as it is.
"""

from .._adapter.basics import *  # noqa: F403
from ..docstrings import export as _export
from .collectives import allgather as allgather
from .collectives import allreduce as allreduce
from .collectives import allreduce_ as allreduce_
from .collectives import alltoall as alltoall
from .collectives import broadcast as broadcast
from .collectives import broadcast_ as broadcast_
from .collectives import grouped_allgather as grouped_allgather
from .collectives import grouped_allreduce as grouped_allreduce
from .collectives import grouped_allreduce_ as grouped_allreduce_
from .collectives import grouped_reducescatter as grouped_reducescatter
from .collectives import reducescatter as reducescatter
from .parameters import broadcast_parameters as broadcast_parameters
from .training import DistributedOptimizer as DistributedOptimizer
from .training import DistributedTrainer as DistributedTrainer

_export(globals())
