"""What a rank has told rank 0 of its operations: the parts of a ``ready`` message, one by one."""

from __future__ import annotations

from math import fsum, inf
from typing import Any, Dict, Iterator, Mapping, NamedTuple, Optional, Sequence, Tuple

from ..collective.weighted import NO_WEIGHTS
from .cache import IssuedIds
from .request import Key, Signature


class Announcement(NamedTuple):
    """An operation that a rank has submitted.

    Attributes:
        number: see :class:`~.request.Key`.
        site: file and line of the call.
        weight: of the rank's contribution; 1.0 if the operation has no weights.
        packed: the values of a short operation.
    """

    signature: Signature
    number: int
    site: str
    weight: float
    packed: Optional[str] = None


class Announced:
    """An operation that some ranks have announced: what each of them has said.

    Attributes:
        members: the ranks of its process set.
        first_s: when the first rank announced it.
        reported_s: when it was last reported as waiting; at first ``first_s``.
        last_s: when the last rank so far announced it.
    """

    __slots__ = (
        "first_s", "key", "last_s", "members", "piggybacked", "reported_s", "signatures", "sites", "weights",
    )  # fmt: skip

    def __init__(self, key: Key, members: Tuple[int, ...], now_s: float) -> None:
        self.key = key
        self.members = members
        self.first_s = self.reported_s = self.last_s = now_s
        self.signatures: Dict[int, Signature] = {}
        self.sites: Dict[int, str] = {}
        self.piggybacked: Dict[int, str] = {}
        self.weights: Dict[int, float] = {}


def announcements(
    known: Sequence[Any],
    short: Sequence[Any],
    fresh: Sequence[Any],
    weights: Sequence[Any],
    ids: IssuedIds,
    lines: Sequence[str],
) -> Iterator[Announcement]:
    """The operations of a message, in the order in which their weights are listed.

    Args:
        known: number of the signature and of the operation, and line, of each operation.
        short: the same with its values, of operations of which the values were sent along.
        fresh: signature, number of the operation, and line.
        weights: of those that are weighted averages.
        ids: the numbers of signatures.
        lines: of the rank's program, by number.

    Raises:
        LookupError, ValueError, TypeError, OverflowError: the message makes no sense.
    """
    left = iter(weights)

    def announced(signature: Signature, number: int, line: int, packed: Optional[str] = None) -> Announcement:
        weight = float(next(left)) if signature.weighted else 1.0
        if not 0.0 <= weight < inf:
            raise ValueError(f"a weight of {weight}")
        return Announcement(signature, number, lines[line], weight, packed)

    try:
        for id_, number, line in zip(known[::3], known[1::3], known[2::3]):
            yield announced(ids.signature(id_), number, line)
        for id_, number, line, packed in short:
            yield announced(ids.signature(id_), number, line, packed)
        for data, number, line in fresh:
            yield announced(Signature.from_json(data), int(number), line)
    except StopIteration:
        raise ValueError("a weight is missing") from None


def sum_of_weights(weights: Mapping[int, float]) -> float:
    """The exactly rounded sum: the same whatever the order of the ranks, and ``n * w`` if all are equal."""
    return fsum(weights.values())


def no_weight_text(what: str) -> str:
    """Why a weighted average does not exist."""
    return f"{what}: {NO_WEIGHTS}"
