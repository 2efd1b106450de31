"""Programs from seeds in which one rank differs: the same error on all ranks, or what each call promises.

A program is a few calls that are right, one that is not the same on one rank, and a few more. Each runs on
ranks in threads, with real sockets and a real rendezvous: what has failed cannot be used again.
"""

from __future__ import annotations

import random
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from ringcomm.collective.options import Options
from ringcomm.config import Settings
from ringcomm.errors import MismatchError, PeerLostError, RingcommError
from ringcomm.job.context import Context
from ringcomm.ops import Max, Sum
from ringcomm.testing.cluster import RankFailed, run_ranks

SETTINGS = Settings(spin_us=0.0, timeout_s=20.0, start_timeout_s=30.0, measure=False, dead_after_s=20.0)
LIMIT_S = 60.0


class Call(NamedTuple):
    """One call, and what it is called with."""

    kind: str = "allreduce"
    count: int = 4
    width: int = 2
    dtype: str = "float32"
    op: int = int(Sum)
    root: int = 0
    name: str = "x"
    prescale: float = 1.0

    def array(self) -> np.ndarray[Any, Any]:
        """Return what every rank puts in."""
        return np.ones((self.count, self.width), self.dtype)


class Program(NamedTuple):
    """The program of a seed: the calls of all ranks, and the rank whose call at `place` is `odd`. `odd` is
    None if that rank raises its own exception instead.
    """

    seed: int
    size: int
    calls: List[Call]
    place: int
    odd: Optional[Call]
    odd_rank: int
    change: str


DTYPES = ("float32", "int64", "float16", "int8")
KINDS = ("allreduce", "broadcast", "allgather", "alltoall", "reducescatter")
MATTERS: Dict[str, Tuple[str, ...]] = {
    "allreduce": ("count", "width", "dtype", "op", "name", "prescale", "kind", "raise"),
    "reducescatter": ("count", "width", "dtype", "op", "name", "prescale", "kind", "raise"),
    "broadcast": ("count", "width", "dtype", "root", "name", "kind", "raise"),
    "allgather": ("width", "dtype", "name", "kind", "raise"),
    "alltoall": ("width", "dtype", "name", "kind", "raise"),
}
"""About what all ranks must agree in a call; of the rest each may have its own."""
BY_NAME = ("count", "width", "dtype", "op", "root", "prescale", "kind")
"""What operations by name can disagree about and go on."""


def program(seed: int, by_name: bool) -> Program:
    """Return the program of this seed, for operations by name or direct calls."""
    rng = random.Random(f"{seed} {by_name}")
    size = rng.choice((2, 2, 3))

    def call() -> Call:
        return Call(
            rng.choice(KINDS), rng.choice((1, 4, 40, 3000)) * size, rng.choice((1, 2, 9)),
            rng.choice(DTYPES), int(rng.choice((Sum, Max))), rng.randrange(size),
            f"n{rng.randrange(3)}",
        )  # fmt: skip

    calls = [call() for _ in range(rng.randrange(1, 6))]
    place = rng.randrange(len(calls))
    change = rng.choice([item for item in MATTERS[calls[place].kind] if not by_name or item in BY_NAME])
    if change == "prescale":
        calls[place] = calls[place]._replace(dtype="float32")
    odd = changed(rng, calls[place], change, size, KINDS, DTYPES)
    return Program(seed, size, calls, place, odd, rng.randrange(size), change)


def changed(
    rng: random.Random, right: Call, change: str, size: int, kinds: Sequence[str], dtypes: Sequence[str]
) -> Optional[Call]:
    """The call as one rank makes it; None if it makes none."""
    if change == "kind":
        return right._replace(kind=rng.choice([kind for kind in kinds if kind != right.kind]))
    if change == "dtype":
        return right._replace(dtype=rng.choice([dtype for dtype in dtypes if dtype != right.dtype]))
    others: Dict[str, Any] = {
        "count": right.count + rng.choice((1, 2)) * size, "op": int(Sum) + int(Max) - right.op,
        "root": (right.root + 1) % size, "name": "other", "prescale": 2.0, "width": right.width + 1,
    }  # fmt: skip
    return right._replace(**{change: others[change]}) if change in others else None


def direct(context: Context, call: Call) -> Any:
    """Make the call."""
    array = call.array()
    if call.kind == "allreduce":
        return context.allreduce(array, call.op, call.name, call.prescale)
    if call.kind == "reducescatter":
        return context.reducescatter(array, call.op, call.name, call.prescale)
    if call.kind == "broadcast":
        return context.broadcast(array, call.root, call.name)
    return getattr(context, call.kind)(array, name=call.name)


def start(context: Context, call: Call, name: str) -> Tuple[Any, np.ndarray[Any, Any]]:
    """Submit the call by name; its handle, and the array that some of them overwrite."""
    engine, array = context.engine, call.array()
    flat, shape = array.reshape(-1), array.shape
    if call.kind == "allreduce":
        return engine.allreduce([flat], Options(call.op, None, call.prescale), name, [shape]), array
    if call.kind == "reducescatter":
        return engine.reducescatter([flat], [shape], Options(call.op, name, call.prescale)), array
    if call.kind == "broadcast":
        return engine.broadcast([flat], call.root, name, [shape]), array
    if call.kind == "allgather":
        return engine.allgather([flat], [shape], name), array
    return engine.alltoall(flat, shape, [call.count // context.size] * context.size, name), array


def check(call: Call, result: Any, size: int) -> None:
    """Of ones, whatever the call is, the result is known."""
    if call.kind in ("allreduce", "reducescatter"):
        rows = call.count if call.kind == "allreduce" else call.count // size
        value = (size if call.op == int(Sum) else 1) * call.prescale
    else:
        rows, value = call.count * (size if call.kind == "allgather" else 1), 1
    np.testing.assert_array_equal(result, np.full((rows, call.width), value, call.dtype))


class OwnProblem(Exception):
    """What a rank of a program raises by itself."""


def run_direct(case: Program, transport: str) -> None:
    """Calls in order: from the one that differs on, all ranks must fail, and read the same."""

    def work(context: Context) -> None:
        for number, call in enumerate([*case.calls, Call("barrier")]):
            if number == case.place and context.rank == case.odd_rank:
                if case.odd is None:
                    raise OwnProblem(f"program {case.seed}")
                call = case.odd
            if call.kind == "barrier":
                context.barrier()
                continue
            result = direct(context, call)
            if number < case.place:
                check(call, result, case.size)

    errors = _errors(case, work, transport)
    if case.odd is None:
        assert isinstance(errors[case.odd_rank], OwnProblem), errors
        others = [error for rank, error in enumerate(errors) if rank != case.odd_rank]
        assert all(type(error) is PeerLostError and "OwnProblem" in str(error) for error in others), errors
        assert {getattr(error, "rank", None) for error in others} == {case.odd_rank}, errors
        return
    assert all(type(error) is MismatchError for error in errors), errors
    assert len({str(error) for error in errors}) == 1, errors


def run_by_name(case: Program, transport: str) -> None:
    """Operations by name: what differs fails on all ranks with one text, and all others give their result."""

    def work(context: Context) -> List[Any]:
        order = list(enumerate(case.calls))
        random.Random(f"{case.seed} {context.rank}").shuffle(order)
        handles: Dict[int, Any] = {}
        for number, call in order:
            odd = number == case.place and context.rank == case.odd_rank
            handles[number] = start(context, case.odd if odd else call, f"op {number}")
        found: List[Any] = []
        for number, call in enumerate(case.calls):
            handle, array = handles[number]
            try:
                result = handle.wait(LIMIT_S)
            except RingcommError as error:
                found.append(f"{type(error).__name__}: {error}")
                continue
            if number != case.place:
                found.append("")
                check(call, array if result is None else result[0], case.size)
        assert float(context.allreduce(np.ones(1), Sum)[0]) == case.size
        return found

    results = run_ranks(case.size, work, transport=transport, settings=SETTINGS, timeout_s=LIMIT_S)
    assert all(result == results[0] for result in results), results
    failed = [number for number, text in enumerate(results[0]) if text]
    assert failed == [case.place] and results[0][case.place].startswith("MismatchError: "), results[0]


def _errors(case: Program, work: Callable[[Context], None], transport: str) -> List[BaseException]:
    """Return what each rank has raised; every one must."""
    try:
        run_ranks(case.size, work, transport=transport, settings=SETTINGS, timeout_s=LIMIT_S)
    except RankFailed as failure:
        assert all(error is not None for error in failure.errors), failure.errors
        return [error for error in failure.errors if error is not None]
    raise AssertionError("no rank has noticed anything")
