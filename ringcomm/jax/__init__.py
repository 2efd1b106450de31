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

from .._adapter import common
from .._adapter.common import *  # noqa: F403
from .._adapter.compression import Compression, PowerSGD
from .._adapter.objects import allgather_object, broadcast_object
from . import cluster as cluster
from . import requirement as requirement
from .collectives import allgather, allreduce, alltoall, barrier, broadcast, join, pmean, psum, reducescatter
from .ending import typed_errors
from .gradients import grad, value_and_grad
from .local_sgd import LocalSGD
from .optimizer import AccumulationState, DistributedOptimizer, distributed
from .programs import jit
from .state import broadcast_parameters

__all__ = [
    *common.__all__,
    "AccumulationState",
    "Compression",
    "DistributedOptimizer",
    "LocalSGD",
    "PowerSGD",
    "allgather",
    "allgather_object",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_object",
    "broadcast_parameters",
    "distributed",
    "grad",
    "jit",
    "join",
    "pmean",
    "psum",
    "reducescatter",
    "typed_errors",
    "value_and_grad",
]
