"""Groups of devices within a host: what an all-reduce requires of NCCL, or of a stand-in for it.

Between hosts arrays are sent through host memory (:mod:`.mirror`). Within a host devices exchange directly,
which takes a fraction of the time and no memory of the host. A :class:`DevicePort` is how one rank's device
becomes a member of such a group, and a :class:`DeviceGroup` is the group.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ContextManager, Tuple

from ..ops import ReduceOp

TICKET_BYTES = 128
"""The length of what identifies a group that is being made."""
DEVICE_TYPES = frozenset(
    ("int8", "uint8", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64", "bfloat16")
)
"""The names of the types of elements that such groups reduce."""


class DeviceGroup(ABC):
    """The devices of a host's ranks, one for each rank.

    Every member makes the same calls in the same order. A call queues work in the group's own stream and
    returns; no thread waits for it. Arrays are flat and on this rank's device. Chunk r of ``bounds`` is that
    of member r, and all chunks but the last are equally long.
    """

    @abstractmethod
    def current(self) -> ContextManager[Any]:
        """A ``with`` block in which the group's stream is the calling thread's current stream."""

    @abstractmethod
    def follow(self, mark: Any) -> None:
        """Do what is queued from now on after a mark of the device's copy engine only."""

    @abstractmethod
    def queued(self) -> Any:
        """The end of all that has been queued, as a ``Done`` of the device's copy engine."""

    @abstractmethod
    def all_reduce(self, array: Any, op: ReduceOp) -> None:
        """Reduce over all members (Average: the sum), in place."""

    @abstractmethod
    def reduce_scatter(self, array: Any, bounds: Tuple[int, ...], op: ReduceOp) -> None:
        """Reduce over all members (Average: the sum); afterwards only this member's chunk is defined."""

    @abstractmethod
    def all_gather(self, array: Any, bounds: Tuple[int, ...]) -> None:
        """Fill the array with every member's chunk."""

    @abstractmethod
    def scale(self, array: Any, divisor: int, factor: float) -> None:
        """Divide the elements by ``divisor``, then multiply them by ``factor``; 1 changes nothing."""

    @abstractmethod
    def abort(self) -> None:
        """End what is queued, whatever other members do. For any thread, and again without effect."""


class DevicePort(ABC):
    """How the device of one rank becomes a member of a group.

    Attributes:
        name: of what connects the devices, with its version.
        version: must be the same on all ranks of a host.
        identity: of the device, at most 62 bits; two ranks of a host must not use the same. 0: not known.
    """

    name: str
    version: int
    identity: int

    @abstractmethod
    def ticket(self) -> bytes:
        """Return what identifies a new group: made by its first member, at most ``TICKET_BYTES`` long.

        Raises:
            DeviceError: it cannot be made.
        """

    @abstractmethod
    def join(self, ticket: bytes, rank: int, size: int) -> DeviceGroup:
        """Become a member. Returns when all members have joined.

        Raises:
            DeviceError: the group cannot be made.
        """
