"""A rendezvous server on the loopback, the means to join it, and what tests need around it."""

from __future__ import annotations

import gc
import secrets
import socket
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any, Callable, List, Optional, Sequence, Tuple

import numpy as np
import psutil

from ringcomm.clock import Deadline
from ringcomm.config import Membership, Settings, Slot
from ringcomm.job.context import Context
from ringcomm.rendezvous.membership import Notice, Seat
from ringcomm.rendezvous.server import RendezvousServer
from ringcomm.storage.keys import make_certificate
from ringcomm.transport.connect import PLACE_S, Acceptor, listen
from ringcomm.transport.reactor import Reactor, encryption_of
from ringcomm.wire.auth import Claim, Purpose, job_digest

KEY, JOB = b"k" * 32, job_digest("job")
CLAIM = Claim(Purpose.DIRECT, JOB, 1, 2, 3)


def opened() -> Any:
    """Return how many descriptors and threads this process has."""
    gc.collect()
    threads = [item.name for item in threading.enumerate() if not item.name.startswith("pytest_timeout")]
    return {"descriptors": psutil.Process().num_fds(), "threads": threads}


def remains(before: Any) -> str:
    """Return what this process has opened since then (see :func:`opened`) and not closed; "" if nothing.

    Threads of an earlier test may have been about to end before, so fewer of them are no difference.
    """
    now = opened()
    more = now["descriptors"] - before["descriptors"]
    threads = list((Counter(now["threads"]) - Counter(before["threads"])).elements())
    return f"{more} descriptors and the threads {threads} more" if more > 0 or threads else ""


def free_port() -> int:
    """A port of the loopback on which nothing listens, for a server that is started later.

    It is below those that a system chooses from, so that no connection gets it meanwhile.
    """
    while True:
        port = secrets.choice(range(20_000, 32_000))
        with socket.socket() as sock:
            if sock.connect_ex(("127.0.0.1", port)) != 0:
                return port


def eventually(condition: Callable[[], bool], timeout_s: float = 30.0) -> bool:
    """Return whether the condition comes true within the time."""
    until_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > until_s:
            return False
        time.sleep(0.01)
    return True


def turn_until(reactor: Reactor, condition: Callable[[], Any]) -> None:
    """Serve what comes until the condition is true, which must not take long."""

    def turn() -> bool:
        reactor.run_once(0.01)
        return bool(condition())

    assert eventually(turn)


def together(contexts: List[Context], action: Callable[[Context], Any]) -> List[Any]:
    """Call ``action`` on all contexts at once, each in a thread; the results in rank order."""
    with ThreadPoolExecutor(len(contexts)) as pool:
        return list(pool.map(action, contexts))


def sum_of_ranks(context: Context) -> float:
    """Return what an all-reduce gives to which every rank contributes its number."""
    return float(context.allreduce(np.full(1000, float(context.rank)), op=1)[0])


class Door:
    """A listener with an acceptor: authenticated connections with their claims arrive in `arrived`, the
    reasons for others in `refused`.
    """

    def __init__(
        self,
        reactor: Reactor,
        listener: Optional[socket.socket] = None,
        place_s: float = PLACE_S,
        certificate: str = "",
    ):
        self.reactor = reactor
        self.listener = listener or listen("127.0.0.1")
        self.address = self.listener.getsockname()[:2]
        self.arrived: List[Tuple[socket.socket, Claim]] = []
        self.refused: List[str] = []
        self.acceptor = Acceptor(
            reactor,
            [self.listener],
            KEY,
            JOB,
            lambda sock, claim, session: self.arrived.append((sock, claim)),
            lambda origin, reason: self.refused.append(reason),
            encryption_of(certificate),
            place_s,
        )

    def turn_for(self, seconds: float) -> None:
        """Serve for so long."""
        deadline = Deadline(seconds)
        while not deadline.expired():
            self.reactor.run_once(deadline.remaining_s())

    def turn_until(self, condition: Callable[[], Any]) -> None:
        """Serve until the condition is true, which must not take long."""
        turn_until(self.reactor, condition)

    def close(self) -> None:
        """Close the door and what came through it."""
        self.acceptor.close()
        for sock, _ in self.arrived:
            sock.close()


class Service:
    """A rendezvous server of a job of `size` ranks on one host (or on `hosts`, with these numbers of ranks),
    and the means to join it. `notices` are those to the launcher.
    """

    def __init__(
        self,
        size: int,
        start_timeout_s: float = 20.0,
        job: str = "job",
        encrypt: bool = False,
        transport: str = "auto",
        hosts: Sequence[int] = (),
    ):
        self.size = size
        self.places = [
            Slot(host, local) for host, ranks in enumerate(hosts or [size]) for local in range(ranks)
        ]
        self.job = job
        self.key = secrets.token_bytes(32)
        self.certificate = make_certificate() if encrypt else ""
        self.notices: List[Notice] = []
        self.settings = Settings(
            start_timeout_s=start_timeout_s,
            timeout_s=20.0,
            spin_us=0.0,
            transport=transport,
        )
        self.server = RendezvousServer(
            key=self.key,
            job=job,
            seats=[Seat(slot, f"host{slot.host_index}" if hosts else "here") for slot in self.places],
            size=size,
            addresses=["127.0.0.1"],
            start_timeout_s=start_timeout_s,
            notify=self.notices.append,
            encryption=encryption_of(self.certificate),
        )
        self.endpoints = tuple(self.server.start())

    def membership(self, rank: int, **change: Any) -> Membership:
        """That of one rank."""
        values = {
            "size": self.size,
            "rendezvous": self.endpoints,
            "key": self.key,
            "certificate": self.certificate,
            "job": self.job,
            "slot": self.places[rank],
            **change,
        }
        return Membership(**values)

    def start(self, rank: int, **change: Any) -> Context:
        """Join as this rank; returns when all have."""
        return Context.start(self.membership(rank, **change), self.settings)

    def start_all(self, stack: ExitStack) -> List[Context]:
        """Join as every rank; the contexts are closed with the stack."""
        with ThreadPoolExecutor(self.size) as pool:
            contexts = list(pool.map(self.start, range(self.size)))
        for context in contexts:
            stack.callback(context.close)
        return contexts

    def texts(self, kind: str) -> List[str]:
        """Return what the launcher was told of this kind."""
        return [notice.text for notice in self.notices if notice.kind == kind]
