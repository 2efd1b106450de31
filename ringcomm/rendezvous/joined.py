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


def make_control(
    sock: socket.socket, reader: MessageReader, session: Optional[Session], assignment: Message, changes: int
) -> ControlChannel:
    """Return the control channel of a rank.

    Args:
        sock, reader: the connection to the rendezvous, and what has arrived on it.
        session: authenticates its messages.
        assignment: the message that has assigned the rank, with all members.
        changes: changes of the membership that were reported since.
    """
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
    """Return the place in the job, once all ranks are linked.

    Args:
        control: the connection to the rendezvous.
        assignment: the message that has assigned the rank, with all members.
        go: the message that all ranks are linked.
        setup: has made the links.
        membership: how this process takes part in the job.
        settings: the tunables.

    Raises:
        StartupError: a link could not be set up.
    """
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
