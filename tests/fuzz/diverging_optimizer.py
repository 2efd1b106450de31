"""Programs from seeds over ``DistributedOptimizer`` in which one rank differs.

    python -m tests.fuzz.diverging_optimizer SIZE SEED COUNT

Each program trains a few tensors with gradients that are known. One rank makes a step more or less, has other
parameters, another dtype, compression, operation or process set, skips a backward pass, or ends. Either what
it does is allowed, and every rank gets the numbers that its calls promise, or all ranks raise: one text with
the cause. No step may leave other numbers than those that its contributions give, and a step that fails
changes nothing. Each program is a job of its own, whose ranks are forked from a process with torch in it.
"""

from __future__ import annotations

import json
import os
import random
import secrets
import select
import signal
import sys
import time
import traceback
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

import torch

import ringcomm.torch as hvd
from ringcomm import api
from ringcomm.calls.process_set import add_process_set
from ringcomm.config import Membership, Settings, Slot
from ringcomm.errors import RingcommError
from ringcomm.rendezvous.actions import Seat
from ringcomm.rendezvous.server import RendezvousServer

SETTINGS = Settings(timeout_s=60.0, start_timeout_s=60.0, measure=False, dead_after_s=60.0)
LIMIT_S = 120.0
UNIT = 6.0
"""All gradients are multiples of it: exact as a mean over two or three ranks, also in half precision."""
SIZES = (1, 7, 300, 20_000, 300_000)

ALLOWED = ("late", "no backward", "unused", "closure", "synchronize", "zeros", "passes")
"""What a rank may do alone."""
EITHER = ("order", "groups", "other groups")
"""What depends on how gradients are grouped: right numbers on all ranks, or an error on all."""
SHIFTED = ("extra step", "step less", "metric twice")
"""Operations of one name are matched in order, so there is an error only when one has no counterpart."""
REFUSED = (
    "shape", "a parameter more", "a parameter less", "dtype", "name", "compression", "codec", "op",
    "predivide", "root", "process set",
)  # fmt: skip
"""What all ranks must agree about."""
ENDS = ("leave", "die", "backward twice")
"""The rank ends: by itself, suddenly, or with an error of its own."""
KINDS = (ALLOWED, EITHER, SHIFTED, REFUSED, ENDS)


class Program(NamedTuple):
    """The program of a seed, in which the odd rank makes a `change` at the step `place`."""

    seed: int
    size: int
    lengths: List[int]  # of the parameters, which have one dimension
    steps: int  # of each rank
    op: str
    compression: str
    groups: Optional[int]
    passes: int
    metric: bool  # a number is averaged after each step
    place: int
    odd_rank: int
    change: str


def program(seed: int, size: int) -> Program:
    """The program of this seed."""
    rng = random.Random(f"optimizer {seed} {size}")
    lengths = [rng.choice(SIZES) for _ in range(rng.randrange(1, 6))]
    steps = rng.randrange(2, 5)
    change = rng.choice([item for kind in KINDS for item in kind])
    if change == "process set" and size < 3:
        change = "op"
    if change == "a parameter less" and len(lengths) == 1:
        change = "a parameter more"
    return Program(
        seed, size, lengths, steps, "average" if change == "predivide" else rng.choice(("average", "sum")),
        rng.choice(("none", "none", "fp16")), rng.choice((None, None, 1, 2)), rng.choice((1, 1, 2)),
        change == "metric twice" or rng.random() < 0.3, rng.randrange(steps), rng.randrange(size), change,
    )  # fmt: skip


class Rank:
    """One rank's part of a program; `made` counts the successful steps."""

    def __init__(self, case: Program, rank: int) -> None:
        self.case, self.rank = case, rank
        self.change = case.change if rank == case.odd_rank else ""
        self.made = 0
        lengths, change = list(case.lengths), self.change
        if change == "shape":
            lengths[case.seed % len(lengths)] += 1
        elif change == "a parameter more":
            lengths.append(3)
        elif change == "a parameter less":
            lengths.pop()
        dtype = torch.float64 if change == "dtype" else torch.float32
        self.parameters = [
            torch.nn.Parameter(torch.full((length,), float(rank), dtype=dtype)) for length in lengths
        ]
        self.optimizer: Any = None

    def prepare(self) -> None:
        """Broadcast the parameters of rank 0, and make the optimizer."""
        case, change = self.case, self.change
        names = [f"p{number}" for number in range(len(self.parameters))]
        if change == "name":
            names[case.seed % len(names)] += "x"
        root = 1 if change == "root" else 0
        with torch.no_grad():
            for parameter in self.parameters:
                parameter.zero_()
        hvd.broadcast(torch.zeros(2), root, name="start")
        members = [rank for rank in range(case.size) if rank != (case.odd_rank + 1) % case.size]
        others = add_process_set(members) if case.size > 2 else None
        named = list(zip(names, self.parameters))
        compression = {"none": hvd.Compression.none, "fp16": hvd.Compression.fp16}
        chosen = compression[case.compression]
        if change == "compression":
            chosen = hvd.Compression.none if case.compression == "fp16" else hvd.Compression.fp16
        elif change == "codec":
            chosen = hvd.Compression.int8
        op = case.op if change != "op" else ("sum" if case.op == "average" else "average")
        groups: Any = case.groups
        if change == "groups":
            groups = 1 if case.groups is None else None
        elif change == "other groups":
            groups = [self.parameters[:1]]
        options = {"process_set": others} if change == "process set" else {}
        self.optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(self.parameters[::-1] if change == "order" else self.parameters, lr=1.0),
            named, chosen, case.passes + (change == "passes"), getattr(hvd, op.capitalize()),
            2.0 if change == "predivide" else 1.0, groups=groups, **options,
        )  # fmt: skip

    def train(self) -> str:
        """Make the steps, and return how this rank has ended: "finished", "left" or "own error"."""
        self.prepare()
        for number in range(self.case.steps):
            here = self.change if number == self.case.place else ""
            if here == "leave":
                return "left"
            if here == "die":
                os._exit(3)
            if here == "step less":
                continue
            for _ in range(2 if here == "extra step" else 1):
                if not self._step(here):
                    return "own error"
                self.check(self.made)
            if self.case.metric:
                for _ in range(2 if here == "metric twice" else 1):
                    mean = hvd.allreduce(torch.full((3,), UNIT), op=hvd.Average, name="metric")
                    assert mean.tolist() == [UNIT] * 3, f"WRONG metric: {mean}"
        hvd.allgather_object(self.rank, name="end")
        return "finished"

    def _step(self, here: str) -> bool:
        gradients = contribution(self.case, self.rank, self.made)
        if here == "late":
            time.sleep(0.05)
        if here == "closure":
            self.optimizer.zero_grad()
            self.optimizer.step(lambda: self._backward(gradients))
        else:
            self.optimizer.zero_grad(set_to_none=here != "zeros")
            if gradients:
                self._backward(gradients)
            if here == "backward twice":
                try:
                    self._backward(gradients)
                except AssertionError:
                    return False
                raise AssertionError("WRONG: too many backward passes were accepted")
            if here == "synchronize":
                self.optimizer.synchronize()
                with self.optimizer.skip_synchronize():
                    self.optimizer.step()
            else:
                self.optimizer.step()
        self.made += 1
        return True

    def _backward(self, gradients: Dict[int, float]) -> None:
        for _ in range(self.case.passes):
            loss = sum(
                self.parameters[number].sum() * (value / self.case.passes)
                for number, value in gradients.items() if number < len(self.parameters)
            )  # fmt: skip
            loss.backward()

    def check(self, steps: int) -> None:
        """Assert that the parameters are zeros after this number of steps."""
        for number, parameter in enumerate(self.parameters):
            value = 0.0
            for step in range(steps):
                parts = [
                    contribution(self.case, rank, step).get(number, 0.0) for rank in range(self.case.size)
                ]
                value -= sum(parts) / (self.case.size if self.case.op == "average" else 1)
            if not bool((parameter == value).all()):
                found = parameter.detach()[:3].tolist()
                raise AssertionError(f"WRONG: p{number} after {steps} steps: {value} expected, {found} found")


def contribution(case: Program, rank: int, step: int) -> Dict[int, float]:
    """The gradients of a rank's step, by number of the parameter; those that are missing are not computed."""
    rng = random.Random(f"{case.seed} {rank} {step}")
    gradients = {number: UNIT * rng.randrange(-20, 20) for number in range(len(case.lengths))}
    if rank == case.odd_rank and step == case.place:
        if case.change == "no backward":
            return {}
        if case.change == "unused":
            del gradients[case.seed % len(gradients)]
    return gradients


class Ended(NamedTuple):
    """The end of a rank."""

    how: str  # finished, left, own error, died, silent, or the error's class
    text: str = ""
    made: int = 0  # successful steps
    lost: Optional[int] = None  # the rank that the error names


def work(case: Program, rank: int, membership: Membership) -> Ended:
    """Run one rank."""
    me = Rank(case, rank)
    try:
        api.init(membership, SETTINGS)
        try:
            ended = Ended(me.train(), made=me.made)
        except RingcommError as error:
            ended = Ended(type(error).__name__, str(error), me.made, getattr(error, "rank", None))
            me.check(me.made)
        finally:
            api.shutdown()
        return ended
    except BaseException:  # noqa: BLE001 - told to the parent process, which fails
        return Ended("WRONG", traceback.format_exc(), me.made)


def run(case: Program) -> List[Ended]:
    """Return how each rank of this program has ended."""
    pipes = [(os.pipe(), os.pipe()) for _ in range(case.size)]
    pids = [_forked(case, rank, pipes) for rank in range(case.size)]
    key, job = secrets.token_bytes(32), f"program-{case.seed}"
    server = RendezvousServer(
        key=key, job=job, addresses=["127.0.0.1"],
        seats=[Seat(Slot(0, rank), "localhost") for rank in range(case.size)],
        start_timeout_s=SETTINGS.start_timeout_s, notify=lambda _: None,
    )  # fmt: skip
    endpoints = server.start()
    try:
        for (begin, begun), (_, result) in pipes:
            os.close(begin)
            os.close(result)
            with os.fdopen(begun, "w") as pipe:
                json.dump({"endpoints": endpoints, "key": key.hex(), "job": job}, pipe)
        limit_s = time.monotonic() + LIMIT_S
        return [_result(results, limit_s) for _, (results, _) in pipes]
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        server.stop()


def _forked(case: Program, rank: int, pipes: Sequence[Tuple[Any, Any]]) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        (begin, _), (_, result) = pipes[rank]
        for number, ((reading, writing), (results, written)) in enumerate(pipes):
            for end in (writing, results) if number == rank else (reading, writing, results, written):
                os.close(end)
        with os.fdopen(begin) as pipe:
            told = json.load(pipe)
        membership = Membership(
            case.size, tuple((host, port) for host, port in told["endpoints"]), bytes.fromhex(told["key"]),
            told["job"], Slot(0, rank), None, "localhost",
        )  # fmt: skip
        os.write(result, json.dumps(work(case, rank, membership)).encode())
    finally:
        os._exit(0)


def _result(results: int, limit_s: float) -> Ended:
    data = b""
    try:
        while select.select([results], [], [], max(0.0, limit_s - time.monotonic()))[0]:
            piece = os.read(results, 1 << 16)
            if not piece:
                return Ended(*json.loads(data)) if data else Ended("died")
            data += piece
        return Ended("silent")
    finally:
        os.close(results)


def judge(case: Program, ends: Sequence[Ended]) -> None:
    """Check that every rank has what its calls promise, or that all have raised one text with the cause."""
    hows = [ended.how for ended in ends]
    odd, others = ends[case.odd_rank], [end for rank, end in enumerate(ends) if rank != case.odd_rank]
    assert "WRONG" not in hows and "silent" not in hows, (case, ends)
    halves = case.change == "dtype" and case.compression == "fp16"  # all dtypes are sent as halves
    if case.change in ALLOWED or halves or (case.change in EITHER and "finished" in hows):
        assert hows == ["finished"] * case.size, (case, ends)
        assert {ended.made for ended in ends} == {case.steps}, (case, ends)
    elif case.change in ENDS:
        assert odd.how == {"leave": "left", "die": "died", "backward twice": "own error"}[case.change]
        assert {ended.how for ended in others} == {"PeerLostError"}, (case, ends)
        assert {ended.lost for ended in others} == {case.odd_rank}, (case, ends)
        # With one backward pass too many the rank's gradients were complete before: others may have them.
        most = case.place + (case.change == "backward twice")
        assert all(case.place <= ended.made <= most for ended in others), (case, ends)
    else:
        assert set(hows) == {"MismatchError"}, (case, ends)
        assert len({ended.text for ended in ends}) == 1, (case, ends)
        least, most = 0, 0
        if case.change in SHIFTED:
            least = case.place if case.metric else case.steps - (case.change == "step less")
            most = case.steps + 1
        elif case.change in ("a parameter more", "a parameter less"):
            most = 1  # the first buckets may be the same on all ranks
        assert all(least <= ended.made <= most for ended in ends), (case, ends)


def main(size: int, first: int, count: int) -> None:
    """Run these programs one after another."""
    tried: Dict[str, int] = {}
    # The first optimizer imports hundreds of modules, which the ranks then need not do each.
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    for seed in range(first, first + count):
        case = program(seed, size)
        judge(case, run(case))
        tried[case.change] = tried.get(case.change, 0) + 1
    print(tried)
    print(f"{count} programs of one odd optimizer from seed {first} on {size} ranks", flush=True)


if __name__ == "__main__":
    main(*(int(argument) for argument in sys.argv[1:]))
