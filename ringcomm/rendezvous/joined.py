"""The result of joining a job: a rank, the other ranks, and the channels to them."""

from __future__ import annotations

from typing import NamedTuple, Tuple

from ..group.view import Peer
from ..transport.base import Channels
from ..transport.pace import Paces
from ..wire.signing import Signer
from .control import ControlChannel


class Joined(NamedTuple):
    """The result of joining: a place in a job and the links to every other rank.

    Attributes:
        rank: this process's rank.
        generation: how many generations of the job have run before.
        peers: all ranks, this one among them, in rank order.
        channels: the links.
        control: the connection to the rendezvous.
        table: the table of links, as text.
        paces: finds links that are far slower than the speed for which they were chosen.
        signer: signs what ranks of this generation exchange.
    """

    rank: int
    generation: int
    peers: Tuple[Peer, ...]
    channels: Channels
    control: ControlChannel
    table: str
    paces: Paces
    signer: Signer
