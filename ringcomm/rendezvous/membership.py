"""The members of a view, as the rendezvous describes them to each other."""

from __future__ import annotations

from typing import Any, Collection, Dict, List, Optional, Protocol, Sequence, Tuple

from ..config import Slot
from ..wire.messages import Message


class Located(Protocol):
    """A rank and where it can be dialled, as it is known to the rendezvous and to other ranks."""

    @property
    def rank(self) -> int:
        """Its rank."""

    @property
    def host(self) -> str:
        """The name of its host."""

    @property
    def host_index(self) -> int:
        """The index of its host."""

    @property
    def local_rank(self) -> int:
        """Its place on its host."""

    @property
    def machine(self) -> str:
        """The identifier of its machine."""

    @property
    def addresses(self) -> List[Dict[str, Any]]:
        """The addresses where it listens while the job starts."""


class Refusal(Exception):
    """The refusal of a process that asks to join; the text is the reason."""


class Member:
    """A process that has joined."""

    def __init__(self, connection: int, message: Message, slot: Optional[Slot], host: str) -> None:
        self.connection = connection
        self.slot = slot  # the place it was started for, if a launcher planned the job
        self.host = host
        self.hostname: str = message["hostname"]
        self.machine: str = str(message.get("machine", ""))
        self.pid: int = message["pid"]
        self.addresses: List[Dict[str, Any]] = message["addresses"]
        self.rank = -1
        self.host_index = -1
        self.local_rank = -1
        self.linked = False  # to all others
        self.left: Optional[str] = None  # the reason in its goodbye message
        self.gone: Optional[str] = None  # how it ended, if it failed
        self.dead_after_s = dead_after_s(message)  # limit for unanswered pings; 0: none
        self.heard_s = 0.0  # its last message, on the rendezvous' monotonic clock
        self.asked = False  # for the peers it receives heartbeats from, without an answer so far
        self.number = -1  # member number in an elastic job

    @property
    def is_here(self) -> bool:
        """Return whether it has neither left nor ended."""
        return self.left is None and self.gone is None

    def name(self) -> str:
        """Return the member as text, such as ``rank 2 (jetson2)``."""
        return f"rank {self.rank} ({self.host})" if self.rank >= 0 else f"a rank on {self.host}"

    def describe(self) -> Dict[str, Any]:
        """Return the description of this rank that is sent to every other."""
        description: Dict[str, Any] = {
            "rank": self.rank,
            "host": self.host,
            "host_index": self.host_index,
            "local_rank": self.local_rank,
            "pid": self.pid,
        }
        if self.number >= 0:
            description["member"] = self.number
        return description


def dead_after_s(message: Message) -> float:
    """Return how long a process that asks to join may leave pings unanswered, in seconds; 0: no limit."""
    limit_s = message.get("dead_after", 0.0)
    return float(limit_s) if isinstance(limit_s, (int, float)) else 0.0


def checked_host(message: Message, version: str) -> str:
    """Return the host's name of a process that asks to join; raises Refusal if its ``version`` differs."""
    host = str(message.get("host") or message["hostname"])
    if message["version"] != version:
        raise Refusal(
            f"{host} has ringcomm {message['version']}, but this job runs {version}. "
            "Install the same on every host, from the same folder or wheel."
        )
    return host


def as_target(member: Located, addresses: Optional[Collection[str]] = None) -> Dict[str, Any]:
    """Return what another rank needs to dial this one. ``addresses``: only these; None: all."""
    offers = [item for item in member.addresses if addresses is None or item["address"] in addresses]
    return {"rank": member.rank, "addresses": offers, "machine": member.machine}


def number_hosts(ordered: Sequence[Member], planned: bool) -> None:
    """Set every member's host index and local rank. ``planned``: slots say which members share a host."""
    hosts: Dict[Any, int] = {}
    counts: Dict[int, int] = {}
    for member in ordered:
        identity: Any = (
            member.slot.host_index if planned and member.slot else (member.hostname, member.machine)
        )
        member.host_index = hosts.setdefault(identity, len(hosts))
        member.local_rank = counts.get(member.host_index, 0)
        counts[member.host_index] = member.local_rank + 1


def named_twice(members: Sequence[Member]) -> str:
    """Return a warning if the job's plan has one machine as several hosts; else ""."""
    found: Dict[Tuple[str, str], Dict[int, str]] = {}
    for member in members:
        if member.machine:
            found.setdefault((member.hostname, member.machine), {})[member.host_index] = member.host
    for (hostname, _), hosts in found.items():
        if len(hosts) > 1:
            names = sorted(hosts.values())
            count = sum(member.host_index in hosts for member in members)
            return (
                f"{' and '.join(names)} are names of one machine ({hostname}), and count as {len(hosts)} "
                "hosts: local_rank() begins at 0 for each, so their ranks choose the same GPUs and cores. "
                f"Name it once: -H {names[0]}:{count}."
            )
    return ""
