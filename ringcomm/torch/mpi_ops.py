"""The collectives, under the name of Horovod's module ``mpi_ops``."""

from .._adapter.basics import *  # noqa: F403
from .._adapter.basics import HorovodBasics
from .collectives import *  # noqa: F403
from .handles import *  # noqa: F403

_basics = HorovodBasics()
