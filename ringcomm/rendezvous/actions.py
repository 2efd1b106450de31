"""The actions that the rendezvous' state machine returns to its I/O shell."""

from __future__ import annotations

from typing import Any, Dict, List, NamedTuple, Optional, Union

from ..config import Slot
from ..wire.messages import Message


class Seat(NamedTuple):
    """A place in the job that a process is expected to take."""

    slot: Slot
    host: str


class Send(NamedTuple):
    """Send a message to a connection."""

    connection: int
    message: Message


class Drop(NamedTuple):
    """Close a connection once all messages for it have been sent."""

    connection: int


class Notice(NamedTuple):
    """Report an event to the launcher (or the log).

    Attributes:
        kind: ``joined``, ``started``, ``failed``, ``refused``, ``note``, ``warning`` or ``ended``.
        text: one paragraph for people.
        rank: the rank that it came from, if any.
        culprit: for ``failed``: the rank that is at fault, if known.
        detail: further facts; for ``started`` the rows of the table of links, for ``warning`` its topic.
    """

    kind: str
    text: str
    rank: Optional[int] = None
    culprit: Optional[int] = None
    detail: Dict[str, Any] = {}


class Timer(NamedTuple):
    """Call :meth:`~ringcomm.rendezvous.state.Rendezvous.tick` after this many seconds."""

    delay_s: float


Action = Union[Send, Drop, Notice, Timer]


def exclude(connection: int, reason: str) -> List[Action]:
    """Have a process of an elastic job end without an error.

    Args:
        connection: number of its control connection.
        reason: why it is not to be in the next view.
    """
    return [Send(connection, {"type": "excluded", "reason": reason}), Drop(connection)]


def refuse(connection: int, reason: str) -> List[Action]:
    """Refuse a process that has asked to join.

    Args:
        connection: number of its control connection.
        reason: why it may not join.
    """
    return [
        Send(connection, {"type": "refused", "reason": reason}),
        Drop(connection),
        Notice("refused", f"refused a process that asked to join: {reason}"),
    ]
