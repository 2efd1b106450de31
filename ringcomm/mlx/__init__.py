"""Distributed training with MLX, on trees of arrays, with Horovod's interface.

::

    import ringcomm.mlx as hvd

    hvd.init()
    hvd.broadcast_parameters(model)
    optimizer = hvd.DistributedOptimizer(optim.Adam(1e-3))
    ...
    loss, gradients = loss_and_gradients(model, images, labels)     # of mlx.nn.value_and_grad
    optimizer.update(model, gradients)                              # averages them over all ranks

Everything else in the training loop stays as it is. Call collectives outside of ``mx.compile``.
"""

from .._adapter.basics import *  # noqa: F403
from ..docstrings import export as _export
from .collectives import *  # noqa: F403

_export(globals())
