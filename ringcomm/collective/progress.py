"""The progress of one rank in its collectives, as its heartbeats report it."""

from __future__ import annotations

from typing import Any, List, NamedTuple, Sequence, Tuple

from ..errors import ProtocolError


class Progress(NamedTuple):
    """Where a rank is.

    Attributes:
        sequence: twice the number of the call that it is in, or was in last; the same on all ranks. Odd
            in a call of some ranks that follows it and is not counted.
        moved_bytes: how much that call has moved here, both ways.
        doing: the call, for people; empty between two calls.
        waits_for: the ranks from which it was last seen waiting to receive.
        exchanged: ``(rank, bytes sent to it, bytes received from it)`` in this call.
        root: the one rank without which this rank cannot leave the call; -1: it needs every rank, -2: it is
            not known. Not in heartbeats.
    """

    sequence: int = 0
    moved_bytes: int = 0
    doing: str = ""
    waits_for: Tuple[int, ...] = ()
    exchanged: Tuple[Tuple[int, int, int], ...] = ()
    root: int = -2

    def with_peer(self, rank: int) -> Tuple[int, int]:
        """Bytes sent to and received from this rank."""
        return next(((sent, got) for peer, sent, got in self.exchanged if peer == rank), (0, 0))

    @property
    def number(self) -> int:
        """The number of the call, for people."""
        return self.sequence // 2

    def to_json(self) -> List[Any]:
        """As it travels."""
        exchanged = [list(item) for item in self.exchanged]
        return [self.sequence, self.moved_bytes, self.doing, list(self.waits_for), exchanged]

    @classmethod
    def from_json(cls, data: Sequence[Any]) -> Progress:
        """Return what :meth:`to_json` made.

        Raises:
            ProtocolError: it is something else.
        """
        try:
            sequence, moved_bytes, doing, waits_for, exchanged = data
            return cls(
                int(sequence),
                int(moved_bytes),
                str(doing),
                tuple(int(rank) for rank in waits_for),
                tuple((int(rank), int(sent), int(received)) for rank, sent, received in exchanged),
            )
        except (TypeError, ValueError) as problem:
            raise ProtocolError(f"a heartbeat that says nothing about progress: {problem}") from None

    def describe(self) -> str:
        """Like ``allreduce(shape (8,), float32, op=Sum), call number 4, 96 bytes into it``."""
        if not self.doing:
            return ""
        return f"{self.doing}, call number {self.number}, {self.moved_bytes} bytes into it"
