"""The decisions that differ between a job of fixed size and an elastic one. Pure.

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
    """The kind of a decision, when no member of the last view is in it any more."""

    PUBLISH = "publish"
    WAIT = "wait"
    FAIL = "fail"
    END = "end"


class Decision(NamedTuple):
    """A decision about the next view."""

    step: Step
    order: Tuple[int, ...] = ()  # to publish: member numbers in rank order
    text: str = ""  # to wait or to fail: why
    kind: str = ""  # to fail: the kind of failure
    culprit: Optional[int] = None  # to fail: the rank at fault
    size: int = 0  # to wait: the number of processes
    is_new: bool = False  # to wait: the wait has just begun


class Terms(ABC):
    """The terms of one job."""

    processes: Processes
    most: int  # the largest view
    is_elastic = False  # the job continues with another view if members are lost, join or leave
    is_planned = False  # the places of processes say which of them share a host
    evidence_s = SETTLE_S  # time for the launcher's report after a control connection has ended

    @abstractmethod
    def admit(self, message: Message) -> Tuple[int, Optional[Seat]]:
        """Return the member number and the place of a process that asks to join; raises Refusal."""

    def number_of(self, reported: int) -> int:
        """Return the member number of a process, by its launcher's number; -1: unknown."""
        return reported

    def slot_of(self, reported: int) -> Optional[Slot]:
        """Return the place of a process, by that number; None: it is in its request to join."""
        return None

    def too_late(
        self, connection: int, message: Message, abort: Message, had_started: bool
    ) -> List[Action]:
        """Answer a process that asks to join after the job has failed. ``abort``: the message that every
        process was sent; ``had_started``: the ranks were connected when the job failed.
        """
        return [Send(connection, abort), Drop(connection)]

    @abstractmethod
    def welcome(self, process: Process) -> List[Action]:
        """Answer a process that has joined for the first time, and report it."""

    @abstractmethod
    def decide(self, last: View, refused_connections: str, now_s: float) -> Decision:
        """Decide, after every member of the last view has asked for the next one or has ended."""

    @abstractmethod
    def wait(self, decision: Decision, last: View) -> List[Action]:
        """Start to wait for more processes."""
