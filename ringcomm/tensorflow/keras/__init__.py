"""``ringcomm.keras`` for ``tf.keras``, under Horovod's module name ``horovod.tensorflow.keras``."""

from ...calls.exports import export as _export
from ...keras import *  # noqa: F403
from . import callbacks as callbacks  # type: ignore[no-redef]
from . import elastic as elastic  # type: ignore[no-redef]
from .collectives import allgather as allgather
from .collectives import allreduce as allreduce  # type: ignore[assignment]
from .collectives import alltoall as alltoall
from .collectives import broadcast as broadcast
from .collectives import reducescatter as reducescatter  # type: ignore[assignment]
from .models import load_model as load_model

_export(globals(), "callbacks", "elastic")
