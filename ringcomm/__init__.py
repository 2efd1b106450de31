"""ringcomm: distributed data-parallel training over plain TCP, in pure Python.

::

    import ringcomm as rc

    rc.init()
    gradient = rc.allreduce(gradient)  # the average over all ranks

Start it on several machines with ``ringrun -np 3 -H localhost,jetson1,jetson2 train.py``.
"""

from .api import (
    allgather,
    allgather_,
    allgather_object,
    allreduce,
    allreduce_,
    alltoall,
    alltoall_,
    barrier,
    broadcast,
    broadcast_,
    broadcast_object,
    cross_rank,
    cross_size,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    rank,
    reducescatter,
    reducescatter_,
    run,
    shutdown,
    size,
)
from .config import Membership, Settings
from .context import Context
from .errors import (
    AuthenticationError,
    ConfigError,
    MismatchError,
    Misuse,
    NoRouteError,
    NotInitializedError,
    PeerLostError,
    PeerStalledError,
    Recoverable,
    RefusedError,
    RingcommError,
    StartTimeoutError,
    StartupError,
    UnsupportedDtypeError,
)
from .ops import Average, Max, Min, Product, ReduceOp, Sum
from .version import __version__

__all__ = [
    "AuthenticationError",
    "Average",
    "ConfigError",
    "Context",
    "Max",
    "Membership",
    "Min",
    "MismatchError",
    "Misuse",
    "NoRouteError",
    "NotInitializedError",
    "PeerLostError",
    "PeerStalledError",
    "Product",
    "Recoverable",
    "ReduceOp",
    "RefusedError",
    "RingcommError",
    "Settings",
    "StartTimeoutError",
    "StartupError",
    "Sum",
    "UnsupportedDtypeError",
    "__version__",
    "allgather",
    "allgather_",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "alltoall",
    "alltoall_",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_object",
    "cross_rank",
    "cross_size",
    "init",
    "is_homogeneous",
    "is_initialized",
    "local_rank",
    "local_size",
    "rank",
    "reducescatter",
    "reducescatter_",
    "run",
    "shutdown",
    "size",
]
