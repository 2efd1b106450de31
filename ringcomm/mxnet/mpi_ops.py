"""The collectives, under the name of Horovod's module ``mpi_ops``."""

from .._adapter.basics import HorovodBasics
from .._adapter.common import *  # noqa: F403
from .movement import *  # noqa: F403
from .reductions import *  # noqa: F403

_basics = HorovodBasics()
