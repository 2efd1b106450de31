"""The progress of one rank in its collectives, as its heartbeats report it."""

from __future__ import annotations

from typing import Any, List, NamedTuple, Sequence, Tuple

from ..errors import ProtocolError


class Progress(NamedTuple):
    """The progress of a rank."""

    # Twice the number of the call that it is in, or was in last; the same on all ranks. Odd in a call of
    # some ranks that follows it and is not counted.
    sequence: int = 0
    moved_bytes: int = 0  # by that call here, both ways
    doing: str = ""  # the call, for people; empty between two calls
    waits_for: Tuple[int, ...] = ()  # ranks from which it was last seen waiting to receive
    exchanged: Tuple[Tuple[int, int, int], ...] = ()  # rank, bytes sent to it, and received from it
    # The one rank without which this rank cannot leave the call; -1: it needs every rank, -2: unknown.
    # Not in heartbeats.
    root: int = -2

    def with_peer(self, rank: int) -> Tuple[int, int]:
        """Return the bytes sent to and received from this rank."""
        return next(((sent, got) for peer, sent, got in self.exchanged if peer == rank), (0, 0))

    @property
    def number(self) -> int:
        """Return the number of the call, for people."""
        return self.sequence // 2

    def to_json(self) -> List[Any]:
        """Return the fields of a heartbeat."""
        exchanged = [list(item) for item in self.exchanged]
        return [self.sequence, self.moved_bytes, self.doing, list(self.waits_for), exchanged]

    @classmethod
    def from_json(cls, data: Sequence[Any]) -> Progress:
        """Invert :meth:`to_json`; raises ProtocolError for anything else."""
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
        """Return text like ``allreduce(shape (8,), float32, op=Sum), call number 4, 96 bytes into it``."""
        if not self.doing:
            return ""
        return f"{self.doing}, call number {self.number}, {self.moved_bytes} bytes into it"
