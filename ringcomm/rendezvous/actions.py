"""The actions that the rendezvous' state machine returns to its I/O shell."""

from __future__ import annotations

from typing import Any, Dict, List, NamedTuple, Optional, Union

from ..config import Slot
from ..wire.messages import Message

ADDED, REMOVED = 2, 1
"""Changes of the membership, as bits: as in Horovod's ``HostUpdateResult``."""


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
    """Report an event to the launcher (or the log)."""

    # ``joined``, ``started``, ``failed``, ``refused``, ``note``, ``warning``, ``log`` or ``ended``; in an
    # elastic job also ``waiting``, ``view`` and ``lost``.
    kind: str
    text: str  # one paragraph for people
    rank: Optional[int] = None  # the rank it came from
    culprit: Optional[int] = None  # for ``failed``: the rank at fault, if known
    detail: Dict[str, Any] = {}  # for ``started`` the rows of the link table, for ``warning`` its topic


class Timer(NamedTuple):
    """Call :meth:`~ringcomm.rendezvous.state.Rendezvous.tick` after this many seconds."""

    delay_s: float


Action = Union[Send, Drop, Notice, Timer]


def exclude(connection: int, reason: str) -> List[Action]:
    """Make a process of an elastic job end without an error."""
    return [Send(connection, {"type": "excluded", "reason": reason}), Drop(connection)]


def refuse(connection: int, reason: str) -> List[Action]:
    """Refuse a process that has asked to join."""
    return [
        Send(connection, {"type": "refused", "reason": reason}),
        Drop(connection),
        Notice("refused", f"refused a process that asked to join: {reason}"),
    ]
