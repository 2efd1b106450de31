"""What is decided differently for a job of fixed size and for an elastic one. Pure.

:class:`~.state.Rendezvous` is the state machine of both. It asks its terms which processes may join, when the
next view can be published and its members: :class:`~.fixed_terms.FixedTerms` or
:class:`~.elastic_terms.ElasticTerms`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from enum import Enum
from typing import List, NamedTuple, Optional, Tuple

from ..config import Slot
from ..group.view import View
from ..wire.messages import Message
from .actions import Action, Drop, Seat, Send
from .processes import Process, Processes
from .root_cause import SETTLE_S


class Step(Enum):
    """What is to happen now that no member of the last view is in it any more."""

    PUBLISH = "publish"
    WAIT = "wait"
    FAIL = "fail"
    END = "end"


class Decision(NamedTuple):
    """What is to happen.

    Attributes:
        step: of which kind.
        order: to publish: member numbers in rank order.
        text: to wait or to fail: why.
        kind: to fail: the kind of failure.
        culprit: to fail: the rank at fault, if there is one.
        size: to wait: how many processes there are.
        is_new: to wait: whether the wait has just begun.
    """

    step: Step
    order: Tuple[int, ...] = ()
    text: str = ""
    kind: str = ""
    culprit: Optional[int] = None
    size: int = 0
    is_new: bool = False


class Terms(ABC):
    """The terms of one job.

    Attributes:
        processes: of the job.
        most: the largest view.
        is_elastic: whether the job goes on with another view if members are lost, or are to join or to leave.
        is_planned: whether the places of processes say which of them share a host.
        evidence_s: how long after the end of a control connection the launcher may report how the process has
            ended, in seconds.
    """

    processes: Processes
    most: int
    is_elastic = False
    is_planned = False
    evidence_s = SETTLE_S

    @abstractmethod
    def admit(self, message: Message) -> Tuple[int, Optional[Seat]]:
        """Return the member number and the place of a process that asks to join.

        Args:
            message: its request.

        Raises:
            Refusal: it may not join.
        """

    def number_of(self, reported: int) -> int:
        """Return the member number of a process, by the number that its launcher has for it; -1: unknown."""
        return reported

    def slot_of(self, reported: int) -> Optional[Slot]:
        """Return the place of a process, by that number; None: its request to join says it."""
        return None

    def too_late(
        self, connection: int, message: Message, abort: Message, had_started: bool
    ) -> List[Action]:
        """Answer a process that asks to join after the job has failed.

        Args:
            connection: number of its control connection.
            message: its request.
            abort: what every process was sent.
            had_started: whether the ranks were connected when the job failed.
        """
        return [Send(connection, abort), Drop(connection)]

    @abstractmethod
    def welcome(self, process: Process) -> List[Action]:
        """Answer a process that has joined for the first time, and report it."""

    @abstractmethod
    def decide(self, last: View, refused_connections: str, now_s: float) -> Decision:
        """Decide, after every member of the last view has asked for the next one or has ended.

        Args:
            last: the last view.
            refused_connections: the connections that failed to authenticate, as text.
            now_s: the time on the rendezvous' monotonic clock.
        """

    @abstractmethod
    def wait(self, decision: Decision, last: View) -> List[Action]:
        """Begin to wait for more processes.

        Args:
            decision: to wait.
            last: the last view.
        """
