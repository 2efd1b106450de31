"""Process sets as programs see them: groups of ranks that do collectives among themselves."""

from __future__ import annotations

from typing import Any, List, Optional, Sequence, Tuple, Union

from . import api
from .context import Context
from .engine.process_sets import EVERYBODY, UnknownProcessSetError
from .errors import Misuse


class ProcessSet:
    """Some ranks of the job. Nothing happens until it is registered, see :func:`add_process_set`.

    Args:
        ranks: ranks of the job, in any order.
    """

    mpi_comm = None
    """There for Horovod's scripts; here there is no MPI."""

    def __init__(self, ranks: Sequence[int]) -> None:
        if isinstance(ranks, (str, bytes)) or not hasattr(ranks, "__iter__"):
            raise Misuse(f"ProcessSet needs a list of ranks, not {ranks!r}.")
        self._registered: Optional[Tuple[Context, int]] = None
        self._ranks = sorted(int(rank) for rank in ranks)

    @property
    def process_set_id(self) -> Optional[int]:
        """Its number, or None while it is not registered."""
        if self._registered is None or not api.is_initialized():
            return None
        # A number means nothing in the next job: there another set may have it.
        context, number = self._registered
        return number if context is api.context() else None

    @process_set_id.setter
    def process_set_id(self, number: Optional[int]) -> None:
        """For programs that name a set by its id; collectives refuse an id that no set has."""
        self._registered = None if number is None else (api.context(), number)

    def register(self) -> None:
        """Make it known to all ranks, every one of which must call this."""
        context = api.context()
        self._registered = (context, context.engine.add_process_set(self.ranks))

    def forget(self) -> None:
        """It is no longer registered."""
        self._registered = None

    @property
    def ranks(self) -> List[int]:
        """The ranks in ascending order."""
        return list(self._ranks)

    def size(self) -> int:
        """How many ranks it has.

        Raises:
            UnknownProcessSetError: it is not registered.
        """
        return len(self._members())

    def rank(self) -> int:
        """This process's number within the set.

        Raises:
            UnknownProcessSetError: this process does not belong to it, or it is not registered.
        """
        members = self._members()
        own = api.rank()
        if own not in members:
            raise UnknownProcessSetError(f"Rank {own} is not a member of {self}.")
        return members.index(own)

    def included(self) -> bool:
        """Whether this process belongs to it."""
        return api.rank() in self._members()

    def _members(self) -> List[int]:
        if self.process_set_id is None:
            raise UnknownProcessSetError(
                f"{self} has not been registered: pass it to init(process_sets=[...]) or add_process_set()."
            )
        return list(api.context().engine.sets.members(self.process_set_id))

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, ProcessSet) and (
            (self.process_set_id, self._ranks) == (other.process_set_id, other._ranks)
        )

    def __hash__(self) -> int:
        # The ranks never change, while the id does; TensorFlow traces functions by hashable arguments only.
        return hash(tuple(self._ranks))

    def __repr__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, mpi_comm=None)"


class _Everybody(ProcessSet):
    """All ranks, however many they are in the job of the moment."""

    def __init__(self) -> None:
        super().__init__([])

    @property
    def process_set_id(self) -> Optional[int]:
        """Always the same."""
        return EVERYBODY

    @process_set_id.setter
    def process_set_id(self, number: Optional[int]) -> None:
        """Refused.

        Raises:
            Misuse: always.
        """
        raise Misuse("global_process_set keeps its id, 0.")

    @property
    def ranks(self) -> List[int]:
        """All ranks; none before ``init()``."""
        return list(range(api.size())) if api.is_initialized() else []


global_process_set: ProcessSet = _Everybody()
"""The set of all ranks."""


def add_process_set(process_set: Union[ProcessSet, Sequence[int]]) -> ProcessSet:
    """Register a group of ranks. Every rank of the job must call it, members or not.

    Returns:
        the set, with its number.

    Raises:
        ConfigError: it makes no sense, or there is one with the same ranks already.
    """
    if not isinstance(process_set, ProcessSet):
        process_set = ProcessSet(process_set)
    process_set.register()
    return process_set


def remove_process_set(process_set: ProcessSet) -> bool:
    """Dissolve a group. Every rank of the job must call it.

    Returns:
        False if it was not registered, or is the set of all ranks.
    """
    number = process_set.process_set_id
    if number is None or not api.context().engine.remove_process_set(number):
        return False
    process_set.forget()
    return True


def number_of(process_set: Optional[ProcessSet]) -> int:
    """What the engine calls a set; None stands for all ranks.

    Raises:
        UnknownProcessSetError: it is not registered.
    """
    if process_set is None:
        return EVERYBODY
    if process_set.process_set_id is None:
        raise UnknownProcessSetError(
            f"{process_set} does not exist, or has not been registered: call add_process_set() first."
        )
    return process_set.process_set_id
