"""Groups of ranks that do collectives among themselves."""

from __future__ import annotations

from numbers import Integral
from typing import Any, Dict, List, Optional, Sequence, Tuple

from ..errors import ConfigError, Misuse

GLOBAL_SET = 0  # number of the set of all ranks


class UnknownProcessSetError(Misuse, ValueError):
    """A process set does not exist (any more), or this rank does not belong to it."""


class ProcessSets:
    """The sets of one job. Changed by the engine only, in the same order on every rank."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank = rank
        self._size = size
        self._sets: Dict[int, Tuple[int, ...]] = {GLOBAL_SET: tuple(range(size))}

    def members(self, number: int) -> Tuple[int, ...]:
        """Return the ranks of a set, in ascending order; UnknownProcessSetError if there is none."""
        if number < 0:  # a pair's
            low, high = divmod(-1 - number, self._size)
            if not low < high:
                raise UnknownProcessSetError(f"Process set {number} does not exist.")
            return low, high
        try:
            return self._sets[number]
        except KeyError:
            raise UnknownProcessSetError(
                f"Process set {number} does not exist, has not been registered, or was removed: call "
                "add_process_set() on every rank first."
            ) from None

    def pair(self, peer: Any, within: int = GLOBAL_SET) -> int:
        """Return the number of the set of this rank and one other: negative, it says the members."""
        number = int(peer) if isinstance(peer, Integral) else -1
        members = self.check_member(within)
        if number not in members or number == self._rank:
            others = f"the other ranks from 0 to {self._size - 1}" if self._size > 1 else "no other rank"
            if within != GLOBAL_SET:
                others = f"the other ranks {', '.join(map(str, members))} of process set {within}"
            raise ConfigError(
                f"Rank {self._rank} can exchange messages with {others}, not with rank {peer!r}."
            )
        return -1 - (min(self._rank, number) * self._size + max(self._rank, number))

    def check_member(self, number: int) -> Tuple[int, ...]:
        """Return the ranks of a set, to which this rank must belong."""
        members = self.members(number)
        if self._rank not in members:
            raise UnknownProcessSetError(
                f"Rank {self._rank} is not a member of process set {number}, which has ranks "
                f"{', '.join(map(str, members))}."
            )
        return members

    def find(self, ranks: Sequence[int]) -> Optional[int]:
        wanted = tuple(sorted(ranks))
        return next((number for number, members in self._sets.items() if members == wanted), None)

    def numbers(self) -> List[int]:
        return sorted(self._sets)

    def check_new(self, ranks: Sequence[int]) -> Tuple[int, ...]:
        """Return the ranks of a set that may be added, sorted; ConfigError if it may not."""
        wanted = tuple(sorted(ranks))
        if not wanted or len(set(wanted)) != len(wanted) or not 0 <= wanted[0] <= wanted[-1] < self._size:
            raise ConfigError(
                f"A process set needs different ranks from 0 to {self._size - 1}, not {list(ranks)}."
            )
        found = self.find(wanted)
        if found is not None:
            instead = "use global_process_set" if found == GLOBAL_SET else "use the one that there is"
            raise ConfigError(
                f"Process set {found} has the ranks {', '.join(map(str, wanted))} already: {instead}."
            )
        return wanted

    @staticmethod
    def change(action: str, ranks: Sequence[int]) -> str:
        """Return a change as the name of an operation: ranks that mean different changes get an error."""
        return f"{action} ranks {', '.join(map(str, ranks))}"

    @staticmethod
    def removed_by(change: str) -> Tuple[int, ...]:
        """Return the ranks of the set that a change removes; empty if it adds one."""
        action, ranks = _parsed(change)
        return tuple(ranks) if action == "remove" else ()

    def apply(self, change: str) -> int:
        """Carry out a change; the number of the set."""
        action, ranks = _parsed(change)
        if action == "remove":
            number = self.find(ranks)
            if number is not None:
                del self._sets[number]
            return -1 if number is None else number
        found = self.find(ranks)
        if found is not None:
            return found
        number = next(item for item in range(1, len(self._sets) + 1) if item not in self._sets)
        self._sets[number] = tuple(ranks)
        return number


def _parsed(change: str) -> Tuple[str, List[int]]:
    action, _, listed = change.partition(" ranks ")
    return action, [int(rank) for rank in listed.split(", ")]
