"""Joining a job as Horovod's scripts do it, and their questions about what was built in."""

from __future__ import annotations

from typing import Any, List, Sequence, Union

from .. import api
from ..errors import ConfigError
from ..process_set import ProcessSet, add_process_set


def init(comm: Any = None, process_sets: Union[str, Sequence[Any], None] = None) -> None:
    """Join the job. A second call does nothing but register process sets that are new.

    Args:
        comm: None. (Horovod takes an MPI communicator or the ranks of a part of the job here; of a
            list of ranks only that of all ranks can be taken.)
        process_sets: groups of ranks to register, as :class:`ProcessSet` or lists of ranks. Groups may
            be added later too; ``"dynamic"``, by which Horovod is told so, changes nothing.

    Raises:
        ConfigError: a group is listed twice, or ``comm`` is something else.
        StartupError: the job could not be put together.
    """
    wanted = _listed(process_sets)
    api.init()
    if comm is not None and list(_ranks_of(comm)) not in ([], list(range(api.size()))):
        raise ConfigError(
            f"init(comm={comm!r}): the job is what ringrun has started, all of it. Use process_sets=[...] "
            "for collectives among some of the ranks."
        )
    for item in wanted:
        if item.process_set_id is None:
            add_process_set(item)


def _listed(process_sets: Union[str, Sequence[Any], None]) -> List[ProcessSet]:
    if process_sets is None or process_sets == "dynamic":
        return []
    if isinstance(process_sets, (str, ProcessSet)):
        raise ConfigError(f"process_sets={process_sets!r}: a list of ProcessSet is needed.")
    given: Sequence[Any] = process_sets
    wanted = [item if isinstance(item, ProcessSet) else ProcessSet(item) for item in given]
    for number, item in enumerate(wanted, start=1):
        if any(item.ranks == other.ranks for other in wanted[: number - 1]):
            raise ConfigError(f"process_sets: entry number {number} is a duplicate: {item}.")
    return wanted


def _ranks_of(comm: Any) -> Sequence[int]:
    if not isinstance(comm, (list, tuple, range)):
        raise ConfigError(f"init(comm={comm!r}): there are no MPI communicators here.")
    return comm


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Write from now on what every rank does; see :func:`ringcomm.start_timeline`.

    Args:
        file_path: written on rank 0's host.
        mark_cycles: also mark when the engine takes up work.
    """
    api.start_timeline(file_path, mark_cycles)


def gloo_built() -> bool:
    """True: scripts ask this to learn that nothing but the network is needed."""
    return True


def gloo_enabled() -> bool:
    """True, like :func:`gloo_built`."""
    return True


def mpi_built() -> bool:
    """False: there is no MPI here."""
    return False


def mpi_enabled() -> bool:
    """False: there is no MPI here."""
    return False


def mpi_threads_supported() -> bool:
    """False: there is no MPI here. (Collectives may be submitted from any thread nevertheless.)"""
    return False


def nccl_built() -> int:
    """0: there is no NCCL here."""
    return 0


def ddl_built() -> bool:
    """False: there is no DDL here."""
    return False


def ccl_built() -> bool:
    """False: there is no oneCCL here."""
    return False


def cuda_built() -> bool:
    """False: nothing here is compiled. (Tensors on GPUs can be used; they travel through host memory.)"""
    return False


def rocm_built() -> bool:
    """False: nothing here is compiled."""
    return False
