"""ringcomm: distributed data-parallel training over plain TCP, in pure Python.

::

    import ringcomm as rc

    rc.init()
    gradient = rc.allreduce(gradient)  # the average over all ranks

Start such a program on three machines with ``ringrun -np 3 -H localhost,jetson1,jetson2 train.py``.
"""

import importlib as _importlib
import typing as _typing

from .api import allgather_object as allgather_object
from .api import broadcast_object as broadcast_object
from .api import count_step as count_step
from .api import cross_rank as cross_rank
from .api import cross_size as cross_size
from .api import epoch as epoch
from .api import init as init
from .api import is_homogeneous as is_homogeneous
from .api import is_initialized as is_initialized
from .api import local_rank as local_rank
from .api import local_size as local_size
from .api import rank as rank
from .api import shutdown as shutdown
from .api import size as size
from .api import start_timeline as start_timeline
from .api import stats as stats
from .api import stop_timeline as stop_timeline
from .calls.async_calls import allgather_async as allgather_async
from .calls.async_calls import allreduce_async as allreduce_async
from .calls.async_calls import allreduce_async_ as allreduce_async_
from .calls.async_calls import alltoall_async as alltoall_async
from .calls.async_calls import broadcast_async as broadcast_async
from .calls.async_calls import broadcast_async_ as broadcast_async_
from .calls.async_calls import grouped_allgather as grouped_allgather
from .calls.async_calls import grouped_allgather_async as grouped_allgather_async
from .calls.async_calls import grouped_allreduce as grouped_allreduce
from .calls.async_calls import grouped_allreduce_ as grouped_allreduce_
from .calls.async_calls import grouped_allreduce_async as grouped_allreduce_async
from .calls.async_calls import grouped_allreduce_async_ as grouped_allreduce_async_
from .calls.async_calls import grouped_reducescatter as grouped_reducescatter
from .calls.async_calls import grouped_reducescatter_async as grouped_reducescatter_async
from .calls.async_calls import join as join
from .calls.async_calls import pause as pause
from .calls.async_calls import poll as poll
from .calls.async_calls import recv as recv
from .calls.async_calls import recv_async as recv_async
from .calls.async_calls import reducescatter_async as reducescatter_async
from .calls.async_calls import send as send
from .calls.async_calls import send_async as send_async
from .calls.async_calls import synchronize as synchronize
from .calls.direct import allgather as allgather
from .calls.direct import allgather_ as allgather_
from .calls.direct import allreduce as allreduce
from .calls.direct import allreduce_ as allreduce_
from .calls.direct import alltoall as alltoall
from .calls.direct import alltoall_ as alltoall_
from .calls.direct import barrier as barrier
from .calls.direct import broadcast as broadcast
from .calls.direct import broadcast_ as broadcast_
from .calls.direct import check_same as check_same
from .calls.direct import reducescatter as reducescatter
from .calls.direct import reducescatter_ as reducescatter_
from .calls.process_set import ProcessSet as ProcessSet
from .calls.process_set import add_process_set as add_process_set
from .calls.process_set import global_process_set as global_process_set
from .calls.process_set import remove_process_set as remove_process_set
from .config import Membership as Membership
from .config import Settings as Settings
from .docstrings import export as _export
from .engine.process_sets import UnknownProcessSetError as UnknownProcessSetError
from .engine.request import Handle as Handle
from .errors import AuthenticationError as AuthenticationError
from .errors import ConfigError as ConfigError
from .errors import DesyncError as DesyncError
from .errors import DeviceError as DeviceError
from .errors import DuplicateNameError as DuplicateNameError
from .errors import ExcludedError as ExcludedError
from .errors import HorovodInternalError as HorovodInternalError
from .errors import HostsUpdatedInterrupt as HostsUpdatedInterrupt
from .errors import LinkLostError as LinkLostError
from .errors import MismatchError as MismatchError
from .errors import Misuse as Misuse
from .errors import NoRouteError as NoRouteError
from .errors import NotInitializedError as NotInitializedError
from .errors import NotOfferedError as NotOfferedError
from .errors import PeerLostError as PeerLostError
from .errors import PeerStalledError as PeerStalledError
from .errors import Recoverable as Recoverable
from .errors import RefusedError as RefusedError
from .errors import RemoteError as RemoteError
from .errors import RingcommError as RingcommError
from .errors import ShapeError as ShapeError
from .errors import StartTimeoutError as StartTimeoutError
from .errors import StartupError as StartupError
from .errors import UnsupportedDtypeError as UnsupportedDtypeError
from .job.context import Context as Context
from .ops import Adasum as Adasum
from .ops import Average as Average
from .ops import Max as Max
from .ops import Min as Min
from .ops import Product as Product
from .ops import ReduceOp as ReduceOp
from .ops import Sum as Sum
from .version import __version__ as __version__

if _typing.TYPE_CHECKING:
    from ._adapter.local_sgd import LocalSGD as LocalSGD
    from .balance.advise import Advice as Advice
    from .balance.advise import advise as advise
    from .balance.batches import balanced as balanced
    from .transport.arena import empty as empty


# Names that few programs use, by the module that defines each: the first use imports it.
_LATER = {
    "Advice": "balance.advise",
    "advise": "balance.advise",
    "balanced": "balance.batches",
    "empty": "transport.arena",
    "LocalSGD": "_adapter.local_sgd",
}

_NAMES = _export(globals(), *_LATER, "run", "__version__")

run: _typing.Callable[..., _typing.List[_typing.Any]]


def __getattr__(name: str) -> _typing.Any:
    if name == "elastic":
        return _importlib.import_module("ringcomm.elastic")
    if name in _LATER:
        found = globals()[name] = getattr(_importlib.import_module(f"ringcomm.{_LATER[name]}"), name)
        return found
    if name == "run":  # of the launcher, which is imported when it is used
        return _importlib.import_module("ringrun.function").run
    nearest = _importlib.import_module("ringcomm.configuration.settings").nearest
    close = "" if name.startswith("_") else nearest(name, _NAMES, 0.75)
    hint = f". Did you mean rc.{close}?" if close else ""
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")


def __dir__() -> _typing.List[str]:
    return sorted([*_NAMES, "elastic"])
