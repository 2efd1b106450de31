"""The rendezvous without a launcher: served by one of the ranks, or by a separate process."""

from __future__ import annotations

import logging
import socket
import threading
from typing import Any, Callable, List, Optional, Sequence, Set, Tuple, Type

from ..clock import Deadline
from ..config import Membership, Settings
from ..errors import StartupError
from ..transport.nics import LOOPBACK, VIRTUAL, own_addresses
from ..transport.secure import encryption_of
from .actions import Notice, Seat
from .server import RendezvousServer
from .terms import START_LIMIT

logger = logging.getLogger("ringcomm.rendezvous")

LOOK_AGAIN_S = 0.25
_LEAVE_S = 10.0
_FAILED_LEAVE_S = 1.0
"""How long the rank that serves the rendezvous waits, when it leaves, for the others to leave as well."""
_warned = threading.Lock()  # held once this process has warned of that: it may serve one for each group


class EmbeddedRendezvous(RendezvousServer):
    """A rendezvous server inside a rank, for jobs without a launcher."""

    @classmethod
    def serve(
        cls,
        key: bytes,
        certificate: str,
        job: str,
        size: int,
        settings: Settings,
        preferred: Sequence[str] = (),
        notify: Optional[Callable[[Notice], None]] = None,
        seats: Sequence[Seat] = (),
        limit: str = START_LIMIT,
    ) -> Tuple[EmbeddedRendezvous, List[Tuple[str, int]]]:
        """Serve a separate job on free ports; return the server and its addresses. ``preferred``: addresses
        at which all ranks can reach this machine, otherwise all allowed ones; ``notify``: called in the
        server's thread with every notice, in place of logging it; ``limit``: what sets the start timeout.
        Raises StartupError if none of the addresses can be listened on.
        """
        allowed = own_addresses(settings.iface)
        offered = [item for item in own_addresses() if item.kind == LOOPBACK or item in allowed]
        # Processes of this machine should not depend on an interface that may go away: loopback comes first.
        offered = [item for item in offered if item.address in preferred] or offered
        offered.sort(key=lambda item: (item.kind != LOOPBACK, item.kind == VIRTUAL))
        addresses = list(dict.fromkeys(item.address for item in offered if not item.scope))
        server = cls._of(
            key, certificate, job, settings, size, addresses, notify=notify or _log, seats=seats, limit=limit
        )
        return server, server.start()

    @classmethod
    def _of(
        cls, key: bytes, certificate: str, job: str, settings: Settings, size: int, addresses: List[str],
        **options: Any,
    ) -> EmbeddedRendezvous:  # fmt: skip
        return cls(
            key=key, job=job, size=size, addresses=addresses, start_timeout_s=settings.start_timeout_s,
            encryption=encryption_of(certificate, settings.encrypt), **options,
        )  # fmt: skip

    def stop(self, failed: bool = False) -> None:
        """Stop serving once all others have left as well, or after a while: soon if the job has ``failed``,
        since the abort is sent at once, and a frozen rank never leaves.
        """
        limit_s = _FAILED_LEAVE_S if failed or _warned.locked() else _LEAVE_S
        if not self.wait_idle(limit_s) and not failed and _warned.acquire(blocking=False):
            logger.warning(
                "this rank served the rendezvous and ends now, although others have not left after %g s",
                limit_s,
            )
        super().stop()


class OwnRendezvous:
    """Serves the rendezvous, while a rank joins a job without a launcher, if this rank can.

    It can if the address of the rendezvous is this machine's and the port is free. Of several ranks on one
    host the one whose bind succeeds serves the others. A bind may also fail although no rank serves: a
    connection of another program may have the port at that moment. So a rank tries again until it has joined.
    """

    def __init__(self, membership: Membership, settings: Settings) -> None:
        self._membership = membership
        self._settings = settings
        self.embedded: Optional[EmbeddedRendezvous] = None  # the rendezvous that this rank serves
        self._addresses = _own_addresses_of_rendezvous(membership, settings)
        self._joined = threading.Event()
        self._thread: Optional[threading.Thread] = None

    def __enter__(self) -> OwnRendezvous:
        if self._addresses and not self._start():
            self._thread = threading.Thread(
                target=self._keep_trying, name="ringcomm-serve-rendezvous", daemon=True
            )
            self._thread.start()
        return self

    def __exit__(self, kind: Optional[Type[BaseException]], *rest: object) -> None:
        self._joined.set()
        if self._thread is not None:
            self._thread.join()
        if kind is not None and self.embedded is not None:
            self.embedded.stop()

    def _keep_trying(self) -> None:
        while not self._joined.wait(LOOK_AGAIN_S) and not self._start():
            pass

    def _start(self) -> bool:
        membership, settings = self._membership, self._settings
        server = EmbeddedRendezvous._of(
            membership.key, membership.certificate, membership.job, settings, membership.size,
            self._addresses, notify=_log, port=membership.rendezvous[0][1],
        )  # fmt: skip
        try:
            server.start()
        except StartupError as problem:
            logger.debug("this rank does not serve the rendezvous: %s", problem)
            return False
        self.embedded = server
        return True


def _own_addresses_of_rendezvous(membership: Membership, settings: Settings) -> List[str]:
    """Return the addresses at which this rank may serve the rendezvous; none if it is served elsewhere."""
    if membership.slot is not None or membership.rank not in (None, 0) or len(membership.rendezvous) != 1:
        return []
    host, port = membership.rendezvous[0]
    own = {item.address for item in own_addresses()}
    # In a container the name of rank 0's own host may resolve only some time after the start.
    limit_s = settings.start_timeout_s if membership.rank == 0 else 0.0
    return sorted(_resolved(host, port, Deadline(limit_s)) & own)


def _resolved(host: str, port: int, deadline: Deadline) -> Set[str]:
    """Return the addresses of a name; none if it does not resolve in time, which join() then reports."""
    pause = threading.Event()
    while True:
        try:
            return {str(entry[4][0]) for entry in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
        except (OSError, UnicodeError) as problem:
            if deadline.expired() or isinstance(problem, UnicodeError):  # which time does not change
                logger.debug("%s does not resolve: %s", host, problem)
                return set()
        pause.wait(LOOK_AGAIN_S)


def _log(notice: Notice) -> None:
    # A failure needs no warning here: it is raised on every rank.
    level = logging.WARNING if notice.kind in ("refused", "warning") else logging.INFO
    logger.log(level, "%s", notice.text)
