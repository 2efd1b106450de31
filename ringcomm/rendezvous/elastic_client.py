"""A process's side of an elastic job's rendezvous: join the next view, on the connection of the last one."""

from __future__ import annotations

import socket
from typing import Any, Dict, List, Optional, Sequence

from ..clock import Deadline
from ..config import Membership, Settings
from ..errors import ExcludedError, StartTimeoutError, StartupError
from ..transport.reactor import READ
from ..wire.messages import Message
from .client import Joiner
from .connect_server import DIAL_S
from .elastic_control import ElasticChannel, Resume
from .joined import Joined

NEW = Resume()
_MAX_ATTEMPTS = 5
"""After so many views whose links could not be used the cause is this process, not a lost member."""


def join_view(membership: Membership, settings: Settings, resume: Resume = NEW) -> Joined:
    """Become a rank of the next view.

    A process that has been a member of the last view must have closed its links.

    Args:
        membership: how this process takes part in the job.
        settings: the tunables.
        resume: what this process has kept of the last view; by default it is new.

    Raises:
        ExcludedError: this process is not to be in the job any more.
        StartupError: (or one of its subclasses) the job cannot go on with this process; the message says why.
        ConfigError: ``settings.iface`` selects nothing on this machine, or encryption is required and
            there is no certificate.
    """
    return ElasticJoiner(membership, settings, resume).join()


def running_size(membership: Membership, settings: Settings) -> int:
    """The number of ranks of the present view; 0 if there has been none yet, so that this process is to join.

    Raises:
        StartupError: (or one of its subclasses) the rendezvous does not answer; the message says why.
    """
    return ElasticJoiner(membership, settings, NEW).count()


class ElasticJoiner(Joiner):
    """As :class:`.Joiner`; it waits for the next view as long as the rendezvous answers.

    Args:
        membership, settings: as for :class:`.Joiner`.
        resume: what this process has kept of the last view.
    """

    def __init__(self, membership: Membership, settings: Settings, resume: Resume) -> None:
        super().__init__(membership, settings, listens=True, watched=None)
        self._resume = resume
        self._member = membership.member if resume.member is None else resume.member
        self._changes = 0
        self._failed_view = False
        self._channel: Optional[ElasticChannel] = None
        self._attempts = 0
        self._size: Optional[int] = None

    def count(self) -> int:
        """Ask how many ranks there are; see :func:`running_size`."""
        try:
            sock = self._control = self._dial_rendezvous()
            self.reactor.watch(sock, READ, self._readable)
            self._send({"type": "count"})
            while self._size is None and self._failure is None:
                self._wait()
        finally:
            self.abandon()
            self.reactor.close()
        if self._size is None:
            assert self._failure is not None
            raise self._failure
        return self._size

    def _dial_rendezvous(self) -> socket.socket:
        if self._resume.connection is None:
            return super()._dial_rendezvous()
        sock, self._reader, self._session = self._resume.connection
        return sock

    def _introduction(self, addresses: List[Dict[str, Any]]) -> Message:
        message = super()._introduction(addresses)
        if self._member is not None:
            message["member"] = self._member
        return {**message, "epoch": self._resume.epoch, "position": self._resume.position}

    def _wait(self) -> None:
        if self._failed_view:
            self._start_over()
        elif self._deadline.expired():
            raise StartTimeoutError(
                f"The rendezvous has sent nothing for {self._deadline.timeout_s:g} s: its host is down, or "
                "this host is cut off from it. The job may be going on there without this process."
            )
        else:
            self.reactor.run_once(self._deadline.remaining_s())

    def _start_over(self) -> None:
        """A view has failed while its members were connecting: ask for the next one."""
        self._failed_view = False
        self._assignment = self._go = None
        if self._setup is not None:
            self._setup.close()
        self._introduce(self._interfaces())

    def _finish(self) -> Joined:
        try:
            return super()._finish()
        except StartupError:
            # A member may have been lost after the last link was established: ask for the next view.
            self._attempts += 1
            resume = self._resume if self._channel is None else self._channel.detach(self._resume.position)
            if self._attempts == _MAX_ATTEMPTS or self._channel is None or resume.connection is None:
                raise
        self._resume, self._failed_view, self._go = resume, True, None
        self.reactor.watch(resume.connection[0], READ, self._readable)
        return self._complete()

    def _connection_failed(self, text: str) -> None:
        # Without its control connection this process is lost for the others.
        assert self._control is not None
        self.reactor.forget(self._control)
        if self._resume.epoch >= 0:
            text = f"No view after epoch {self._resume.epoch} for this process. {text}"
        self._failure = self._failure or StartupError(text)

    def _handle(self, message: Message) -> None:
        # The rendezvous pings processes that wait, so silence means that it cannot be reached.
        self._deadline = Deadline((self.settings.dead_after_s or self.settings.start_timeout_s) + DIAL_S)
        kind = message["type"]
        if kind == "excluded":
            raise ExcludedError(str(message["reason"]))
        if kind == "counted":
            self._size = int(message["size"])
        elif kind == "waiting":
            self._member = int(message["member"])
        elif kind == "updated":
            self._changes |= int(message["change"])
        elif kind == "announced":
            pass  # the program does not run between two views
        elif kind == "abort" and "epoch" in message:
            # An older epoch's abort was on its way while this process asked for the next view.
            generation = -1 if self._assignment is None else int(self._assignment["generation"])
            self._failed_view = self._failed_view or int(message["epoch"]) == generation
            self._go = None if self._failed_view else self._go
        else:
            if kind in ("probe", "assign"):
                self._changes = 0  # Earlier reports are about processes that this view takes into account.
            super()._handle(message)

    def _make_control(self, sock: socket.socket, rank: int, hosts: Sequence[str]) -> ElasticChannel:
        assert self._session is not None and self._assignment is not None
        own = next(item for item in self._assignment["members"] if item["rank"] == rank)
        self._channel = ElasticChannel(
            sock, self._reader, rank, hosts, self._session, int(own["member"]),
            int(self._assignment["generation"]), self._changes,
        )  # fmt: skip
        return self._channel
