"""Numbers for signatures, so that what has been seen before is announced with a few bytes."""

from __future__ import annotations

from typing import Dict, List, Optional, Set

from ..wire.signature import Signature


class IssuedIds:
    """The coordinator's side: gives every signature a number.

    When ``capacity`` is reached all numbers are withdrawn at once. An old number may still be on its way
    from another rank then, so it stays known until every rank has confirmed the withdrawal.
    """

    def __init__(self, size: int, capacity: int) -> None:
        self._capacity = max(1, capacity)
        self._ranks = range(size)
        self._ids: Dict[Signature, int] = {}
        self._signatures: Dict[int, Signature] = {}
        self._old: Dict[int, Signature] = {}
        self._unconfirmed: Set[int] = set()
        self._next = 1
        self.epoch = 0

    def id_of(self, signature: Signature) -> Optional[int]:
        """The number of a signature, if it has one."""
        return self._ids.get(signature)

    def issue(self, signature: Signature) -> int:
        """A new number for a signature."""
        number = self._next
        self._next += 1
        self._ids[signature] = number
        self._signatures[number] = signature
        return number

    def signature(self, number: int) -> Signature:
        """Return the signature with this number, or raise KeyError."""
        found = self._signatures.get(number)
        return self._old[number] if found is None else found

    @property
    def full(self) -> bool:
        """Whether it is time to :meth:`withdraw`."""
        return len(self._ids) >= self._capacity and not self._unconfirmed

    def withdraw(self) -> int:
        """Forget all numbers; the epoch that every rank must confirm."""
        self._old = self._signatures
        self._ids, self._signatures = {}, {}
        self._unconfirmed = set(self._ranks)
        self.epoch += 1
        return self.epoch

    def confirm(self, rank: int, epoch: int) -> None:
        """A rank has forgotten the numbers before this epoch."""
        if epoch == self.epoch:
            self._unconfirmed.discard(rank)
            if not self._unconfirmed:
                self._old = {}


class KnownIds:
    """A rank's side: the numbers that it has been told."""

    def __init__(self) -> None:
        self._ids: Dict[Signature, int] = {}
        self._signatures: Dict[int, Signature] = {}

    def learn(self, number: int, signature: Signature) -> None:
        """This signature has this number from now on."""
        self._ids[signature] = number
        self._signatures[number] = signature

    def id_of(self, signature: Signature) -> Optional[int]:
        """The number to announce a signature by, if it has one."""
        return self._ids.get(signature)

    def signature(self, number: int) -> Signature:
        """The signature with this number."""
        return self._signatures[number]

    def forget(self) -> None:
        """The numbers have been withdrawn."""
        self._ids.clear()
        self._signatures.clear()

    def known(self) -> List[int]:
        """All numbers, for tests and reports."""
        return sorted(self._signatures)
