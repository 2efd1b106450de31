"""The terms of an elastic job: ranks may be lost, and may join, from one view to the next. Pure."""

from __future__ import annotations

from typing import List, Optional, Tuple

from ..clock import is_due
from ..configuration.limits import Limits
from ..group.view import NO_VIEW, View, rank_order
from ..wire.messages import Message
from .actions import Action, Seat, Send, Timer
from .elastic_notices import ready_notice, waiting_notice
from .membership import Refusal, checked_host
from .processes import Process, Processes, Stage, names
from .terms import Decision, Step, Terms


class ElasticTerms(Terms):
    """A view has the processes that are ready when every member of the last one has asked or has ended.
    If the job is ``launched``, only processes that a launcher has announced may join.
    """

    is_elastic = True

    def __init__(self, limits: Limits, version: str, launched: bool, start_timeout_s: float) -> None:
        self.processes = Processes()
        self.most = limits.most
        self._limits = limits
        self._version = version
        self._launched = launched
        self._start_timeout_s = start_timeout_s
        self._given = -1
        self._since_s: Optional[float] = None
        self._newest = 0

    # ---- joining -----------------------------------------------------------------------------

    def admit(self, message: Message) -> Tuple[int, Optional[Seat]]:
        """Return the member number and place; see :meth:`.Terms.admit`."""
        host = checked_host(message, self._version)
        number = message.get("member")
        known = self.processes.get(number) if type(number) is int else None
        if known is not None:
            _check_same(known, message)
            return known.number, known.place
        if number is None and not self._launched:
            self._given += 1
            while self.processes.get(self._given) is not None:  # it has asked for this number
                self._given += 1
            number = self._given
        if type(number) is not int or (self._launched and number not in self.processes.expected):
            raise Refusal(f"{host} (process {message['pid']}) was not started by this job's launcher")
        return number, self.processes.expected.get(number)

    def welcome(self, process: Process) -> List[Action]:
        """Answer with the member number; see :meth:`.Terms.welcome`."""
        return [
            Send(process.connection, {"type": "waiting", "member": process.number}),
            ready_notice(process, self.processes.count(Stage.WAITING)),
        ]

    # ---- the next view -----------------------------------------------------------------------

    def decide(self, last: View, refused_connections: str, now_s: float) -> Decision:
        """Decide whether enough processes are ready; see :meth:`.Terms.decide`."""
        if last is NO_VIEW and self._too_early(now_s):
            return Decision(Step.WAIT)
        waiting = self.processes.among(Stage.WAITING)
        if last is not NO_VIEW and all(item.is_new for item in waiting):
            return self._no_survivor(last)
        if not waiting:
            self._since_s = None
            return Decision(Step.WAIT)
        is_new = self._since_s is None
        since_s = self._since_s = now_s if self._since_s is None else self._since_s
        limits = self._limits
        order = rank_order([item.candidate() for item in waiting], limits.most)
        # Once a member has finished, the others need not wait for new processes.
        enough = len(order) >= limits.min_np or self._finished(last)
        if not enough and is_due(since_s + limits.timeout_s, now_s):
            within = f"within {limits.timeout_s:g} s (--elastic-timeout)"
            return self._fail(
                "timeout", f"Not enough ranks {within}: {self._text(len(order), refused_connections)}."
            )
        if not enough or not self._complete(last, len(order), now_s - since_s):
            text = self._text(len(order), refused_connections)
            return Decision(Step.WAIT, text=text, size=len(order), is_new=is_new)
        return self._checked(last, order, waiting)

    def wait(self, decision: Decision, last: View) -> List[Action]:
        """Wait for the start timeout, or the limit for too few ranks."""
        limits = self._limits
        timers: List[Action] = [Timer(self._start_timeout_s), Timer(limits.timeout_s)]
        return timers if last is NO_VIEW else [*timers, waiting_notice(decision, limits)]

    def _too_early(self, now_s: float) -> bool:
        """Return whether more processes will join before the first view, so that nothing is decided now.
        Called for each that joins.
        """
        size, limits = self.processes.count(Stage.WAITING), self._limits
        if not size or self._since_s is None or size >= limits.most:
            return False
        if is_due(self._since_s + min(self._start_timeout_s, limits.timeout_s), now_s):
            return False
        return self.processes.some_are_missing if self._launched else size < limits.start_np

    def _checked(self, last: View, order: Tuple[int, ...], waiting: List[Process]) -> Decision:
        """Publish a view with enough ranks, unless the job cannot continue with it."""
        limit = self._limits.reset_limit
        if limit is not None and last.epoch >= limit:
            return self._fail("reset_limit", self._limits.reset_limit_text())
        newest = max(item.candidate().position for item in waiting)
        if self._newest and not newest:
            text = f"No process that has a state is left after epoch {last.epoch}, only new ones are."
            return self._fail("lost", text)
        self._newest, self._since_s = newest, None
        return Decision(Step.PUBLISH, order)

    def _no_survivor(self, last: View) -> Decision:
        """End the job, or fail: all members of the last view have finished or are lost."""
        if self._finished(last):
            return Decision(Step.END)
        lost = [item for item in self.processes.among(Stage.LOST) if item.number in last.numbers]
        why = "; ".join(f"{names([item])}: {item.why_lost}" for item in lost)
        return self._fail(
            "lost", f"No rank of epoch {last.epoch} is left, and its state is lost with them. {why}"
        )

    def _fail(self, kind: str, text: str) -> Decision:
        return Decision(Step.FAIL, text=text, kind=kind)

    def _finished(self, last: View) -> bool:
        return any(item.number in last.numbers for item in self.processes.among(Stage.LEFT))

    def _complete(self, last: View, size: int, waited_s: float) -> bool:
        """Return whether the first view has all processes that it waits for; later ones wait for none."""
        if last is not NO_VIEW or size >= self._limits.most:
            return True
        if is_due(self._start_timeout_s, waited_s):
            return True
        return not self.processes.missing() if self._launched else size >= self._limits.start_np

    def _text(self, size: int, refused_connections: str) -> str:
        missing = ", ".join(place.host for _, place in self.processes.missing())
        return (
            f"{size} of at least {self._limits.min_np} ranks are ready"
            + (f"; missing: {missing}" if missing else "")
            + (f". The rendezvous turned away {refused_connections}" if refused_connections else "")
        )


def _check_same(process: Process, message: Message) -> None:
    """Raise Refusal if a process may not continue as this member."""
    if (process.message["pid"], process.message["hostname"]) != (message["pid"], message["hostname"]):
        raise Refusal(
            f"member {process.number} is process {process.message['pid']} on {process.host}, and not "
            f"process {message['pid']} on {message['hostname']}"
        )
    if not process.is_here:
        raise Refusal(f"the job has gone on without this process: {process.why_lost or 'it has left'}")
