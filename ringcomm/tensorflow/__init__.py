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

from .._adapter.basics import *  # noqa: F403
from .._adapter.graph_callbacks import load_residual_state_dict as load_residual_state_dict
from .._adapter.graph_callbacks import residual_state_dict as residual_state_dict
from ..balance.batches import BalancedBatches as BalancedBatches
from ..calls.async_calls import join as join
from ..docstrings import export as _export
from . import elastic as elastic
from . import mpi_ops as mpi_ops
from .collectives import allgather as allgather
from .collectives import allreduce as allreduce
from .collectives import alltoall as alltoall
from .collectives import broadcast as broadcast
from .collectives import grouped_allgather as grouped_allgather
from .collectives import grouped_allreduce as grouped_allreduce
from .collectives import grouped_reducescatter as grouped_reducescatter
from .collectives import reducescatter as reducescatter
from .functions import BroadcastGlobalVariablesHook as BroadcastGlobalVariablesHook
from .functions import allgather_object as allgather_object  # type: ignore[assignment]
from .functions import broadcast_ as broadcast_
from .functions import broadcast_global_variables as broadcast_global_variables
from .functions import broadcast_object as broadcast_object  # type: ignore[assignment]
from .functions import broadcast_object_fn as broadcast_object_fn
from .functions import broadcast_variables as broadcast_variables
from .functions import local_rank_op as local_rank_op
from .functions import local_size_op as local_size_op
from .functions import process_set_included_op as process_set_included_op
from .functions import rank_op as rank_op
from .functions import size_op as size_op
from .training import BalancedDataset as BalancedDataset
from .training import DistributedGradientTape as DistributedGradientTape
from .training import DistributedOptimizer as DistributedOptimizer
from .training import PartialDistributedGradientTape as PartialDistributedGradientTape
from .training import SyncBatchNormalization as SyncBatchNormalization
from .util import _executing_eagerly as _executing_eagerly

_export(globals(), "elastic", "mpi_ops")
