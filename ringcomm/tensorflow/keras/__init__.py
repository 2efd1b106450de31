"""``ringcomm.keras`` for ``tf.keras``, under Horovod's module name ``horovod.tensorflow.keras``."""

from ...docstrings import export as _export
from ...keras import *  # noqa: F403
from . import callbacks as callbacks  # type: ignore[no-redef]
from . import elastic as elastic  # type: ignore[no-redef]
from .own import allgather as allgather
from .own import allreduce as allreduce
from .own import alltoall as alltoall
from .own import broadcast as broadcast
from .own import load_model as load_model
from .own import reducescatter as reducescatter

_export(globals(), "callbacks", "elastic")
