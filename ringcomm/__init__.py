"""ringcomm: distributed data-parallel training over plain TCP, in pure Python.

::

    import ringcomm as rc

    rc.init()
    gradient = rc.allreduce(gradient)  # the average over all ranks

Start it on several machines with ``ringrun -np 3 -H localhost,jetson1,jetson2 train.py``.
"""

import importlib as _importlib
import typing as _typing

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
    count_step,
    cross_rank,
    cross_size,
    epoch,
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
    start_timeline,
    stats,
    stop_timeline,
)
from .async_calls import (
    allgather_async,
    allreduce_async,
    allreduce_async_,
    alltoall_async,
    broadcast_async,
    broadcast_async_,
    join,
    pause,
    poll,
    reducescatter_async,
    synchronize,
)
from .balance.advise import Advice, advise
from .balance.batches import balanced
from .config import Membership, Settings
from .consistency import check_same
from .context import Context
from .engine.process_sets import UnknownProcessSetError
from .engine.request import Handle
from .errors import (
    AuthenticationError,
    ConfigError,
    DesyncError,
    DeviceError,
    DuplicateNameError,
    ExcludedError,
    HorovodInternalError,
    HostsUpdatedInterrupt,
    LinkLostError,
    MismatchError,
    Misuse,
    NoRouteError,
    NotInitializedError,
    NotOfferedError,
    PeerLostError,
    PeerStalledError,
    Recoverable,
    RefusedError,
    RemoteError,
    RingcommError,
    ShapeError,
    StartTimeoutError,
    StartupError,
    UnsupportedDtypeError,
)
from .grouped_calls import (
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
)
from .local_sgd import LocalSGD
from .messages import recv, send
from .ops import Adasum, Average, Max, Min, Product, ReduceOp, Sum
from .process_set import ProcessSet, add_process_set, global_process_set, remove_process_set
from .scaling.prediction import Prediction, predict
from .version import __version__

__all__ = [
    "Adasum",
    "Advice",
    "AuthenticationError",
    "Average",
    "ConfigError",
    "Context",
    "DesyncError",
    "DeviceError",
    "DuplicateNameError",
    "ExcludedError",
    "Handle",
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "LinkLostError",
    "LocalSGD",
    "Max",
    "Membership",
    "Min",
    "MismatchError",
    "Misuse",
    "NoRouteError",
    "NotInitializedError",
    "NotOfferedError",
    "PeerLostError",
    "PeerStalledError",
    "Prediction",
    "ProcessSet",
    "Product",
    "Recoverable",
    "ReduceOp",
    "RefusedError",
    "RemoteError",
    "RingcommError",
    "Settings",
    "ShapeError",
    "StartTimeoutError",
    "StartupError",
    "Sum",
    "UnknownProcessSetError",
    "UnsupportedDtypeError",
    "__version__",
    "add_process_set",
    "advise",
    "allgather",
    "allgather_",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_",
    "alltoall_async",
    "balanced",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "check_same",
    "count_step",
    "cross_rank",
    "cross_size",
    "epoch",
    "global_process_set",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "pause",
    "poll",
    "predict",
    "rank",
    "recv",
    "reducescatter",
    "reducescatter_",
    "reducescatter_async",
    "remove_process_set",
    "run",
    "send",
    "shutdown",
    "size",
    "start_timeline",
    "stats",
    "stop_timeline",
    "synchronize",
]


def __getattr__(name: str) -> _typing.Any:
    # Built on the functions above, so it cannot be imported with them.
    if name == "elastic":
        return _importlib.import_module("ringcomm.elastic")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
