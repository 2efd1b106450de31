"""Distributed training with JAX on pytrees, inside and outside of ``jax.jit``, with Horovod's interface.

::

    import ringcomm.jax as hvd

    hvd.init()
    tx = hvd.DistributedOptimizer(optax.adam(1e-3))
    params = hvd.broadcast_parameters(params)
    ...
    loss, gradients = jax.value_and_grad(loss_of)(params, batch)     # in jax.jit
    updates, opt_state = tx.update(gradients, opt_state, params)

Every rank runs its own JAX on its own device; ringcomm connects them, so ``jax.distributed`` is not needed.
Collectives in compiled programs run in the order of the program, which must be the same on all ranks.
"""

from .._adapter.common import *  # noqa: F403
from ..calls.exports import export as _export
from . import cluster as cluster
from . import requirement as requirement
from .collectives import allgather as allgather
from .collectives import allreduce as allreduce
from .collectives import alltoall as alltoall
from .collectives import barrier as barrier
from .collectives import broadcast as broadcast
from .collectives import pmean as pmean
from .collectives import psum as psum
from .collectives import reducescatter as reducescatter
from .ending import typed_errors as typed_errors
from .gradients import grad as grad
from .gradients import value_and_grad as value_and_grad
from .optimizer import AccumulationState as AccumulationState
from .optimizer import DistributedOptimizer as DistributedOptimizer
from .optimizer import distributed as distributed
from .programs import jit as jit
from .state import broadcast_parameters as broadcast_parameters

_export(globals())
