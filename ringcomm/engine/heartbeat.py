"""Failure detection for groups without an engine: heartbeats, late ranks, and the timeline.

An engine does all this besides its work. A process group of ``torch.distributed`` has nothing to
match by name, and so no engine, but its ranks freeze and lose their cables like others.
"""

from __future__ import annotations

import logging
import threading
from typing import Any, Callable, List, Optional, Sequence

from ..clock import Clock, monotonic
from ..collective.progress import Progress
from ..errors import BrokenInvariantError, ProtocolError, RingcommError
from ..transport.base import Fabric, StoppableWatch, Stopped
from ..wire.messages import Message
from .failure_detector import SilenceLimits
from .mismatch import whereabouts
from .observer import Observer, Sink
from .peer_channels import PeerChannels
from .stacks import main_stack

logger = logging.getLogger("ringcomm.engine")


class HeartbeatThread:
    """A thread that sends and receives heartbeats on links that only it uses. It sleeps nearly always.

    ``failed`` is called in the thread, as the last thing that it does, when the group has come to its end;
    ``elsewhere`` returns what this process waits for while it does not come to a call here, or "".
    """

    def __init__(
        self,
        fabric: Fabric,
        hosts: Sequence[str],
        limits: SilenceLimits,
        reporter: Any,
        progress: Callable[[], Progress],
        failed: Callable[[RingcommError], None],
        name: str,
        elsewhere: Callable[[], str] = str,
        clock: Clock = monotonic,
    ) -> None:
        self.rank = fabric.rank
        self._fabric = fabric
        self._hosts = hosts
        self._name = name
        self._elsewhere = elsewhere
        self._clock = clock
        self._reporter = reporter
        self._failed = failed
        self._lock = threading.Lock()
        self._outbox: List[Message] = []
        self._ended = False
        self._watch = fabric.watch = StoppableWatch(reporter)

        def lost(peer: int, why: str, kind: str) -> BaseException:
            error: BaseException = reporter.report_lost(peer, self._peers.doing(), why, kind)
            return error

        self._peers = PeerChannels(fabric, hosts, limits, lost, lambda: (progress(), Progress()), clock)
        reporter.heard_and_silent = self._peers.divided
        fabric.make_wakeable()
        self._thread = threading.Thread(target=self._main, name=f"ringcomm-heartbeat ({name})", daemon=True)
        self._thread.start()

    # ---- for all threads ---------------------------------------------------------------------

    @property
    def observer(self) -> Optional[Observer]:
        """The observer that receives this rank's events, if there is one."""
        return self._peers.tracing.observer

    def observe(self, observer: Optional[Observer], sink: Optional[Sink] = None) -> None:
        """Bring what an observer collects to rank 0's ``sink``; None: send what the last one has."""
        with self._lock:
            self._outbox += self._peers.tracing.attach(observer, sink)
        self._fabric.wake()

    def settle(self, limit_s: float) -> None:
        """Wait for what is on its way at the end; see :meth:`.PeerChannels.settle`."""
        self._peers.settle(limit_s, lambda: self._outbox, lambda: self._ended)

    def stop(self) -> None:
        """End the thread, and send the other ranks a goodbye."""
        self._watch.stopping = True
        self._fabric.wake()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self._reporter.heard_and_silent = None
        self._peers.close()

    # ---- the thread --------------------------------------------------------------------------

    def _main(self) -> None:
        try:
            while True:
                self._turn()
                reading, writing = self._peers.messages.waiting_for()
                self._fabric.wait(reading, writing, 0.0 if self._outbox else self._peers.alarm_s())
        except Stopped:
            pass  # as it was told to
        except RingcommError as error:
            self._end(error)
        except Exception as error:  # noqa: BLE001 - without this thread no failure is detected
            logger.exception("the watch over %s failed on rank %d", self._name, self.rank)
            self._end(BrokenInvariantError(f"watch over {self._name}: {type(error).__name__}: {error}"))
        finally:
            self._ended = True

    def _end(self, error: RingcommError) -> None:
        self._ended = True
        self._failed(error)

    def _turn(self) -> None:
        peers, now_s = self._peers, self._clock()
        with self._lock:
            outbox, self._outbox = self._outbox, []
        for message in outbox:
            peers.tracing.deliver(message)
        peers.messages.flush()
        self._watch.check()
        peers.awake()
        peers.pulse()
        for peer, message in peers.take_received():
            self._take(peer, message)
        peers.note_closed(self._reporter)
        if self.rank == 0:
            self._look_for_late()
        peers.tracing.flush(now_s)

    def _take(self, peer: int, message: Message) -> None:
        if message["type"] == "explain":
            self._peers.messages.send({"type": "stack", "text": self._where()})
        elif message["type"] == "stack" and self.rank == 0:
            self._send_where(peer, str(message["text"]))
        else:
            raise ProtocolError(f"rank {peer} may not send {message['type']!r} to rank {self.rank}")

    def _look_for_late(self) -> None:
        """Report which ranks have not entered a call, and where they are. The call's own limit ends it."""
        late = self._peers.progress_reports.late((), self._clock())
        if late is None:
            return
        logger.warning("%s: %s.", self._name[:1].upper() + self._name[1:], late.text)
        for rank in late.ranks:
            if rank == self.rank:
                self._send_where(rank, self._where())
            else:
                self._peers.messages.send({"type": "explain"}, rank)

    def _where(self) -> str:
        """Return where this rank is instead. If it waits itself, what it waits for says more than a stack."""
        elsewhere = self._elsewhere()
        return f"  {elsewhere}\n" if elsewhere else main_stack()

    def _send_where(self, rank: int, stack: str) -> None:
        logger.warning("%s", whereabouts(rank, self._hosts[rank], stack))
