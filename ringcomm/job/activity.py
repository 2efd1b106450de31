"""A rank's counters: for ``rc.stats()``, and for ringrun's live view and report.

Calls count themselves (:mod:`ringcomm.collective.observe`). ringrun requests the sums once a second on the
socket of the flight recorder, so a job that is not watched pays for counting only.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Dict, List, Optional, Sequence

from ..clock import StepClock
from ..collective.observe import Progress, Totals, longest
from ..collective.runner import Runner
from ..engine.engine import Engine

if TYPE_CHECKING:
    from ..group.point_to_point import MessageHistory

OPERATIONS_SENT = 8  # operations in a report to ringrun: those that took the most time in total
_TEXT_CHARACTERS = 1000  # of the description of an operation, which has the names of its tensors


class Activity:
    """The numbers of one context, or of one process group, whose ``members`` are ranks of the whole job."""

    def __init__(
        self,
        runner: Runner,
        engine: Optional[Engine],
        members: Sequence[int],
        steps: Optional[StepClock] = None,
    ) -> None:
        self.steps = StepClock() if steps is None else steps  # while it is 0, repeated names count steps
        self.gauges: Dict[str, float] = {}  # other numbers by name, as they are at present
        self.messages: Optional[MessageHistory] = None  # point-to-point messages, if they are recorded
        self._runner, self._engine, self._members = runner, engine, members
        self._began_s = time.perf_counter()
        self._last: Optional[Dict[str, Any]] = None

    @property
    def waited_s(self) -> float:
        """Return the seconds that this rank spent in collectives and in waits for messages."""
        engine_s = 0.0 if self._engine is None else self._engine.waited_s
        messages_s = 0.0 if self.messages is None else self.messages.waited_s
        return self._runner.waited_s + engine_s + messages_s

    def totals(self) -> Totals:
        """Return the sums over all calls; peers are ranks of the whole job."""
        found = self._runner.totals()
        if self._engine is not None:
            found.merge(self._engine.buckets.totals())
        if self.messages is not None:
            self.messages.add_to(found)
        for links in (self._runner, None if self._engine is None else self._engine.buckets):
            for peer, (delivered_bytes, busy_s) in ({} if links is None else links.delivered()).items():
                found.peer(peer).delivered_bytes += delivered_bytes
                found.peer(peer).busy_s += busy_s
        found.peers = {self._members[rank]: peer for rank, peer in found.peers.items()}
        return found

    def conclude(self) -> None:
        """Keep the present numbers: the links are about to be closed."""
        if self._last is None:
            self._last = self.numbers()

    def numbers(self) -> Dict[str, Any]:
        """Return the numbers that :func:`report` sends."""
        if self._last is not None:
            return dict(self._last)
        totals = self.totals()
        steps, late_s = self.steps, {} if self._engine is None else self._engine.late_s
        if self._engine is not None and not steps.count:
            steps = self._engine.repeated
        return {
            "elapsed_s": round(time.perf_counter() - self._began_s, 6),
            "steps": steps.count, "step_s": steps.step_s, "mean_step_s": steps.mean_s,
            "waited_s": self.waited_s,
            "peers": {
                str(rank): [peer.sent_bytes, peer.received_bytes, peer.slept_s, peer.delivered_bytes,
                            peer.busy_s]
                for rank, peer in sorted(totals.peers.items())
            },
            "kinds": {
                kind: [total.runs, total.took_s, total.moved_bytes] for kind, total in totals.kinds.items()
            },
            "operations": {
                name[:_TEXT_CHARACTERS]: [total.runs, total.took_s, total.moved_bytes]
                for name, total in ((name, totals.operations[name])
                                    for name in longest(totals.operations, OPERATIONS_SENT))
            },
            "late": {str(self._members[rank]): seconds for rank, seconds in late_s.items()},
            "gauges": dict(self.gauges),
            **self._position(),
        }  # fmt: skip

    def _position(self) -> Dict[str, Any]:
        """Return the present or last call of this rank, and the ranks from which it waits to receive."""
        places = [self._runner.progress()]
        if self._engine is not None:
            places.append(self._engine.buckets.progress())
        waits = [] if self.messages is None else list(self.messages.waits())
        if waits:
            what, peer = waits[0]
            places.append(Progress(doing=what, waits_for=() if peer is None else (peer,)))
        inside = next((place for place in places if place.doing), None)
        doing = self._runner.last_call if inside is None else inside.doing
        waits_for = () if inside is None else inside.waits_for
        return {
            "doing": doing[:_TEXT_CHARACTERS], "inside": inside is not None,
            "waits_for": [self._members[rank] for rank in waits_for],
        }  # fmt: skip


def report(activities: Sequence[Activity]) -> Dict[str, Any]:
    """Return the numbers of a process's contexts and groups (at least one), ready for JSON."""
    parts = [activity.numbers() for activity in activities]
    whole = parts[0]
    for part in parts[1:]:
        for name in ("elapsed_s", "steps", "step_s", "mean_step_s"):
            whole[name] = max(whole[name], part[name])
        whole["waited_s"] += part["waited_s"]
        for name in ("peers", "kinds", "operations"):
            for key, values in part[name].items():
                before = whole[name].get(key, [0] * len(values))
                whole[name][key] = [one + other for one, other in zip(before, values)]
        whole["gauges"].update(part["gauges"])
        if part["inside"] or not whole["doing"]:
            whole.update({name: part[name] for name in ("doing", "inside", "waits_for")})
    return whole


def flat(numbers: Dict[str, Any]) -> Dict[str, float]:
    """Return :meth:`Activity.numbers` as numbers with one name each, for ``rc.stats()``."""
    names = ("steps", "step_s", "mean_step_s", "elapsed_s", "waited_s")
    found: Dict[str, float] = {f"ringcomm/{name}": numbers[name] for name in names}
    peers: List[Any] = list(numbers["peers"].values())
    found["ringcomm/calls"] = sum(runs for runs, _, _ in numbers["kinds"].values())
    found["ringcomm/sent_bytes"] = sum(peer[0] for peer in peers)
    found["ringcomm/received_bytes"] = sum(peer[1] for peer in peers)
    for rank, (sent, received, slept_s, *_) in numbers["peers"].items():
        found[f"ringcomm/rank_{rank}/sent_bytes"] = sent
        found[f"ringcomm/rank_{rank}/received_bytes"] = received
        found[f"ringcomm/rank_{rank}/waited_for_s"] = slept_s
    found.update({f"ringcomm/{name}": value for name, value in numbers["gauges"].items()})
    for kind, (runs, took_s, moved_bytes) in numbers["kinds"].items():
        found[f"ringcomm/{kind}/calls"] = runs
        found[f"ringcomm/{kind}/s"] = took_s
        found[f"ringcomm/{kind}/moved_bytes"] = moved_bytes
    return found
