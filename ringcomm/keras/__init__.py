"""Distributed training with Keras 3 on TensorFlow, PyTorch or JAX, with Horovod's interface.

::

    import ringcomm.keras as hvd

    hvd.init()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.001 * hvd.size()))
    model.compile(optimizer=optimizer, loss=..., metrics=[...])
    model.fit(..., callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])

Your program divides the data among the ranks. The rest of it is the same as for one process.
"""

import sys as _sys

from keras import __version__ as _version

if int(_version.partition(".")[0]) < 3:
    raise ImportError(
        "ringcomm.keras and ringcomm.tensorflow.keras need Keras 3, which comes with TensorFlow 2.16 and "
        f"later; this is Keras {_version}. Update it ({_sys.executable} -m pip install -U tensorflow), or "
        "train with a GradientTape and ringcomm.tensorflow, which works with TensorFlow 2.12 to 2.15 too."
    )

# isort: split
from .._adapter.basics import *  # noqa: F403
from .._adapter.graph_callbacks import load_residual_state_dict as load_residual_state_dict
from .._adapter.graph_callbacks import residual_state_dict as residual_state_dict
from ..docstrings import export as _export
from . import callbacks as callbacks
from . import elastic as elastic
from .balanced import BalancedDataset as BalancedDataset
from .collectives import *  # noqa: F403
from .optimizer import *  # noqa: F403

_export(globals(), "callbacks", "elastic")
