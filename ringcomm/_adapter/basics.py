"""What every adapter exports: names of ringcomm, and Horovod's functions about a job and its libraries."""

from __future__ import annotations

from typing import Any, Dict, List, Optional, Sequence, Union

from .. import api
from ..api import (
    cross_rank,
    cross_size,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    rank,
    shutdown,
    size,
    stop_timeline,
)  # fmt: skip
from ..calls.async_calls import wire_name
from ..calls.process_set import (
    ProcessSet,
    add_process_set,
    global_process_set,
    number_of,
    remove_process_set,
)  # fmt: skip
from ..docstrings import documented
from ..errors import ConfigError, HorovodInternalError, HostsUpdatedInterrupt
from ..ops import Adasum, Average, Max, Min, Product, Sum
from .compression import Compression
from .submit import allgather_object, broadcast_object

__all__ = [
    "Adasum", "Average", "Compression", "HorovodInternalError", "HostsUpdatedInterrupt", "Max", "Min",
    "ProcessSet", "Product", "Sum", "add_process_set", "allgather_object", "barrier", "broadcast_object",
    "ccl_built", "cross_rank", "cross_size", "cuda_built", "ddl_built", "global_process_set", "gloo_built",
    "gloo_enabled", "init", "is_homogeneous", "is_initialized", "local_rank", "local_size", "mpi_built",
    "mpi_enabled", "mpi_threads_supported", "nccl_built", "rank", "remove_process_set", "rocm_built",
    "shutdown", "size", "start_timeline", "stop_timeline",
]  # fmt: skip


def init(comm: Any = None, process_sets: Union[str, Sequence[Any], None] = None) -> None:
    """Connect to all ranks of the job. A second call only registers process sets that are new.

    Args:
        comm: None, or the list of all ranks. (Horovod also accepts an MPI communicator or some of the ranks;
            ringcomm does not.)
        process_sets: groups of ranks to register, as :class:`ProcessSet` or lists of ranks. You can also add
            groups later. Horovod requires ``"dynamic"`` for that; here it has no effect.

    Raises:
        ConfigError: a group is listed twice, or ``comm`` is something else.
        StartupError: the ranks could not connect.
    """
    requested = _listed(process_sets)
    api.init()
    if comm is not None and not isinstance(comm, (list, tuple, range)):
        raise ConfigError(f"init(comm={comm!r}): ringcomm has no MPI communicators.")
    if comm is not None and list(comm) not in ([], list(range(api.size()))):
        raise ConfigError(
            f"init(comm={comm!r}): a job has all ranks that ringrun has started. Use process_sets=[...] "
            "for collectives among some of the ranks."
        )
    _register(requested)
    if requested and api.is_elastic():
        # New processes register these sets in init(), so the others must register them too.
        api.after_restart(lambda: _register(requested))


@documented
def barrier(process_set: ProcessSet = global_process_set, name: Optional[str] = None) -> None:
    """Wait until every rank of the set has called this. It does not work in compiled functions and graphs.

    Args:
        {process_set}
        {name}

    Raises:
        {set_errors}
    """
    api.context().engine.barrier(wire_name("barrier", name), number_of(process_set)).wait()


def _register(requested: Sequence[ProcessSet]) -> None:
    """Register new sets; in an elastic job those whose ranks exist, perhaps as those of another set."""
    for item in requested:
        if item.process_set_id is not None or (api.is_elastic() and max(item.ranks, default=0) >= api.size()):
            continue
        same = api.context().engine.sets.find(item.ranks) if api.is_elastic() else None
        if same is None:
            add_process_set(item)
        else:
            item.process_set_id = same


def _listed(process_sets: Union[str, Sequence[Any], None]) -> List[ProcessSet]:
    if process_sets is None or process_sets == "dynamic":
        return []
    if isinstance(process_sets, (str, ProcessSet)):
        raise ConfigError(f"process_sets={process_sets!r}: must be a list of ProcessSet.")
    given: Sequence[Any] = process_sets
    requested = [item if isinstance(item, ProcessSet) else ProcessSet(item) for item in given]
    for number, item in enumerate(requested, start=1):
        if any(item.ranks == other.ranks for other in requested[: number - 1]):
            raise ConfigError(f"process_sets: entry number {number} is a duplicate: {item}.")
    return requested


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Start recording the operations of all ranks in a timeline file (Chrome trace format).

    Args:
        file_path: path of the file, on rank 0's host.
        mark_cycles: accepted without effect.
    """
    api.start_timeline(file_path)


def gloo_built() -> bool:
    """Return True: like Gloo, ringcomm needs only the network."""
    return True


def gloo_enabled() -> bool:
    """Return True: collectives run over the network without MPI."""
    return True


def mpi_built() -> bool:
    """Return False: ringcomm has no MPI."""
    return False


def mpi_enabled() -> bool:
    """Return False: ringcomm has no MPI."""
    return False


def mpi_threads_supported() -> bool:
    """Return False: ringcomm has no MPI. (Collectives can be submitted from any thread.)"""
    return False


def nccl_built() -> int:
    """Return 0, as the version of NCCL: ringcomm has no NCCL."""
    return 0


def ddl_built() -> bool:
    """Return False: ringcomm has no DDL."""
    return False


def ccl_built() -> bool:
    """Return False: ringcomm has no oneCCL."""
    return False


def cuda_built() -> bool:
    """Return False: ringcomm is pure Python. (Tensors on GPUs are copied through host memory.)"""
    return False


def rocm_built() -> bool:
    """Return False: ringcomm is pure Python."""
    return False


class HorovodBasics:
    """The functions that every adapter exports (``rank()``, ...): Horovod's modules have such an object."""

    def __init__(self, pkg_path: str = "", *args: Any) -> None:
        """Accept and ignore Horovod's arguments."""

    def __getattr__(self, name: str) -> Any:
        if name in __all__:
            return globals()[name]
        raise AttributeError(f"HorovodBasics has no {name!r} with ringcomm")

    def _get_process_set_ids_and_ranks(self) -> Dict[int, List[int]]:
        """Return the ranks of every registered process set, by its id."""
        sets = api.context().engine.sets
        return {number: list(sets.members(number)) for number in sets.numbers()}
