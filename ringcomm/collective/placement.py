"""Whether all ranks hold their arrays on devices, agreed without a message of its own.

A schedule must be the same on every rank, and a rank cannot see where the arrays of the others are. So each
rank sends one bit in the headers of long all-reduces, and combines it with the bits that come. In the first
call of a round the bit is "my array is on a device"; in the next calls each rank sends what it has combined
so far. Every contribution of an all-reduce reaches every rank, so with each call a zero comes to at least one
more rank. After ``size - 1`` calls all ranks have the same bit: whether all arrays were on devices in the
first call of the round. All ranks count the same calls, so all use the answer from the same call on.
"""

from __future__ import annotations

MIN_BYTES = 1 << 20
"""Shorter all-reduces do not vote: there is nothing to choose for them."""


class Placement:
    """The votes of one rank on the arrays of one runner.

    Args:
        size: number of ranks.

    Attributes:
        agreed: whether all ranks' arrays were on devices in the first call of the last complete round.
    """

    def __init__(self, size: int) -> None:
        self.agreed = False
        self._calls = max(1, size - 1)
        self._made = 0
        self._all = False

    def vote(self, on_device: bool) -> bool:
        """Return the bit for the headers of the next call.

        Args:
            on_device: whether this rank's array of that call is on a device.
        """
        if self._made == 0:
            self._all = on_device
        return self._all

    def withdraw(self) -> None:
        """Begin another round, since an array was in host memory after all; all ranks do at the same call."""
        self.agreed = False
        self._made = 0

    def record_votes(self, unanimous: bool) -> None:
        """Count a call that has ended.

        Args:
            unanimous: whether this rank's bit and all that it has received were set.
        """
        self._all = unanimous
        self._made += 1
        if self._made == self._calls:
            self._made = 0
            self.agreed = unanimous
