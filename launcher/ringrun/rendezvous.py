"""The job's rendezvous: what the supervisor needs of it, and where the real one listens."""

from __future__ import annotations

from typing import Any, Callable, List, Mapping, Optional, Protocol, Tuple

from ringcomm.config import Slot
from ringcomm.errors import ConfigError

from .job import Job


class NoticeLike(Protocol):
    """What the rendezvous tells (``ringcomm.rendezvous.server.Notice``)."""

    @property
    def kind(self) -> str: ...
    @property
    def text(self) -> str: ...
    @property
    def rank(self) -> Optional[int]: ...
    @property
    def culprit(self) -> Optional[int]: ...
    @property
    def detail(self) -> Mapping[str, Any]: ...


class RendezvousLike(Protocol):
    """What the supervisor needs of a ``RendezvousServer``."""

    def start(self) -> List[Tuple[str, int]]: ...
    def process_exited(self, slot: Slot, how: str, ok: bool) -> None: ...
    def stop(self) -> None: ...


OpenRendezvous = Callable[[Callable[[NoticeLike], None]], Optional[RendezvousLike]]


def rendezvous_for(job: Job) -> OpenRendezvous:
    """A way to open the real rendezvous for a job."""

    def open_it(notify: Callable[[NoticeLike], None]) -> RendezvousLike:
        from ringcomm.rendezvous.actions import Seat
        from ringcomm.rendezvous.server import RendezvousServer

        seats = [Seat(job.slot_of(place.rank), job.host_of(place.rank).name) for place in job.plan.places]
        return RendezvousServer(
            key=job.key, job=job.id, seats=seats, addresses=rendezvous_addresses(job),
            start_timeout_s=job.settings.start_timeout_s, notify=notify,
        )  # fmt: skip

    return open_it


def rendezvous_addresses(job: Job) -> List[str]:
    """Where the rendezvous listens: on loopback if all are here, else where ranks of this machine may.

    ``--iface`` is about traffic between ranks. If none is here, it says nothing about this machine,
    and every address will do.

    Raises:
        ConfigError: no interface is left.
    """
    if job.all_local:
        return ["127.0.0.1"]
    from ringcomm.transport.nics import LOOPBACK, own_addresses

    spec = next((host.env.get("RINGCOMM_IFACE", "") for host in job.hosts if host.is_local), "")
    # A link-local address means nothing elsewhere without the name of the interface there.
    found = [item for item in own_addresses(spec) if not item.scope]
    if all(item.kind == LOOPBACK for item in found):
        raise ConfigError(
            "This machine has no network address but the loopback's"
            + (f" that fits --iface {spec}" if spec else "")
            + ", but other hosts in the job must reach it. `ip address` shows what there is."
        )
    return [item.address for item in found]
