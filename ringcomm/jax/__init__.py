"""Distributed training with JAX on pytrees, inside and outside of ``jax.jit``, with Horovod's interface.

::

    import ringcomm.jax as hvd

    hvd.init()
    tx = hvd.DistributedOptimizer(optax.adam(1e-3))
    params = hvd.broadcast_parameters(params)
    ...
    loss, gradients = jax.value_and_grad(loss_of)(params, batch)     # in jax.jit
    updates, opt_state = tx.update(gradients, opt_state, params)

Every rank runs its own JAX on its own device, and ringcomm connects the ranks. ``jax.distributed`` is not
needed. Collectives in compiled programs run in the order of the program, which must be the same on all ranks.
"""

import re as _re

from jax import __version__ as _version

if [int(part) for part in _re.findall(r"\d+", _version)[:3]] < [0, 6, 1]:
    raise ImportError(
        f"ringcomm.jax requires JAX 0.6.1 or newer (on Python 3.10 or newer), and this is JAX {_version}."
    )

# isort: split
from .._adapter.basics import *  # noqa: F403
from ..docstrings import export as _export
from .collectives import *  # noqa: F403
from .programs import jit as jit
from .programs import typed_errors as typed_errors
from .training import *  # noqa: F403

_export(globals())
