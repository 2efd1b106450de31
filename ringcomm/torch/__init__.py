"""PyTorch on any number of ranks, with Horovod's interface.

::

    import ringcomm.torch as hvd

    hvd.init()
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

Everything else in the training loop stays as it is.
"""

from .._adapter.basics import *  # noqa: F403
from ..balance.batches import BalancedBatches as BalancedBatches
from ..docstrings import export as _export
from . import elastic as elastic
from . import mpi_ops as mpi_ops
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
from .collectives import join as join
from .collectives import reducescatter as reducescatter
from .handles import allgather_async as allgather_async
from .handles import allreduce_async as allreduce_async
from .handles import allreduce_async_ as allreduce_async_
from .handles import alltoall_async as alltoall_async
from .handles import broadcast_async as broadcast_async
from .handles import broadcast_async_ as broadcast_async_
from .handles import grouped_allgather_async as grouped_allgather_async
from .handles import grouped_allreduce_async as grouped_allreduce_async
from .handles import grouped_allreduce_async_ as grouped_allreduce_async_
from .handles import grouped_reducescatter_async as grouped_reducescatter_async
from .handles import poll as poll
from .handles import reducescatter_async as reducescatter_async
from .handles import sparse_allreduce_async as sparse_allreduce_async
from .handles import synchronize as synchronize
from .local_sgd import LocalSGD as LocalSGD
from .optimizer import DistributedOptimizer as DistributedOptimizer
from .state import broadcast_optimizer_state as broadcast_optimizer_state
from .state import broadcast_parameters as broadcast_parameters
from .sync_batch_norm import SyncBatchNorm as SyncBatchNorm

_export(globals(), "elastic", "mpi_ops")
