"""Sets of operations that repeat without a negotiation, and what happens when a rank does something else."""

from __future__ import annotations

import random
from typing import Any, Dict, List, Optional, Tuple

import numpy as np
import pytest

from ringcomm.engine.cycle import GIVE_UP_S
from ringcomm.engine.repeats import may_repeat
from ringcomm.engine.request import Handle
from ringcomm.errors import ProtocolError
from ringcomm.ops import Collective, ReduceOp
from tests.unit.engine.coordinated import sig
from tests.unit.engine.driven import Job

NAMES = ["a", "b", "c", "d"]
Action = Tuple[str, str]


class Rank:
    """A rank's program: operations that it submits and waits for; and a turn of its engine."""

    def __init__(self, job: Simulated, rank: int, actions: List[Action]) -> None:
        self.job, self.rank, self.actions = job, rank, actions
        self.state = job.engines.states[rank]
        self.done: Dict[str, int] = dict.fromkeys(NAMES, 0)
        self.pending: Dict[str, Tuple[Handle, np.ndarray[Any, Any]]] = {}

    def waits(self) -> Optional[Handle]:
        if self.actions and self.actions[0][0] == "wait":
            handle = self.pending[self.actions[0][1]][0]
            return None if handle.done() else handle
        return None

    def act(self) -> None:
        """The program goes on, or its thread does the engine's work, or another thread does."""
        self.job.engines.now_s += self.job.chance.random() * 1e-3
        if self.waits() is not None:
            self.state.urgent = True
            self.state.cycle()
            return
        if not self.actions or self.job.chance.random() < self.job.thread:
            self.state.cycle()
            return
        what, name = self.actions.pop(0)
        if what == "submit":
            request = self.job.engines.submit(self.rank, name, float(self.rank + self.done[name]))
            self.pending[name] = request.handle, request.arrays[0]
            return
        handle, array = self.pending.pop(name)
        handle.wait(0.0)
        size = len(self.job.ranks)
        assert array.tolist() == [size * (size - 1) / 2 + size * self.done[name]] * 2
        self.done[name] += 1


class Simulated:
    """Ranks whose programs come to the same operations, each in an order of its own, in random turns."""

    def __init__(self, seed: int, size: int, steps: int) -> None:
        self.chance = random.Random(seed)
        self.thread = self.chance.choice([0.0, 0.02, 0.2])
        self.engines = Job(size)
        for name in NAMES:
            requests = self.engines.submit_known(size, name)
            self.turns(requests)
        programs: List[List[Action]] = [[] for _ in range(size)]
        chosen = self.chance.sample(NAMES, self.chance.randint(1, 3))
        for _ in range(steps):
            if self.chance.random() < 0.1:
                chosen = self.chance.sample(NAMES, self.chance.randint(1, 3))
            extra = [name for name in NAMES if name not in chosen][:1] if self.chance.random() < 0.1 else []
            for program in programs:
                program += self.step(chosen, extra)
        self.ranks = [Rank(self, rank, program) for rank, program in enumerate(programs)]

    def step(self, chosen: List[str], extra: List[str]) -> List[Action]:
        order = self.chance.sample(chosen, len(chosen))
        actions = [("submit", name) for name in order]
        waits = [("wait", name) for name in self.chance.sample(order, len(order))]
        for name in extra:  # some ranks submit it before the others, and wait for it before or after them
            if self.chance.random() < 0.5:
                actions.insert(0, ("submit", name))
                waits.insert(self.chance.randint(0, len(waits)), ("wait", name))
            else:
                waits += [("submit", name), ("wait", name)]
                if self.chance.random() < 0.5:
                    waits = [("submit", name), *[item for item in waits if item != ("submit", name)]]
        return actions + waits

    def turns(self, requests: List[Any]) -> None:
        while not all(request.ended_s for request in requests):
            self.engines.turn(1)

    def run(self) -> None:
        idle = 0
        while any(rank.actions for rank in self.ranks):
            left = [len(rank.actions) for rank in self.ranks]
            for _ in range(len(self.ranks)):
                self.chance.choice(self.ranks).act()
            idle = 0 if left != [len(rank.actions) for rank in self.ranks] else idle + 1
            if idle > 50 or self.chance.random() < 0.001:
                self.engines.now_s += GIVE_UP_S
            assert idle < 2000, [(rank.actions[:2], rank.state.repeats.current) for rank in self.ranks]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_programs_from_seeds_get_the_right_sums_whatever_repeats_and_deviates(size):
    repeated = called_off = 0
    for seed in range(20):
        simulated = Simulated(1000 * size + seed, size, steps=25)
        simulated.run()
        coordinator = simulated.engines.states[0].coordinator
        assert coordinator is not None and not coordinator._entries
        repeats = [state.repeats for state in simulated.engines.states]
        runs = {sum(item.total.runs for item in each.all_sets) for each in repeats}
        assert len(runs) == 1, "every repeat ends on all ranks or on none"
        repeated += runs.pop()
        called_off += coordinator.repeats.epoch
    assert repeated > 100 and called_off > 5


def repeating(name: str = "a") -> Job:
    """A job of two ranks in which the set of this one operation repeats from now on."""
    job = Job(2)
    for number in range(4):
        job.submit_known(2, name) if not number else [job.submit(rank, name, 1.0) for rank in range(2)]
        wait(job)
    assert all(state.repeats._sets for state in job.states)
    return job


def wait(job: Job) -> None:
    """Callers wait on all ranks."""
    for state in job.states:
        state.urgent = True
    job.turn()


def test_two_without_a_name_of_one_kind_are_not_the_set_of_one():
    job = repeating("")
    both = [job.submit(rank, "", rank + 1.0) for rank in range(2) for _ in range(2)]
    wait(job)
    assert all(request.ended_s for request in both)


def test_elements_that_do_not_fit_are_an_error_of_the_peer():
    job = repeating()
    job.submit(1, "a", 1.0)
    job.states[1].cycle()
    current = job.states[1].repeats.current
    message = {**current.message, "bytes": 3}
    job.states[0].peers.messages.send_repeat(message, memoryview(b"abc"))
    with pytest.raises(ProtocolError, match="3 bytes for operations that have 16"):
        job.states[1].cycle()


@pytest.mark.parametrize(
    "changes",
    [
        {"kind": int(Collective.ALLGATHER)}, {"op": int(ReduceOp.ADASUM)}, {"codec": 1}, {"weighted": True},
        {"process_set": 1}, {"shapes": ((40000,),)}, {"shapes": ((0,),)},
    ],
    ids=str,
)  # fmt: skip
def test_what_is_not_a_small_plain_all_reduce_of_all_ranks_does_not_repeat(changes):
    def may(*signatures: Any, size: int = 2) -> bool:
        return may_repeat(signatures, size, sum(item.nbytes for item in signatures))

    assert may(sig("a"), sig("b"))
    assert not may(sig("a", **changes))
    assert not may(sig("a"), sig("b", dtypes=("float64",)))
    assert not may(sig(), sig(shapes=((5,),))), "two without a name are told apart by order only"
    assert not may(sig("a"), size=1) and not may()
    assert not may(sig("a", dtypes=(), shapes=()), sig("b")), "a group without arrays"
