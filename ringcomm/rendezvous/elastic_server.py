"""The rendezvous server of an elastic job: sockets and a thread around :mod:`.elastic`."""

from __future__ import annotations

from typing import Callable, Dict, List, Optional, Sequence

from ..clock import monotonic
from ..config import Slot
from ..errors import ProtocolError
from ..transport.secure import Encryption
from ..version import __version__
from ..wire.messages import Message
from .actions import Action, Notice
from .elastic import ElasticRendezvous
from .next_view import Limits
from .server import HANDLERS, JobServer

ElasticHandler = Callable[[ElasticRendezvous, int, Message, float], List[Action]]

_OWN: Dict[str, ElasticHandler] = {
    "join": ElasticRendezvous.joined,
    "count": ElasticRendezvous.count,
    "pong": ElasticRendezvous.answered,
    "leaving": ElasticRendezvous.leaving,
}


class ElasticServer(JobServer):
    """Connects the processes of an elastic job, and publishes a view of them after every change.

    Args:
        key: the job's secret.
        job: the job's name; processes of others are refused.
        addresses: where to listen. Each is bound by itself; never all interfaces.
        start_timeout_s: how long the first view waits for all processes, in seconds.
        notify: called in the server's thread with every :class:`~ringcomm.rendezvous.actions.Notice`.
        port: fixed port for every address; 0 lets the system choose.
        encryption: how connections are encrypted; None: not at all.
        forwarded: see :class:`~ringcomm.transport.accept.Acceptor`.
        min_size: with fewer ranks the job waits for more.
        max_size: at most so many ranks are in a view; None: any number.
        start_size: the first view waits for so many processes, if no launcher announces them; None:
            ``min_size``.
        elastic_timeout_s: how long the job waits while there are fewer than ``min_size``, in seconds.
        reset_limit: the most views after the first; None: any number.
        launched: True: only processes that :meth:`expect` has announced may join; False: any with the key.
    """

    def __init__(
        self,
        *,
        key: bytes,
        job: str,
        addresses: Sequence[str],
        start_timeout_s: float,
        notify: Callable[[Notice], None],
        port: int = 0,
        encryption: Optional[Encryption] = None,
        forwarded: bool = False,
        min_size: int = 1,
        max_size: Optional[int] = None,
        start_size: Optional[int] = None,
        elastic_timeout_s: float = 600.0,
        reset_limit: Optional[int] = None,
        launched: bool = False,
    ) -> None:
        start = min_size if start_size is None else start_size
        limits = Limits(min_size, max_size, start, start_timeout_s, elastic_timeout_s, reset_limit)
        self._elastic = ElasticRendezvous(limits, __version__, launched)
        super().__init__(
            self._elastic,
            key=key,
            job=job,
            addresses=addresses,
            notify=notify,
            port=port,
            encryption=encryption,
            forwarded=forwarded,
        )

    def expect(self, member: int, slot: Slot, host: str) -> None:
        """Announce a process that is about to be started (any thread).

        Args:
            member: its member number, which no other process of this job has had.
            slot: its place.
            host: the name of its host.
        """
        self.order(lambda: self._act(self._elastic.expect(member, slot, host)))

    def process_exited(self, member: int, how: str, ok: bool) -> None:
        """Report to the rendezvous that a member's process ended (any thread).

        Args:
            member: its member number.
            how: how it ended, such as ``exit code 3`` or ``killed by SIGKILL``.
            ok: whether that is a normal end.
        """
        self.order(lambda: self._act(self._elastic.process_exited(member, how, ok, monotonic())))

    def exclude(self, member: int, why: str) -> None:
        """Have a member leave at the next boundary between steps, without an error (any thread).

        Args:
            member: its member number.
            why: the reason, as text.
        """
        self.order(lambda: self._act(self._elastic.exclude(member, why, monotonic())))

    def handle(self, number: int, message: Message) -> List[Action]:
        """Give one message to the state machine; the actions that it returns."""
        kind = message["type"]
        own = _OWN.get(kind)
        if own is not None:
            return own(self._elastic, number, message, monotonic())
        handler = HANDLERS.get(kind)
        if handler is None:
            raise ProtocolError(f"a rank may not send {kind!r}")
        return self._elastic.relay(handler, number, message, monotonic())
