"""``ringcomm.keras`` for ``tf.keras``, under Horovod's module name ``horovod.tensorflow.keras``."""

from ...keras import *  # noqa: F403
from ...keras import __all__ as __all__
from . import callbacks as callbacks  # type: ignore[no-redef]
from . import elastic as elastic  # type: ignore[no-redef]
from .collectives import allgather as allgather
from .collectives import allreduce as allreduce
from .collectives import alltoall as alltoall
from .collectives import broadcast as broadcast
from .collectives import reducescatter as reducescatter
from .models import load_model as load_model
