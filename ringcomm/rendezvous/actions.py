"""What the rendezvous' state machine wants done, and the words in which it speaks."""

from __future__ import annotations

from typing import Any, Dict, NamedTuple, Optional, Union

from ..config import Slot
from ..wire.messages import Message


class Seat(NamedTuple):
    """A place in the job that somebody is expected to take."""

    slot: Slot
    host: str


class Tell(NamedTuple):
    """Send a message to a connection."""

    connection: int
    message: Message


class Drop(NamedTuple):
    """Close a connection once everything told to it is on its way."""

    connection: int


class Notice(NamedTuple):
    """Tell the launcher (or the log) something.

    Attributes:
        kind: ``joined``, ``started``, ``failed``, ``refused``, ``note``, ``warning`` or ``ended``.
        text: one paragraph for people.
        rank: who it came from, if that is a rank.
        culprit: for ``failed``: the rank that is at fault, if known.
        detail: further facts; for ``started`` the rows of the table of links.
    """

    kind: str
    text: str
    rank: Optional[int] = None
    culprit: Optional[int] = None
    detail: Dict[str, Any] = {}


class Timer(NamedTuple):
    """Call :meth:`~ringcomm.rendezvous.state.Rendezvous.tick` after this many seconds."""

    delay_s: float


Action = Union[Tell, Drop, Notice, Timer]
