"""Members and views: which processes a job consists of, and which rank each of them has.

A :class:`ViewMember` is one process; its number identifies it for the whole job and is never given to another
process. A :class:`View` is the membership of one epoch. A rank is a position in a view, so a member's rank
may change with every view, and its number does not.
"""

from __future__ import annotations

from typing import NamedTuple, Sequence, Tuple


class ViewMember(NamedTuple):
    """One process of a job.

    Attributes:
        number: identifies the process for as long as the job runs.
        host: the name of its host.
        pid: its process id there.
    """

    number: int
    host: str
    pid: int


class Peer(NamedTuple):
    """A rank of the job, as it is described to every other.

    Attributes:
        rank, host, host_index, local_rank, pid: its place in the job.
        member: its member number, if the job is elastic.
    """

    rank: int
    host: str
    host_index: int
    local_rank: int
    pid: int
    member: int = -1


class View(NamedTuple):
    """The members of one epoch.

    Attributes:
        epoch: number of the view; every view of a job has another, and later ones have larger numbers.
        members: in rank order.
    """

    epoch: int
    members: Tuple[ViewMember, ...]

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.members)

    @property
    def numbers(self) -> Tuple[int, ...]:
        """The members' numbers, in rank order."""
        return tuple(member.number for member in self.members)

    def joined(self, before: View) -> Tuple[ViewMember, ...]:
        """Return the members that the view before did not have.

        Args:
            before: an earlier view of the same job.
        """
        return tuple(member for member in self.members if member.number not in before.numbers)

    def lost(self, before: View) -> Tuple[ViewMember, ...]:
        """Return the members of the view before that this one does not have.

        Args:
            before: an earlier view of the same job.
        """
        return before.joined(self)


NO_VIEW = View(-1, ())
"""Before the first view is published."""


class Candidate(NamedTuple):
    """A process that is ready for the next view.

    Attributes:
        number: the process's member number.
        rank: its rank in the last view; -1: it was in none.
        position: how many commits or steps its state contains; see :func:`rank_order`.
        place: where its launcher has placed it: index of the host, and slot there.
    """

    number: int
    rank: int
    position: int
    place: Tuple[int, int]


def rank_order(candidates: Sequence[Candidate], most: int) -> Tuple[int, ...]:
    """Return the order of ranks in the next view.

    Survivors come before new processes and keep their order, except that rank 0 is a survivor with the
    newest state: state is broadcast from rank 0.

    Args:
        candidates: the processes that are ready.
        most: the largest size; new processes above it are left out, the last to be started first.

    Returns:
        member numbers, in rank order.
    """
    survivors = sorted((item for item in candidates if item.rank >= 0), key=lambda item: item.rank)
    room = max(0, most - len(survivors))
    new = sorted((item for item in candidates if item.rank < 0), key=lambda item: item.number)[:room]
    new.sort(key=lambda item: (item.place, item.number))
    if survivors:
        newest = max(survivors, key=lambda item: (item.position, -item.rank))
        survivors.remove(newest)
        survivors.insert(0, newest)
    return tuple(item.number for item in [*survivors, *new])
