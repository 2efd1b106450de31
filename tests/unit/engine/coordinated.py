"""A coordinator that a test feeds, of three ranks on three hosts."""

from __future__ import annotations

from typing import Any, Dict, List, Optional, Tuple

from ringcomm.engine.coordinator import Coordinator, Tuning
from ringcomm.engine.process_sets import UnknownProcessSetError
from ringcomm.ops import Collective, ReduceOp
from ringcomm.wire.frames import NO_ROOT
from ringcomm.wire.messages import encode, validate
from ringcomm.wire.signature import Signature

HOSTS = ["desk", "jetson1", "jetson2"]


SETS = {0: (0, 1, 2), 1: (0, 2), 2: (1, 2), 3: (1,), -2: (0, 1)}


def sig(name: str = "", **changes: Any) -> Signature:
    plain = Signature(name, 0, int(Collective.ALLREDUCE), int(ReduceOp.SUM), NO_ROOT, ("float32",), ((4,),))
    return plain._replace(**changes)


def members_of(number: int) -> Tuple[int, ...]:
    if number not in SETS:
        raise UnknownProcessSetError(f"Process set {number} does not exist.")
    return SETS[number]


class Job:
    """A coordinator, and what each rank has been told of signatures so far."""

    def __init__(self, **options: Any) -> None:
        self.now_s = 100.0
        tuning = Tuning(1 << 20, 0.0)._replace(**options)
        self.coordinator = Coordinator(HOSTS, members_of, tuning)
        self.ids: Dict[Signature, int] = {}
        self.lines: Dict[int, List[str]] = {}

    def ready(
        self, rank: int, *signatures: Signature, number: int = 0, urgent: bool = False, site: str = ""
    ) -> None:
        site = site or f"train.py:{rank}"
        lines = self.lines.setdefault(rank, [])
        sites = [site] if site not in lines else []
        lines += sites
        line = lines.index(site) + 1
        operations = [[self.ids.get(item, item.to_json()), number, line] for item in signatures]
        self.send(rank, {"type": "ready", "operations": operations, "sites": sites, "urgent": urgent})

    def send(self, rank: int, message: Dict[str, Any]) -> None:
        validate(message)
        assert encode(message)
        self.coordinator.take(rank, message, self.now_s)

    def responses(self) -> Optional[Dict[str, Any]]:
        responses = self.coordinator.decide(self.now_s)
        if responses is not None:
            validate(responses)
            for number, data in responses["fresh"]:
                self.ids[Signature.from_json(data)] = number
        return responses

    def run(self) -> List[List[str]]:
        """Names by bucket of what is to be run now."""
        responses = self.responses()
        if responses is None:
            return []
        assert not responses["failed"]
        names = {number: item.name for item, number in self.ids.items()}
        return [[names[item[0]] for item in bucket] for bucket in responses["run"]]

    def failures(self) -> List[Tuple[str, str]]:
        responses = self.responses()
        return [] if responses is None else [(key[1], text) for key, _, text, _ in responses["failed"]]
