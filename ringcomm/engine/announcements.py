"""What a rank has told rank 0 of its operations: the parts of a ``ready`` message, one by one."""

from __future__ import annotations

from itertools import count
from math import inf
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

from ..collective.weighted import NO_WEIGHTS, Total
from ..wire.messages import Message
from ..wire.signature import Key, Signature
from .cache import IssuedIds


class Announcement(NamedTuple):
    """An operation that a rank has submitted.

    ``weight`` is 1.0 without weights, ``absent`` has a bit for each part that the rank does not have, and
    ``packed`` the values of a short operation.
    """

    signature: Signature
    number: int
    site: str
    weight: float
    absent: int = 0
    packed: Optional[str] = None


class Announced:
    """An operation that some ranks have announced.

    ``reported_s``: when it was last reported as waiting. ``absent`` has a bit for each part that no rank so
    far has (joined ranks have none), and ``waited_for`` says whether a caller waited for it on every rank so
    far.
    """

    __slots__ = (
        "absent", "first_s", "key", "last_s", "members", "piggybacked", "reported_s", "signatures", "sites",
        "waited_for", "weights",
    )  # fmt: skip

    def __init__(self, key: Key, members: Tuple[int, ...], now_s: float) -> None:
        self.key = key
        self.members = members
        self.first_s = self.reported_s = self.last_s = now_s
        self.signatures: Dict[int, Signature] = {}
        self.sites: Dict[int, str] = {}
        self.piggybacked: Dict[int, str] = {}
        self.weights: Dict[int, float] = {}
        self.absent = -1
        self.waited_for = True

    def add(self, rank: int, announcement: Announcement, urgent: bool = True) -> None:
        """A rank has announced the operation."""
        self.signatures[rank] = announcement.signature
        self.sites[rank] = announcement.site
        self.weights[rank] = announcement.weight
        self.absent &= announcement.absent
        self.waited_for = self.waited_for and urgent
        if announcement.packed is not None:
            self.piggybacked[rank] = announcement.packed


def announcements(message: Message, ids: IssuedIds, lines: Sequence[str]) -> Iterator[Announcement]:
    """Yield the operations of a ``ready`` message, in the order in which their weights are listed.

    ``known`` has the numbers of signature, operation and line of each operation; ``carried`` the same with
    its values; ``fresh`` signature, number of the operation, and line. ``lines`` are those of the rank's
    program. What makes no sense raises LookupError, ValueError, TypeError or OverflowError.
    """
    known = message["known"]
    left, masks = iter(message["weights"]), masks_of(message["absent"])

    def announced(signature: Signature, number: int, line: int, packed: Optional[str] = None) -> Announcement:
        weight = float(next(left)) if signature.weighted else 1.0
        if not 0.0 <= weight < inf:
            raise ValueError(f"a weight of {weight}")
        return Announcement(signature, number, lines[line], weight, next(masks), packed)

    try:
        for id_, number, line in zip(known[::3], known[1::3], known[2::3]):
            yield announced(ids.signature(id_), number, line)
        for id_, number, line, packed in message["carried"]:
            yield announced(ids.signature(id_), number, line, packed)
        for data, number, line in message["fresh"]:
            yield announced(Signature.from_json(data), int(number), line)
    except StopIteration:
        raise ValueError("a weight is missing") from None


def masks_as_text(masks: Sequence[int]) -> List[List[Any]]:
    """The bits of those operations that have any, each with the operation's place; :func:`masks_of` reads it.

    >>> masks_as_text([0, 0, 5])
    [[2, '5']]
    """
    return [[place, format(mask, "x")] for place, mask in enumerate(masks) if mask]


def masks_of(text: Sequence[Any]) -> Iterator[int]:
    """Yield the bits of one operation after the other, without end.

    >>> from itertools import islice
    >>> list(islice(masks_of([[2, '5']]), 4))
    [0, 0, 5, 0]
    """
    masks = {int(place): int(digits, 16) for place, digits in text}
    if any(mask < 0 for mask in masks.values()):
        raise ValueError("negative bits of absent parts")
    return (masks.get(place, 0) for place in count())


def totals_of(text: Sequence[Any]) -> Iterator[Total]:
    """Return the sums of weights of a response, each of which travels as a list."""
    totals = [Total(float(part), int(exponent)) for part, exponent in text]
    if any(not 0.0 < part < inf or not -1100 < exponent < 1100 for part, exponent in totals):
        raise ValueError("a sum of weights that is not positive")
    return iter(totals)


def no_weight_text(what: str) -> str:
    """Why a weighted average does not exist."""
    return f"{what}: {NO_WEIGHTS}"
