"""The server of the registry of dispatchers and workers that prepare data, and its client.

The server runs in rank 0 of the job that prepares data (the compute job); training ranks belong to another
job. They read the server's addresses and its key from a file that rank 0 writes.
"""

from __future__ import annotations

import atexit
import contextlib
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
from ..rendezvous.connect_server import DIAL_S, REFUSED_S, pause, reach
from ..rendezvous.message_server import MessageServer
from ..transport.nics import machine, own_addresses, spec_of
from ..transport.reactor import Reactor
from ..wire.auth import Claim, Purpose, job_digest
from ..wire.messages import MAX_REPORT_BYTES, Message, MessageReader, encode
from ..wire.signing import Session
from .registry import Registry

Addresses = Mapping[str, Sequence[Tuple[str, int]]]
"""By network interface: addresses and ports."""

JOB = "tf.data service"
_ANSWER_S = 30.0
"""How long the registry may take to answer a request that it can answer at once."""
_ALIVE = (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4))
"""TCP keepalive: detects a host that has failed or is cut off, during waits without a limit."""


class ComputeService(MessageServer):
    """Serves the registry.

    Args:
        dispatchers: how many there will be.
        workers_per_dispatcher: how many workers each of them will have.
        key: the secret that clients must prove to hold.
        nics: interfaces to listen on, as in ``RINGCOMM_IFACE``; None: the value of that variable.
        grace_s: for how many seconds new training processes may connect when all others are gone, before
            training counts as over.

    Raises:
        ConfigError: a number is less than one, or the interfaces do not exist.
        StartupError: no address can be listened on.
    """

    def __init__(
        self,
        dispatchers: int,
        workers_per_dispatcher: int,
        key: bytes,
        nics: Optional[Sequence[str]] = None,
        grace_s: float = 60.0,
    ) -> None:
        if min(dispatchers, workers_per_dispatcher) <= 0:
            raise ConfigError(
                "There must be at least one dispatcher and one worker for each, not "
                f"{dispatchers} and {workers_per_dispatcher}."
            )
        spec = spec_of(nics) or Settings.from_environment().iface
        interfaces = {item.address: item.name for item in own_addresses(spec) if not item.scope}
        super().__init__(
            title="registry of data workers", key=key, job=JOB, purpose=Purpose.COMPUTE,
            addresses=list(interfaces), forwarded=Settings.from_environment().allow_forwarding,
        )  # fmt: skip
        self._registry = Registry(dispatchers, workers_per_dispatcher, grace_s)
        self._where: Dict[str, List[Tuple[str, int]]] = {}
        for address, port in self.start():
            self._where.setdefault(interfaces[address], []).append((address, port))

    def addresses(self) -> Dict[str, List[Tuple[str, int]]]:
        """Return where it can be reached: addresses and ports by interface."""
        return {name: list(pairs) for name, pairs in self._where.items()}

    def machine(self) -> str:
        """An identifier of the machine on which it runs."""
        return machine()

    def shutdown(self) -> None:
        """Notify all clients that wait for the end of training, and stop serving."""
        self.order(lambda: self._take(0, {"type": "finish"}))
        self.stop()

    def arrived(self, number: int) -> None:
        """Enable keepalive for a new connection."""
        _notice_silence(self._connections[number].sock)

    def received(self, number: int, message: Message) -> None:
        """Handle a message of a client."""
        self._take(number, message)

    def _take(self, number: int, message: Message) -> None:
        for action in self._registry.received(number, message):
            self.send_message(action.connection, action.message)

    def lost(self, number: int) -> None:
        """A client's connection has ended: it waits no longer, or no longer trains."""
        for timer in self._registry.lost(number, monotonic()):
            self.after(timer.delay_s, self._tick)

    def _tick(self) -> None:
        for action in self._registry.tick(monotonic()):
            self.send_message(action.connection, action.message)


class ComputeClient:
    """A client of the registry. Every call uses a connection of its own, and may come from any thread.

    All methods raise AuthenticationError if the registry holds another key, StartTimeoutError if it cannot be
    reached in time, RefusedError if it refuses the request, and PeerLostError if it ends meanwhile.

    Args:
        compute_addresses: the result of :meth:`ComputeService.addresses`.
        key: the service's.
        verbose: without effect; Horovod has it.
        compute_machine: the result of :meth:`ComputeService.machine`. On another machine than that one, no
            address is dialled that this machine has itself. "": not known, all are dialled.
    """

    def __init__(
        self, compute_addresses: Addresses, key: bytes, verbose: int = 1, compute_machine: str = ""
    ) -> None:
        self._endpoints = [(host, port) for pairs in compute_addresses.values() for host, port in pairs]
        self._key = key
        self._elsewhere = compute_machine not in ("", machine())

    def _connect(self, deadline: Deadline) -> _Connection:
        return _Connection(self._endpoints, self._key, deadline, self._elsewhere)

    def register_dispatcher(self, dispatcher_id: int, dispatcher_address: str) -> None:
        """Register a dispatcher and its address.

        Args:
            dispatcher_id: its number, from 0.
            dispatcher_address: ``host:port``.
        """
        self._send({"type": "dispatcher", "number": dispatcher_id, "address": dispatcher_address})

    def register_worker_for_dispatcher(self, dispatcher_id: int, worker_id: int) -> None:
        """Register a worker of a dispatcher as ready.

        Args:
            dispatcher_id: the dispatcher's number, from 0.
            worker_id: the worker's number in the compute job.
        """
        self._send({"type": "worker", "dispatcher": dispatcher_id, "number": worker_id})

    def wait_for_dispatcher_registration(self, dispatcher_id: int, timeout: float, whose: str = "") -> str:
        """Wait for a dispatcher.

        Args:
            dispatcher_id: its number, from 0.
            timeout: in seconds.
            whose: the process that is to register it, for the error.

        Returns:
            its address.

        Raises:
            StartTimeoutError: it has not been registered in time.
        """
        progress = self._watch(
            dispatcher_id, timeout, lambda progress: bool(progress["address"]),
            lambda progress: f"dispatcher {dispatcher_id} has not been registered{whose and ' by ' + whose}",
        )  # fmt: skip
        return str(progress["address"])

    def wait_for_dispatcher_worker_registration(self, dispatcher_id: int, timeout: float) -> None:
        """Wait for all workers of a dispatcher.

        Args:
            timeout: in seconds.

        Raises:
            StartTimeoutError: not all of them have been registered in time; the message names the missing.
        """
        self._watch(
            dispatcher_id, timeout, lambda progress: not progress["missing"],
            lambda progress: f"of dispatcher {dispatcher_id}'s workers these have not registered: "
            + ", ".join(f"rank {worker}" for worker in progress["missing"]) + " of the compute job",
        )  # fmt: skip

    def shutdown(self) -> None:
        """Report that training is over: the compute job ends."""
        self._send({"type": "finish"})

    def wait_for_shutdown(self) -> str:
        """Wait, without a limit, until training is over.

        Returns:
            "" if a process has reported that, otherwise the reason: all training processes are gone.
        """
        with self._connect(Deadline(_ANSWER_S)) as connection:
            connection.send({"type": "attend"})
            message = connection.receive("over", Deadline(None))
        return "" if message is None else str(message["reason"])

    def stay(self, timeout: float) -> None:
        """Register this process as a training process, until it ends.

        Args:
            timeout: in seconds, for the registry to take note.
        """
        with _training_lock:
            if self._key not in _training_connections:
                deadline = Deadline(timeout)
                connection = self._connect(deadline)
                try:
                    connection.ask({"type": "train"}, deadline)
                except BaseException:
                    connection.close()
                    raise
                _training_connections[self._key] = connection
                atexit.register(connection.close)

    def own_address(self, timeout: float) -> str:
        """Return the address by which other hosts are most likely to reach this one.

        That is the one from which the registry's host is reached; on that host itself, the first of those
        that may be used (``RINGCOMM_IFACE``).

        Args:
            timeout: for reaching the registry, in seconds.
        """
        with self._connect(Deadline(timeout)) as connection:
            here, there = connection.ends()
        if here == there:
            usable = own_addresses(Settings.from_environment().iface)
            here = next((item.address for item in usable if not item.scope), here)
        return here

    def _send(self, message: Message) -> None:
        deadline = Deadline(_ANSWER_S)
        with self._connect(deadline) as connection:
            connection.ask(message, deadline)

    def _watch(
        self,
        dispatcher_id: int,
        timeout_s: float,
        enough: Callable[[Message], bool],
        complaint: Callable[[Message], str],
    ) -> Message:
        deadline = Deadline(timeout_s)
        with self._connect(deadline) as connection:
            connection.send({"type": "watch", "dispatcher": dispatcher_id})
            progress = connection.receive("standing", deadline)
            while progress is not None and not enough(progress):
                last, progress = progress, connection.receive("standing", deadline)
                if progress is None:
                    raise StartTimeoutError(
                        f"After {timeout_s:g} s {complaint(last)}. Look into its output for what keeps it, "
                        "or give it more time (timeout, --timeout)."
                    )
            if progress is None:
                raise StartTimeoutError(f"{connection.where} has not answered within {timeout_s:g} s.")
            return progress


class _Connection:
    """An authenticated connection to the registry, for one request."""

    def __init__(
        self, endpoints: Sequence[Tuple[str, int]], key: bytes, deadline: Deadline, elsewhere: bool
    ) -> None:
        self._sock, self._session = _dial(endpoints, key, deadline, elsewhere)
        self._reader = MessageReader(MAX_REPORT_BYTES, self._session)
        self._messages: List[Message] = []
        self.where = f"The registry of data workers at {self._sock.getpeername()[0]}"

    def __enter__(self) -> _Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._sock.close()

    def ask(self, message: Message, deadline: Deadline) -> None:
        """Send a message, and wait until the registry has acknowledged it."""
        self.send(message)
        if self.receive("noted", deadline) is None:
            raise StartTimeoutError(
                f"{self.where} took {message['type']!r} and has not answered within {deadline.timeout_s:g} s."
            )

    def ends(self) -> Tuple[str, str]:
        return str(self._sock.getsockname()[0]), str(self._sock.getpeername()[0])

    def send(self, message: Message) -> None:
        try:
            self._sock.settimeout(_ANSWER_S)
            self._sock.sendall(encode(message, self._session))
        except OSError as problem:
            raise self._gone(str(problem.strerror or problem).lower()) from None

    def receive(self, kind: str, deadline: Deadline) -> Optional[Message]:
        """The next message of this kind; None if the deadline passes first."""
        while not self._messages:
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
                self._messages.extend(self._reader.feed(data))
            except ProtocolError as problem:
                raise self._gone(str(problem)) from None
        message = self._messages.pop(0)
        if message["type"] == "denied":
            raise RefusedError(f"{self.where} refuses: {message['reason']}.")
        if message["type"] != kind:
            raise self._gone(f"it sent {message['type']!r} where {kind!r} belongs")
        return message

    def _gone(self, reason: str) -> PeerLostError:
        return PeerLostError(
            f"{self.where} is gone ({reason}): rank 0 of the compute job, which serves it, has ended or "
            "cannot be reached.", rank=0,
        )


_training_connections: Dict[bytes, _Connection] = {}
"""By the registry's key: the connection that marks this process as a training process while it is open."""
_training_lock = threading.Lock()


def _dial(
    endpoints: Sequence[Tuple[str, int]], key: bytes, deadline: Deadline, elsewhere: bool
) -> Tuple[socket.socket, Optional[Session]]:
    claim = Claim(Purpose.COMPUTE, job_digest(JOB))
    reactor = Reactor()
    try:
        while True:
            timeout_s = min(DIAL_S, max(0.5, deadline.remaining_s()))
            found = reach(reactor, endpoints, key, claim, None, timeout_s, elsewhere=elsewhere)
            if found.sock is not None:
                _notice_silence(found.sock)
                return found.sock, found.session
            if found.refused_by is not None:
                where, reason = found.refused_by
                if found.other_version:
                    raise RefusedError(f"The registry of data workers at {where} refused this one: {reason}.")
                raise AuthenticationError(
                    f"The registry of data workers at {where} was not accepted: {reason}. The config file "
                    "must be the one that the compute job which runs now has written."
                )
            hopeless = not found.silent and deadline.elapsed_s() >= REFUSED_S
            if hopeless or deadline.expired():
                raise StartTimeoutError(
                    "No answer from the registry of data workers within "
                    f"{deadline.elapsed_s():.0f} s. Tried:\n"
                    + "\n".join(found.tried)
                    + "\nDoes the compute job that wrote the config file still run (an older file may have "
                    "been left over), and does a firewall allow this host to reach it?"
                )
            pause(reactor)
    finally:
        reactor.close()


def _notice_silence(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _ALIVE:
        with contextlib.suppress(AttributeError, OSError):  # absent, or refused: the system's own values
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
