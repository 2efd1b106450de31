"""Members and views: the processes of a job, and the rank of each of them.

A :class:`ViewMember` is one process; its number identifies it for the whole job and is never given to another
process. A :class:`View` is the membership of one epoch. A rank is a position in a view, so a member's rank
may change with every view, and its number does not.
"""

from __future__ import annotations

from typing import NamedTuple, Sequence, Tuple


class ViewMember(NamedTuple):
    """One process of a job."""

    number: int
    host: str
    pid: int


class Peer(NamedTuple):
    """A rank of the job, as it is described to every other."""

    rank: int
    host: str
    host_index: int
    local_rank: int
    pid: int
    member: int = -1  # its number in an elastic job


class View(NamedTuple):
    """The members of one epoch."""

    epoch: int  # grows from view to view
    members: Tuple[ViewMember, ...]  # in rank order

    @property
    def size(self) -> int:
        """Return the number of ranks."""
        return len(self.members)

    @property
    def numbers(self) -> Tuple[int, ...]:
        """Return the members' numbers, in rank order."""
        return tuple(member.number for member in self.members)

    def joined(self, before: View) -> Tuple[ViewMember, ...]:
        """Return the members that an earlier view did not have."""
        return tuple(member for member in self.members if member.number not in before.numbers)

    def lost(self, before: View) -> Tuple[ViewMember, ...]:
        """Return the members of an earlier view that this one does not have."""
        return before.joined(self)


NO_VIEW = View(-1, ())
"""Before the first view is published."""


class Candidate(NamedTuple):
    """A process that is ready for the next view."""

    number: int
    rank: int  # in the last view; -1: it was in none
    position: int  # commits or steps that its state contains; see :func:`rank_order`
    place: Tuple[int, int]  # where its launcher has placed it: index of the host, and slot


def rank_order(candidates: Sequence[Candidate], most: int) -> Tuple[int, ...]:
    """Return the member numbers of the next view, in rank order, at most ``most``.

    Survivors come before new processes and keep their order, except that rank 0 is a survivor with the newest
    state: state is broadcast from rank 0. New processes beyond ``most`` are left out, the last to be started
    first.
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
