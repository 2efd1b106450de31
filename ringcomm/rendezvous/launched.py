"""Joins a job whose ranks srun or mpirun has started: rank 0 serves the rendezvous, the others look it up.

Its address and the job's key pass through a file in a directory that all hosts share and that this user can
read.
"""

from __future__ import annotations

import errno
import hashlib
import json
import secrets
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any, Optional, Tuple

from ..clock import Deadline
from ..config import Membership, Settings
from ..configuration.other_launchers import Launched
from ..errors import ConfigError, StartTimeoutError, StartupError
from ..storage.files import read_private, write_private
from ..storage.keys import make_certificate
from ..transport.nics import machine
from .client import Joined, join
from .connect_server import Moved, Watched
from .embedded import EmbeddedRendezvous

LOOK_AGAIN_S = 0.1
GRACE_S = 10.0
"""How long an address from a file may not answer: the file may be left from an earlier start."""
_LIMIT_BYTES = 1 << 20

_turns = 0


class FileNotice:
    """The file where rank 0 publishes a text: with mode 0600, in a directory that all hosts share. ``turn``:
    how often this process has joined before.
    """

    def __init__(self, launched: Launched, turn: int) -> None:
        self._launched = launched
        self._folder = Path(launched.folder).expanduser()
        name = hashlib.sha256(f"{launched.job} turn {turn}".encode()).hexdigest()[:32]
        self._path = self._folder / f"job-{name}"
        self.place = f"the file {self._path}"
        self._read = ""

    def publish(self, text: str, deadline: Deadline) -> None:
        """Write the file in one step."""
        try:
            write_private(self._path, text.encode())
        except OSError as problem:
            raise ConfigError(f"Rank 0 cannot write in {self._folder}: {problem.strerror}. {_HINT}") from None

    def read(self, deadline: Deadline) -> str:
        """Wait for the file."""
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
        """Return whether the file has changed since it was read."""
        latest = self._content()
        return latest not in ("", self._read)

    def withdraw(self) -> None:
        """Remove the file."""
        self._path.unlink(missing_ok=True)  # the other processes may remove it as well


_HINT = (
    "All hosts must share a directory: the home directory, or another one that RINGCOMM_SHARED_DIR names. "
    "Without one start the program with ringrun."
)


def join_launched(
    membership: Membership, settings: Settings
) -> Tuple[Joined, Optional[EmbeddedRendezvous], Membership]:
    """Join the job that srun or mpirun has started. Return the place in the job, on rank 0 the rendezvous
    that it serves, and the membership with address and key. Raises StartupError if the ranks did not find
    each other, ConfigError if the shared directory cannot be used.
    """
    global _turns
    launched = membership.launched
    assert launched is not None
    turn, _turns = _turns, _turns + 1
    deadline = Deadline(settings.start_timeout_s)
    notice = FileNotice(launched, turn)
    if launched.rank == 0:
        return _serve(notice, membership, settings, deadline)
    while True:
        full = _with_notice(membership, notice.read(deadline), notice.place)
        left = replace(settings, start_timeout_s=max(1.0, deadline.remaining_s()))
        try:
            return join(full, left, watched=Watched(notice.moved, GRACE_S)), None, full
        except Moved:
            continue  # the file was left from an earlier start


def _serve(
    notice: FileNotice, membership: Membership, settings: Settings, deadline: Deadline
) -> Tuple[Joined, Optional[EmbeddedRendezvous], Membership]:
    key, certificate = secrets.token_bytes(32), make_certificate() if settings.encrypt else ""
    job = f"launched-{secrets.token_hex(8)}"
    embedded, endpoints = EmbeddedRendezvous.serve(key, certificate, job, membership.size, settings)
    try:
        facts = {"job": job, "key": key.hex(), "certificate": certificate, "endpoints": endpoints}
        text = json.dumps({**facts, "machine": machine()})
        try:
            notice.publish(text, deadline)
            full = _with_notice(membership, text, notice.place)
            return join(full, settings), embedded, full
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
    if isinstance(number, bool) or not isinstance(number, int) or not 0 < number < 65536:
        raise ValueError(f"{number!r} is no port")
    return number
