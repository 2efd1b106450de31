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
from .local_sgd import LocalSGD as LocalSGD
from .mpi_ops import *  # noqa: F403
from .optimizer import DistributedOptimizer as DistributedOptimizer
from .state import broadcast_optimizer_state as broadcast_optimizer_state
from .state import broadcast_parameters as broadcast_parameters
from .sync_batch_norm import SyncBatchNorm as SyncBatchNorm

_export(globals(), "elastic", "mpi_ops")
