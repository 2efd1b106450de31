"""The result of joining a job: a rank, the other ranks, and the channels to them."""

from __future__ import annotations

import socket
from typing import NamedTuple, Optional, Tuple

from ..config import Membership, Settings
from ..group.view import Peer
from ..transport.base import Channels
from ..transport.pace import Paces
from ..wire.messages import Message, MessageReader
from ..wire.signing import Session, Signer
from .channels import make_channels, paces_of
from .control import ControlChannel
from .links import LinkSetup


class Joined(NamedTuple):
    """The result of joining: a place in a job and the links to every other rank."""

    rank: int
    generation: int  # generations of the job that have run before
    peers: Tuple[Peer, ...]  # all ranks, this one among them, in rank order
    channels: Channels
    control: ControlChannel
    table: str  # of links
    paces: Paces
    signer: Signer


def make_control(
    sock: socket.socket, reader: MessageReader, session: Optional[Session], assignment: Message, changes: int
) -> ControlChannel:
    """Return the control channel of a rank, from the message that assigned it and the changes since."""
    members = sorted(assignment["members"], key=lambda item: int(item["rank"]))
    rank = int(assignment["rank"])
    number = members[rank].get("member")
    return ControlChannel(
        sock, reader, rank, [str(item["host"]) for item in members], session,
        None if number is None else int(number), int(assignment["generation"]), changes,
    )  # fmt: skip


def established(
    control: ControlChannel,
    assignment: Message,
    go: Message,
    setup: LinkSetup,
    membership: Membership,
    settings: Settings,
) -> Joined:
    """Return the place in the job once all ranks are linked; raises StartupError if a link is unusable."""
    rank, generation = int(assignment["rank"]), int(assignment["generation"])
    peers = tuple(
        Peer(
            int(m["rank"]), str(m["host"]), int(m["host_index"]), int(m["local_rank"]), int(m["pid"]),
            int(m.get("member", -1)),
        )
        for m in assignment["members"]
    )  # fmt: skip
    channels = make_channels(rank, len(peers), setup.take_links(), control, settings)
    paces = paces_of(rank, peers, setup.chosen, channels)
    channels.control.slow_links = paces.look
    signer = Signer(membership.key, membership.job, generation)
    return Joined(rank, generation, peers, channels, control, str(go["table"]), paces, signer)
