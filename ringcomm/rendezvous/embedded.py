"""The rendezvous without a launcher: served by one of the ranks, also where srun or mpirun has started them.

Then rank 0 publishes the address and the job's key in a file in a directory that all hosts share and that
this user can read, and the others look for it.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import secrets
import socket
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any, Callable, List, Optional, Sequence, Set, Tuple, Type

from ..clock import Deadline
from ..config import Membership, Settings
from ..configuration.membership import Launched
from ..errors import ConfigError, StartTimeoutError, StartupError
from ..storage.files import read_private, write_private
from ..storage.keys import make_certificate
from ..transport.nics import LOOPBACK, VIRTUAL, machine, own_addresses
from ..transport.reactor import encryption_of
from .client import Joined, Moved, Watched, join
from .membership import START_LIMIT, Notice, Seat
from .server import RendezvousServer

logger = logging.getLogger("ringcomm.rendezvous")

LOOK_AGAIN_S = 0.1
_LEAVE_S = 10.0
_FAILED_LEAVE_S = 1.0
"""How long the rank that serves the rendezvous waits, when it leaves, for the others to leave as well."""
GRACE_S = 10.0  # how long an address from a file may not answer: the file may be left from an earlier start
_LIMIT_BYTES = 1 << 20

_turns = 0
_warned = threading.Lock()  # held once this process has warned of that: it may serve one for each group


class EmbeddedRendezvous(RendezvousServer):
    """A rendezvous server inside a rank, for jobs without a launcher."""

    @classmethod
    def serve(
        cls, key: bytes, certificate: str, job: str, size: int, settings: Settings,
        preferred: Sequence[str] = (), notify: Optional[Callable[[Notice], None]] = None,
        seats: Sequence[Seat] = (), limit: str = START_LIMIT,
    ) -> Tuple[EmbeddedRendezvous, List[Tuple[str, int]]]:  # fmt: skip
        """Serve a separate job on free ports; return the server and its addresses. ``preferred``: addresses
        at which all ranks can reach this machine, otherwise all allowed ones; ``notify``: called in the
        server's thread with every notice, in place of logging it; ``limit``: what sets the start timeout.
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
        """Stop serving once all others have left, or after a while, soon if the job has ``failed``."""
        limit_s = _FAILED_LEAVE_S if failed or _warned.locked() else _LEAVE_S
        if not self.wait_idle(limit_s) and not failed and _warned.acquire(blocking=False):
            logger.warning(
                "this rank served the rendezvous and ends now, although others have not left after %g s",
                limit_s,
            )
        super().stop()


class OwnRendezvous:
    """Serves the rendezvous, while a rank joins a job without a launcher, if its address is this machine's.
    Of several ranks on one host the one whose bind succeeds serves. A connection of another program may have
    the port at that moment, so a rank tries again until it has joined.
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


# ---- srun and mpirun -----------------------------------------------------------------------------


class FileNotice:
    """The file, of mode 0600 in a folder that all hosts share, where rank 0 publishes a text."""

    def __init__(self, launched: Launched, turn: int) -> None:
        self._launched = launched
        self._folder = Path(launched.folder).expanduser()
        name = hashlib.sha256(f"{launched.job} turn {turn}".encode()).hexdigest()[:32]
        self._path = self._folder / f"job-{name}"
        self.place = f"the file {self._path}"
        self._read = ""

    def publish(self, text: str) -> None:
        """Write the file in one step."""
        try:
            write_private(self._path, text.encode())
        except OSError as problem:
            raise ConfigError(f"Rank 0 cannot write in {self._folder}: {problem.strerror}. {_HINT}") from None

    def read(self, deadline: Deadline) -> str:
        pause = threading.Event()
        while True:
            found = self._content()
            if found:
                self._read = found
                return found
            if deadline.expired():
                raise StartTimeoutError(
                    f"{self._launched.launcher} has started this process as rank {self._launched.rank} of "
                    f"{self._launched.size}, but within {deadline.timeout_s:g} s rank 0 has left no file in "
                    f"{self._folder} on this host. Does rank 0 call init()? {_HINT}"
                )
            pause.wait(LOOK_AGAIN_S)

    def _content(self) -> str:
        """Return the content of the file; "" while there is none."""
        try:
            list(self._folder.iterdir())  # makes a network file system ask its server again
            return read_private(self._path, _LIMIT_BYTES).decode("utf-8", "replace")
        except OSError as problem:
            if problem.errno not in (errno.EPERM, errno.EINVAL, errno.EFBIG):
                return ""
            raise ConfigError(
                f"{self._path} is refused: {problem.strerror}. It holds the job's key, so only the user that "
                f"runs the job may be able to read it. {_HINT}"
            ) from None

    def moved(self) -> bool:
        latest = self._content()
        return latest not in ("", self._read)

    def withdraw(self) -> None:
        self._path.unlink(missing_ok=True)  # the other processes may remove it as well


_HINT = (
    "All hosts must share a directory: the home directory, or another one that RINGCOMM_SHARED_DIR names. "
    "Without one start the program with ringrun."
)


def join_launched(membership: Membership, settings: Settings) -> Joined:
    """Join the job that srun or mpirun has started; rank 0 serves the rendezvous."""
    global _turns
    launched = membership.launched
    assert launched is not None
    turn, _turns = _turns, _turns + 1
    deadline = Deadline(settings.start_timeout_s)
    notice = FileNotice(launched, turn)
    if launched.rank == 0:
        return _serve(notice, membership, settings)
    while True:
        full = _with_notice(membership, notice.read(deadline), notice.place)
        left = replace(settings, start_timeout_s=max(1.0, deadline.remaining_s()))
        try:
            return join(full, left, watched=Watched(notice.moved, GRACE_S))
        except Moved:
            continue  # the file was left from an earlier start


def _serve(notice: FileNotice, membership: Membership, settings: Settings) -> Joined:
    key, certificate = secrets.token_bytes(32), make_certificate() if settings.encrypt else ""
    job = f"launched-{secrets.token_hex(8)}"
    embedded, endpoints = EmbeddedRendezvous.serve(key, certificate, job, membership.size, settings)
    try:
        facts = {"job": job, "key": key.hex(), "certificate": certificate, "endpoints": endpoints}
        text = json.dumps({**facts, "machine": machine()})
        try:
            notice.publish(text)
            return join(_with_notice(membership, text, notice.place), settings)._replace(embedded=embedded)
        finally:
            notice.withdraw()
    except BaseException:
        embedded.stop(failed=True)
        raise


def _with_notice(membership: Membership, text: str, place: str) -> Membership:
    """Return the membership with the published facts of rank 0; StartupError if the text is invalid."""
    try:
        facts = json.loads(text)
        return replace(
            membership, job=str(facts["job"]), key=bytes.fromhex(facts["key"]),
            certificate=str(facts["certificate"]), rendezvous_machine=str(facts["machine"]),
            rendezvous=tuple((str(address), _port(port)) for address, port in facts["endpoints"]),
        )  # fmt: skip
    except (ValueError, TypeError, LookupError, RecursionError):
        raise StartupError(
            f"What rank {membership.rank} has read from {place} is not what rank 0 publishes there about its "
            f"rendezvous ({len(text)} characters). Has it been changed, or another version written it? "
            "Start the job again with one version on all hosts."
        ) from None


def _port(number: Any) -> int:
    if type(number) is not int or not 0 < number < 65536:
        raise ValueError(f"{number!r} is no port")
    return number
