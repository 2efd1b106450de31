"""Process sets, the user's side: groups of ranks that run collectives among themselves."""

from __future__ import annotations

from typing import Any, List, Optional, Sequence, Tuple, Union

from .. import api
from ..engine.process_sets import GLOBAL_SET, UnknownProcessSetError
from ..errors import Misuse
from ..job.context import Context


class ProcessSet:
    """A group of the job's ranks that run collectives among themselves.

    Collectives can use it after it has been registered by :func:`add_process_set` (or by
    ``init(process_sets=[...])`` of the framework adapters).

    Example: ``evens = rc.add_process_set([0, 2, 4])``.

    Args:
        ranks: ranks of the job, in any order.

    Raises:
        Misuse: ``ranks`` is not a list of numbers.
    """

    mpi_comm = None
    """Always None. It exists for scripts that were written for Horovod; ringcomm does not use MPI."""

    def __init__(self, ranks: Sequence[int]) -> None:
        if isinstance(ranks, (str, bytes)) or not hasattr(ranks, "__iter__"):
            raise Misuse(f"ProcessSet needs a list of ranks, not {ranks!r}.")
        self._registered: Optional[Tuple[Context, int]] = None
        self._ranks = sorted(int(rank) for rank in ranks)

    @property
    def process_set_id(self) -> Optional[int]:
        """The set's number, or None while it is not registered."""
        if self._registered is None or not api.is_initialized():
            return None
        # A number is valid in one job only: in the next job another set may have it.
        context, number = self._registered
        return number if context is api.context() else None

    @process_set_id.setter
    def process_set_id(self, number: Optional[int]) -> None:
        """Select a registered set by its number; collectives raise if no set has it."""
        self._registered = None if number is None else (api.context(), number)

    def register(self) -> None:
        """Register the set. Every rank of the job must call this, also ranks outside of the set."""
        context = api.context()
        self._registered = (context, context.engine.add_process_set(self.ranks))

    @property
    def ranks(self) -> List[int]:
        """The ranks in ascending order."""
        return list(self._ranks)

    def size(self) -> Optional[int]:
        """The number of ranks in the set; None while it is not registered, as in Horovod."""
        return None if self.process_set_id is None else size_of(self)

    def rank(self) -> Optional[int]:
        """This process's rank within the set, from 0; None while the set is not registered, as in Horovod.

        Raises:
            UnknownProcessSetError: this process is not a member.
        """
        return None if self.process_set_id is None else rank_in(self)

    def included(self) -> Optional[bool]:
        """Return whether this process is a member; None while the set is not registered, as in Horovod."""
        return None if self.process_set_id is None else included_in(self)

    def _members(self) -> List[int]:
        """Return the ranks in ascending order; UnknownProcessSetError if the set is not registered."""
        number = number_of(self)
        return list(api.context().engine.sets.members(number))

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, ProcessSet) and (
            (self.process_set_id, self._ranks) == (other.process_set_id, other._ranks)
        )

    def __hash__(self) -> int:
        # The ranks never change, while the id does; TensorFlow traces functions by hashable arguments only.
        return hash(tuple(self._ranks))

    def __repr__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, mpi_comm=None)"


class _AllRanks(ProcessSet):
    """All ranks of the current job."""

    def __init__(self) -> None:
        super().__init__([])

    @property
    def process_set_id(self) -> Optional[int]:
        return GLOBAL_SET

    @process_set_id.setter
    def process_set_id(self, number: Optional[int]) -> None:
        """Raise Misuse: the set of all ranks keeps its number."""
        raise Misuse("global_process_set keeps its id, 0.")

    @property
    def ranks(self) -> List[int]:
        """Return all ranks; none before ``init()``."""
        return list(range(api.size())) if api.is_initialized() else []


global_process_set: ProcessSet = _AllRanks()
"""The set of all ranks."""


def add_process_set(process_set: Union[ProcessSet, Sequence[int]]) -> ProcessSet:
    """Register a group of ranks. Every rank of the job must call this, also ranks outside of the group.

    Its ranks pass it to collectives as ``process_set=``. These collectives are matched by name. Without a
    name, they are matched by their order in the set; see docs/collectives.md.

    Args:
        process_set: a :class:`ProcessSet`, or a list of ranks.

    Returns:
        the registered set.

    Raises:
        ConfigError: a rank is not in the job, or a set with the same ranks is already registered.
        MismatchError: ranks pass different sets.
        NotInitializedError: before ``init()``, or after ``shutdown()``.
    """
    if not isinstance(process_set, ProcessSet):
        process_set = ProcessSet(process_set)
    process_set.register()
    return process_set


def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a registered group. Every rank of the job must call this.

    First wait for the group's operations. An operation that some members have not submitted by then fails
    with :class:`~ringcomm.errors.MismatchError`.

    Args:
        process_set: the set.

    Returns:
        True; False if the set was not registered, or is the set of all ranks.

    Raises:
        MismatchError: ranks pass different sets.
        NotInitializedError: before ``init()``, or after ``shutdown()``.
    """
    number = process_set.process_set_id
    if number is None or not api.context().engine.remove_process_set(number):
        return False
    process_set.process_set_id = None
    return True


def size_of(process_set: ProcessSet) -> int:
    """Return the number of ranks in a set; UnknownProcessSetError if it is not registered."""
    return len(process_set._members())


def included_in(process_set: ProcessSet) -> bool:
    """Return whether this process is a member; UnknownProcessSetError if the set is not registered."""
    return api.rank() in process_set._members()


def rank_in(process_set: ProcessSet) -> int:
    """Return this process's rank within a set; UnknownProcessSetError if it is not a member."""
    members, own = process_set._members(), api.rank()
    if own not in members:
        raise UnknownProcessSetError(f"Rank {own} is not a member of {process_set}.")
    return members.index(own)


def number_of(process_set: Optional[ProcessSet]) -> int:
    """Return a set's number in the engine, None: all ranks; UnknownProcessSetError if not registered."""
    if process_set is None:
        return GLOBAL_SET
    try:
        number = process_set.process_set_id
    except AttributeError:
        raise Misuse(f"process_set={process_set!r:.80}: pass what add_process_set() has returned.") from None
    if number is None:
        raise UnknownProcessSetError(
            f"{process_set} has not been registered, or was removed: pass it to init(process_sets=[...]) or "
            "add_process_set() first."
        )
    return number
