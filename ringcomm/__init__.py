"""ringcomm: distributed data-parallel training over plain TCP, in pure Python.

::

    import ringcomm as rc

    rc.init()
    gradient = rc.allreduce(gradient)  # the average over all ranks

Start it on several machines with ``ringrun -np 3 -H localhost,jetson1,jetson2 train.py``.
"""

import difflib as _difflib
import importlib as _importlib
import typing as _typing

from .api import (
    allgather_object,
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
    shutdown,
    size,
    start_timeline,
    stats,
    stop_timeline,
)
from .calls.async_calls import (
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
from .calls.direct import (
    allgather,
    allgather_,
    allreduce,
    allreduce_,
    alltoall,
    alltoall_,
    barrier,
    broadcast,
    broadcast_,
    reducescatter,
    reducescatter_,
)
from .calls.process_set import ProcessSet, add_process_set, global_process_set, remove_process_set
from .config import Membership, Settings
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
from .job.context import Context
from .ops import Adasum, Average, Max, Min, Product, ReduceOp, Sum
from .version import __version__

if _typing.TYPE_CHECKING:
    from ._adapter.local_sgd import LocalSGD
    from .balance.advise import Advice, advise
    from .balance.batches import balanced
    from .calls.consistency import check_same
    from .calls.grouped_calls import (
        grouped_allgather,
        grouped_allgather_async,
        grouped_allreduce,
        grouped_allreduce_,
        grouped_allreduce_async,
        grouped_allreduce_async_,
        grouped_reducescatter,
        grouped_reducescatter_async,
    )
    from .calls.messages import recv, recv_async, send, send_async
    from .scaling.prediction import Prediction, predict
    from .transport.arena import empty

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
    "empty",
    "epoch",
    "global_process_set",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
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
    "recv_async",
    "reducescatter",
    "reducescatter_",
    "reducescatter_async",
    "remove_process_set",
    "run",
    "send",
    "send_async",
    "shutdown",
    "size",
    "start_timeline",
    "stats",
    "stop_timeline",
    "synchronize",
]


_LATER = {
    "Advice": "balance.advise",
    "advise": "balance.advise",
    "balanced": "balance.batches",
    "check_same": "calls.consistency",
    "empty": "transport.arena",
    "grouped_allgather": "calls.grouped_calls",
    "grouped_allgather_async": "calls.grouped_calls",
    "grouped_allreduce": "calls.grouped_calls",
    "grouped_allreduce_": "calls.grouped_calls",
    "grouped_allreduce_async": "calls.grouped_calls",
    "grouped_allreduce_async_": "calls.grouped_calls",
    "grouped_reducescatter": "calls.grouped_calls",
    "grouped_reducescatter_async": "calls.grouped_calls",
    "LocalSGD": "_adapter.local_sgd",
    "predict": "scaling.prediction",
    "Prediction": "scaling.prediction",
    "recv": "calls.messages",
    "recv_async": "calls.messages",
    "send": "calls.messages",
    "send_async": "calls.messages",
}
"""Names that few programs use, by the module that defines each: it is imported with the first use."""

run: _typing.Callable[..., _typing.List[_typing.Any]]


def __getattr__(name: str) -> _typing.Any:
    if name == "elastic":
        return _importlib.import_module("ringcomm.elastic")
    if name in _LATER:
        found = globals()[name] = getattr(_importlib.import_module(f"ringcomm.{_LATER[name]}"), name)
        return found
    if name == "run":  # of the launcher, which is imported when it is used
        return _importlib.import_module("ringrun.function").run
    close = _difflib.get_close_matches(name, __all__, 1, 0.75)
    meant = _OTHER_NAMES.get(name) or (f"rc.{close[0]}" if close and not name.startswith("_") else "")
    hint = f": {meant} does this" if name in _OTHER_NAMES else f". Did you mean {meant}?" if meant else ""
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")


def __dir__() -> _typing.List[str]:
    return sorted([*__all__, "elastic"])


_OTHER_NAMES = {
    # of torch.distributed, mpi4py and Horovod's other adapters
    "all_gather": "rc.allgather(array)",
    "all_gather_object": "rc.allgather_object(value)",
    "all_reduce": "rc.allreduce(array, op=rc.Sum), of which the default is rc.Average,",
    "all_to_all": "rc.alltoall(array)",
    "bcast": "rc.broadcast(array, root_rank)",
    "broadcast_object_list": "rc.broadcast_object(value, root_rank)",
    "destroy_process_group": "rc.shutdown()",
    "gather": "rc.allgather(array), on all ranks,",
    "get_rank": "rc.rank()",
    "get_world_size": "rc.size()",
    "init_process_group": "rc.init()",
    "irecv": "rc.recv_async(array, source)",
    "is_available": "rc.is_initialized()",
    "isend": "rc.send_async(array, dest)",
    "new_group": "rc.add_process_set([ranks])",
    "reduce": "rc.allreduce(array, op=rc.Sum), on all ranks,",
    "reduce_scatter": "rc.reducescatter(array)",
    "scatter": "rc.broadcast(array, root_rank), of which each rank takes its part,",
    "wait": "rc.synchronize(handle)",
    "world_size": "rc.size()",
}
