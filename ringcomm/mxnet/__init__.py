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
from .collectives import *  # noqa: F403
from .training import *  # noqa: F403

_export(globals())
