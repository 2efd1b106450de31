"""The registry of those that prepare data, served by one process and asked by all others.

The service runs in rank 0 of the job that prepares data; training ranks belong to another job. Its addresses
and its key reach them in a file that rank 0 writes.
"""

from __future__ import annotations

import atexit
import socket
import threading
from typing import Callable, Dict, List, Mapping, Optional, Sequence, Tuple

from ..clock import Deadline, monotonic
from ..config import Settings
from ..errors import (
    AuthenticationError,
    ConfigError,
    PeerLostError,
    ProtocolError,
    RefusedError,
    StartTimeoutError,
)
from ..rendezvous.actions import Timer
from ..rendezvous.connect_server import DIAL_S, reach
from ..rendezvous.message_server import MessageServer
from ..transport.nics import own_addresses
from ..transport.reactor import Reactor
from ..wire.auth import Claim, Purpose, job_digest
from ..wire.messages import MAX_REPORT_BYTES, Message, MessageReader, encode
from ..wire.signing import Session
from .registry import Registry

Addresses = Mapping[str, Sequence[Tuple[str, int]]]
"""By network interface: addresses and ports."""

JOB = "tf.data service"
_RETRY_S = 0.25
_PATIENCE_S = 3.0
"""For how long it is dialled although every address refuses: it has served since before others knew of it."""
_ANSWER_S = 30.0
"""How long the registry may take to say something that it does not have to wait for."""
_ALIVE = (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4))
"""How the system finds out that the other host has gone without a word, during waits without a limit."""


class ComputeService(MessageServer):
    """Serves the registry.

    Args:
        dispatchers: how many there will be.
        workers_per_dispatcher: how many workers each of them will have.
        key: what others must prove to hold.
        nics: interfaces to listen on, as in ``RINGCOMM_IFACE``; None: as that says.
        patience_s: for how long others may come when all training processes are gone, before it is over.

    Raises:
        ConfigError: there shall be fewer than one, or the interfaces make no sense.
        StartupError: no address can be listened on.
    """

    def __init__(
        self,
        dispatchers: int,
        workers_per_dispatcher: int,
        key: bytes,
        nics: Optional[Sequence[str]] = None,
        patience_s: float = 60.0,
    ) -> None:
        if min(dispatchers, workers_per_dispatcher) <= 0:
            raise ConfigError(
                "There must be at least one dispatcher and one worker for each, not "
                f"{dispatchers} and {workers_per_dispatcher}."
            )
        spec = ",".join(nics) if nics else Settings.from_environment().iface
        interfaces = {item.address: item.name for item in own_addresses(spec) if not item.scope}
        super().__init__(
            title="registry of data workers", key=key, job=JOB, purpose=Purpose.COMPUTE,
            addresses=list(interfaces), forwarded=Settings.from_environment().allow_forwarding,
        )  # fmt: skip
        self._registry = Registry(dispatchers, workers_per_dispatcher, patience_s)
        self._where: Dict[str, List[Tuple[str, int]]] = {}
        for address, port in self.start():
            self._where.setdefault(interfaces[address], []).append((address, port))

    def addresses(self) -> Dict[str, List[Tuple[str, int]]]:
        """Where it can be reached: addresses and ports by interface."""
        return {name: list(pairs) for name, pairs in self._where.items()}

    def shutdown(self) -> None:
        """Tell all who wait for it that training is over, and stop serving."""
        self.order(lambda: self._take(0, {"type": "finish"}))
        self.stop()

    def arrived(self, number: int) -> None:
        """Notice it if that process's host goes without a word."""
        _notice_silence(self._connections[number].sock)

    def heard(self, number: int, message: Message) -> None:
        """Somebody registers, or asks."""
        self._take(number, message)

    def _take(self, number: int, message: Message) -> None:
        for action in self._registry.heard(number, message):
            self.tell(action.connection, action.message)

    def lost(self, number: int) -> None:
        """Somebody needs to be told nothing any more, or does not train any more."""
        for action in self._registry.lost(number, monotonic()):
            if isinstance(action, Timer):
                self.after(action.delay_s, self._tick)
            else:
                self.tell(action.connection, action.message)

    def _tick(self) -> None:
        for action in self._registry.tick(monotonic()):
            self.tell(action.connection, action.message)


class ComputeClient:
    """Asks the registry. Every call is a connection of its own, and may come from any thread.

    All methods raise AuthenticationError if the registry holds another key, StartTimeoutError if it cannot be
    reached in time, RefusedError if it does not agree, and PeerLostError if it goes away meanwhile.

    Args:
        compute_addresses: what :meth:`ComputeService.addresses` says.
        key: the service's.
        verbose: without effect; Horovod has it.
    """

    def __init__(self, compute_addresses: Addresses, key: bytes, verbose: int = 1) -> None:
        self._endpoints = [(host, port) for pairs in compute_addresses.values() for host, port in pairs]
        self._key = key

    def register_dispatcher(self, dispatcher_id: int, dispatcher_address: str) -> None:
        """Say where a dispatcher is."""
        self._say({"type": "dispatcher", "number": dispatcher_id, "address": dispatcher_address})

    def register_worker_for_dispatcher(self, dispatcher_id: int, worker_id: int) -> None:
        """Say that a worker is ready, and whose it is."""
        self._say({"type": "worker", "dispatcher": dispatcher_id, "number": worker_id})

    def wait_for_dispatcher_registration(self, dispatcher_id: int, timeout: float, whose: str = "") -> str:
        """Wait for a dispatcher.

        Args:
            timeout: in seconds.
            whose: who is to register it, for the error.

        Returns:
            where it is.

        Raises:
            StartTimeoutError: it has not been registered in time.
        """
        standing = self._watch(
            dispatcher_id, timeout, lambda standing: bool(standing["address"]),
            lambda standing: f"dispatcher {dispatcher_id} has not been registered{whose and ' by ' + whose}",
        )  # fmt: skip
        return str(standing["address"])

    def wait_for_dispatcher_worker_registration(self, dispatcher_id: int, timeout: float) -> None:
        """Wait for all workers of a dispatcher.

        Args:
            timeout: in seconds.

        Raises:
            StartTimeoutError: not all of them have been registered in time; the message names the missing.
        """
        self._watch(
            dispatcher_id, timeout, lambda standing: not standing["missing"],
            lambda standing: f"of dispatcher {dispatcher_id}'s workers these have not registered: "
            + ", ".join(f"rank {worker}" for worker in standing["missing"]) + " of the compute job",
        )  # fmt: skip

    def shutdown(self) -> None:
        """Say that training is over: the compute job ends."""
        self._say({"type": "finish"})

    def wait_for_shutdown(self) -> str:
        """Wait, without a limit, until training is over.

        Returns:
            nothing if somebody has said so, otherwise why it must be: those who trained are gone.
        """
        with _Line(self._endpoints, self._key, Deadline(_ANSWER_S)) as line:
            line.tell({"type": "attend"})
            message = line.hear("over", Deadline(None))
        return "" if message is None else str(message["reason"])

    def stay(self, timeout: float) -> None:
        """Be one of those who train, until this process ends.

        Args:
            timeout: in seconds, for the registry to take note.
        """
        with _staying:
            if self._key not in _kept:
                deadline = Deadline(timeout)
                line = _Line(self._endpoints, self._key, deadline)
                line.ask({"type": "train"}, deadline)
                _kept[self._key] = line
                atexit.register(line.close)

    def own_address(self, timeout: float) -> str:
        """The address by which other hosts are most likely to reach this one.

        That is the one which leads to the registry's host, and on that host itself the first of those that
        may be used (``RINGCOMM_IFACE``).
        """
        with _Line(self._endpoints, self._key, Deadline(timeout)) as line:
            here, there = line.ends()
        if here == there:
            usable = own_addresses(Settings.from_environment().iface)
            here = next(item.address for item in usable if not item.scope)
        return here

    def _say(self, message: Message) -> None:
        deadline = Deadline(_ANSWER_S)
        with _Line(self._endpoints, self._key, deadline) as line:
            line.ask(message, deadline)

    def _watch(
        self,
        dispatcher_id: int,
        timeout_s: float,
        enough: Callable[[Message], bool],
        complaint: Callable[[Message], str],
    ) -> Message:
        deadline = Deadline(timeout_s)
        with _Line(self._endpoints, self._key, deadline) as line:
            line.tell({"type": "watch", "dispatcher": dispatcher_id})
            standing = line.hear("standing", deadline)
            while standing is not None and not enough(standing):
                last, standing = standing, line.hear("standing", deadline)
                if standing is None:
                    raise StartTimeoutError(
                        f"After {timeout_s:g} s {complaint(last)}. Look into its output for what keeps it, "
                        "or give it more time (timeout, --timeout)."
                    )
            if standing is None:
                raise StartTimeoutError(f"{line.where} has not answered within {timeout_s:g} s.")
            return standing


class _Line:
    """A proven connection to the registry, for one question."""

    def __init__(self, endpoints: Sequence[Tuple[str, int]], key: bytes, deadline: Deadline) -> None:
        self._sock, self._session = _dial(endpoints, key, deadline)
        self._reader = MessageReader(MAX_REPORT_BYTES, self._session)
        self._heard: List[Message] = []
        self.where = f"The registry of data workers at {self._sock.getpeername()[0]}"

    def __enter__(self) -> _Line:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._sock.close()

    def ask(self, message: Message, deadline: Deadline) -> None:
        """Say something that is only noted."""
        self.tell(message)
        if self.hear("noted", deadline) is None:
            raise StartTimeoutError(
                f"{self.where} took {message['type']!r} and has not answered within {deadline.timeout_s:g} s."
            )

    def ends(self) -> Tuple[str, str]:
        return str(self._sock.getsockname()[0]), str(self._sock.getpeername()[0])

    def tell(self, message: Message) -> None:
        try:
            self._sock.settimeout(_ANSWER_S)
            self._sock.sendall(encode(message, self._session))
        except OSError as problem:
            raise self._gone(str(problem.strerror or problem).lower()) from None

    def hear(self, kind: str, deadline: Deadline) -> Optional[Message]:
        """The next message of this kind; None if the deadline passes first."""
        while not self._heard:
            if deadline.expired():
                return None
            self._sock.settimeout(None if deadline.timeout_s is None else max(0.01, deadline.remaining_s()))
            try:
                data = self._sock.recv(65536)
            except socket.timeout:
                continue
            except OSError as problem:
                raise self._gone(str(problem.strerror or problem).lower()) from None
            if not data:
                raise self._gone("it closed the connection")
            try:
                self._heard.extend(self._reader.feed(data))
            except ProtocolError as problem:
                raise self._gone(str(problem)) from None
        message = self._heard.pop(0)
        if message["type"] == "denied":
            raise RefusedError(f"{self.where} refuses: {message['reason']}.")
        if message["type"] != kind:
            raise self._gone(f"it sent {message['type']!r} where {kind!r} belongs")
        return message

    def _gone(self, reason: str) -> PeerLostError:
        return PeerLostError(
            f"{self.where} is gone ({reason}): rank 0 of the compute job, which serves it, has ended.", rank=0
        )


_kept: Dict[bytes, _Line] = {}
"""By the key of the registry, the connection that says that this process trains."""
_staying = threading.Lock()


def _dial(
    endpoints: Sequence[Tuple[str, int]], key: bytes, deadline: Deadline
) -> Tuple[socket.socket, Optional[Session]]:
    claim = Claim(Purpose.COMPUTE, job_digest(JOB))
    reactor = Reactor()
    try:
        while True:
            found = reach(reactor, endpoints, key, claim, None, min(DIAL_S, max(0.5, deadline.remaining_s())))
            if found.sock is not None:
                _notice_silence(found.sock)
                return found.sock, found.session
            if found.refused_by is not None:
                where, reason = found.refused_by
                raise AuthenticationError(
                    f"The registry of data workers at {where} was not accepted: {reason}. The config file "
                    "must be the one that the compute job which runs now has written."
                )
            hopeless = not found.silent and deadline.elapsed_s() >= _PATIENCE_S
            if hopeless or deadline.expired():
                raise StartTimeoutError(
                    "No answer from the registry of data workers within "
                    f"{deadline.elapsed_s():.0f} s. Tried:\n"
                    + "\n".join(found.tried)
                    + "\nDoes the compute job that wrote the config file still run (an older file may have "
                    "been left over), and does a firewall allow this host to reach it?"
                )
            pause = Deadline(_RETRY_S)
            while not pause.expired():
                reactor.run_once(pause.remaining_s())
    finally:
        reactor.close()


def _notice_silence(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _ALIVE:
        option = getattr(socket, name, None)
        if option is not None:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
