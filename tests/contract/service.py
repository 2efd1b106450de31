"""A rendezvous server on the loopback, the means to join it, and what tests need around it."""

from __future__ import annotations

import gc
import secrets
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any, Callable, List, Optional

import psutil

from ringcomm.certificate import make_certificate
from ringcomm.config import Membership, Settings, Slot
from ringcomm.context import Context
from ringcomm.rendezvous.actions import Notice, Seat
from ringcomm.rendezvous.server import RendezvousServer
from ringcomm.transport.encryption import encryption_of


def opened() -> Any:
    """How many descriptors and threads this process has."""
    gc.collect()
    threads = [item.name for item in threading.enumerate() if not item.name.startswith("pytest_timeout")]
    return {"descriptors": psutil.Process().num_fds(), "threads": threads}


def eventually(condition: Callable[[], bool], timeout_s: float = 5.0) -> bool:
    """Whether the condition comes true within the time."""
    until_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > until_s:
            return False
        time.sleep(0.01)
    return True


def together(contexts: List[Context], action: Callable[[Context], Any]) -> List[Any]:
    """Call ``action`` on all contexts at once, each in a thread; the results in rank order."""
    with ThreadPoolExecutor(len(contexts)) as pool:
        return list(pool.map(action, contexts))


class Service:
    """A rendezvous server of a job of ``size`` ranks on one host, and the means to join it.

    Attributes:
        notices: what the launcher was told, in order.
    """

    def __init__(
        self,
        size: int,
        start_timeout_s: float = 20.0,
        job: str = "job",
        planned: bool = True,
        encrypt: bool = False,
    ):
        self.size = size
        self.job = job
        self.key = secrets.token_bytes(32)
        self.certificate = make_certificate() if encrypt else ""
        self.notices: List[Notice] = []
        self.settings = Settings(start_timeout_s=start_timeout_s, timeout_s=20.0, spin_us=0.0)
        self.planned = planned
        self.server = RendezvousServer(
            key=self.key,
            job=job,
            seats=[Seat(Slot(0, rank), "here") for rank in range(size)] if planned else (),
            size=size,
            addresses=["127.0.0.1"],
            start_timeout_s=start_timeout_s,
            notify=self.notices.append,
            encryption=encryption_of(self.certificate),
        )
        self.endpoints = tuple(self.server.start())

    def membership(self, rank: Optional[int], **change: Any) -> Membership:
        """That of one rank (or, of a free job, of anybody)."""
        values = {
            "size": self.size,
            "rendezvous": self.endpoints,
            "key": self.key,
            "certificate": self.certificate,
            "job": self.job,
            "slot": Slot(0, rank) if self.planned and rank is not None else None,
            "rank": None if self.planned else rank,
            **change,
        }
        return Membership(**values)

    def start(self, rank: Optional[int], **change: Any) -> Context:
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
        """What the launcher was told of this kind."""
        return [notice.text for notice in self.notices if notice.kind == kind]
