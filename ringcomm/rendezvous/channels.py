"""Makes the three channels of a rank from its authenticated connections."""

from __future__ import annotations

from typing import Dict, List, Optional, Sequence

from ..config import Settings
from ..errors import StartupError
from ..group.view import Peer
from ..transport.base import Channels
from ..transport.local import make_links
from ..transport.pace import Counted, Expected, Paces, counted
from ..transport.tcp import SocketFabric, SocketLink
from ..wire.auth import Purpose
from .control import ControlChannel
from .links import Proven


def make_channels(
    rank: int, size: int, found: Dict[int, Dict[int, Proven]], control: ControlChannel, settings: Settings
) -> Channels:
    """Make the links of all three channels, each over the best transport that works for it. Raises
    StartupError, and closes the connections ``found`` (by purpose and peer), if a link cannot be set up.
    """
    try:
        data = [
            {peer: sock for peer, (sock, _) in found[purpose].items()}
            for purpose in (Purpose.DIRECT, Purpose.BACKGROUND)
        ]
        calls, engine = (
            SocketFabric(
                rank,
                make_links(socks, settings.transport, settings.congestion, settings.measure),
                control,
                size,
            )
            for socks in data
        )
        between_engines = {
            peer: SocketLink(peer, *link) for peer, link in found[Purpose.ENGINE_CONTROL].items()
        }
        return Channels(calls, engine, SocketFabric(rank, between_engines, control, size))
    except (OSError, StartupError) as problem:
        for links in found.values():
            for sock, _ in links.values():
                sock.close()
        raise StartupError(f"The links to the ranks of this host could not be set up: {problem}") from None


def paces_of(rank: int, peers: Sequence[Peer], chosen: Sequence[Expected], channels: Channels) -> Paces:
    """Watch the speed of those links to other hosts for which there was a choice of networks."""
    by_rank = {peer.rank: peer for peer in peers}
    own = by_rank[rank]
    mates = sum(peer.host_index == own.host_index for peer in peers)
    hosts = len({peer.host_index for peer in peers})

    def read(peer: int) -> List[Optional[Counted]]:
        links = (channel.link(peer) for channel in (channels.direct, channels.background))
        return [counted(link.sock) if isinstance(link, SocketLink) else None for link in links]

    def describe(item: Expected, mb_per_s: float, better: str) -> str:
        other = by_rank[item.peer]
        return (
            f"rank {rank} ({own.host}) reaches rank {item.peer} ({other.host}) over {item.iface} at "
            f"{mb_per_s:.1f} MB/s, although more waits to be sent; when the job started, it was "
            f"{item.mb_per_s:.0f} MB/s, and {dict(item.others)[better]:.0f} over {better}, which connects "
            f"them, too. Look at the cable, the switch and other traffic of {item.iface}; if it stays slow, "
            f"start with --iface '{own.host}=!{item.iface}' (on {own.host}: RINGCOMM_IFACE='!{item.iface}')."
        )

    return Paces(chosen, read, describe, shared=max(1, hosts - 1) * mates)
