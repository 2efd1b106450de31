"""Programs from seeds over ``torch.distributed`` in which one rank differs: an error on all ranks.

    ringrun -np 3 python -m tests.fuzz.diverging_group SEED COUNT

Each program runs in a process group of its own: a few calls that are right, one that one rank makes in
another way, and a few more. No rank may return anything but what its own call promises, and every rank must
raise by the end of the program. A rank that leaves in the middle makes all others raise, too.
"""

from __future__ import annotations

import random
import sys
from datetime import timedelta
from typing import Any, Dict, List, Tuple

import torch
import torch.distributed as dist

import ringcomm.torch.distributed  # noqa: F401 - registers the backend
from ringcomm.ops import Max, Sum
from tests.fuzz.diverging import Call, Program, changed

LIMIT_S = 60.0


DTYPES = ("float32", "float64", "int32", "bfloat16")
MATTERS: Dict[str, Tuple[str, ...]] = {
    "all_reduce": ("count", "dtype", "op", "kind", "leave"),
    "broadcast": ("count", "dtype", "root", "kind", "leave"),
    "reduce": ("count", "dtype", "op", "root", "kind", "leave"),
    "all_gather": ("count", "dtype", "kind", "leave"),
    "gather": ("count", "dtype", "root", "kind", "leave"),
    "scatter": ("count", "dtype", "root", "kind", "leave"),
    "reduce_scatter": ("count", "dtype", "op", "kind", "leave"),
    "all_to_all": ("count", "dtype", "kind", "leave"),
}
"""About what all ranks must agree in a call."""


def program(seed: int, size: int) -> Program:
    """The program of this seed."""
    rng = random.Random(f"{seed} {size}")
    count = rng.choice((1, 3, 50, 20_000))

    def call() -> Call:
        kind, dtype, op = rng.choice(list(MATTERS)), rng.choice(DTYPES), int(rng.choice((Sum, Max)))
        return Call(kind, count, 1, dtype, op, rng.randrange(size))

    calls = [call() for _ in range(rng.randrange(1, 5))]
    place = rng.randrange(len(calls))
    change = rng.choice(MATTERS[calls[place].kind])
    odd = changed(rng, calls[place], change, size, list(MATTERS), DTYPES)
    return Program(seed, size, calls, place, odd, rng.randrange(size), change)


def make(call: Call, group: Any) -> None:
    """Make the call, and compare what it gives to what it promises."""
    rank, size = dist.get_rank(), dist.get_world_size()
    op = dist.ReduceOp.SUM if call.op == int(Sum) else dist.ReduceOp.MAX

    def filled(value: float, count: int = call.count) -> torch.Tensor:
        return torch.full((count,), value, dtype=getattr(torch, call.dtype))

    mine, every = filled(rank + 1), range(1, size + 1)
    reduced = float(sum(every) if call.op == int(Sum) else max(every))
    many = [filled(0) for _ in every]
    if call.kind == "all_reduce":
        dist.all_reduce(mine, op, group)
        same([mine], [reduced])
    elif call.kind == "broadcast":
        dist.broadcast(mine, call.root, group)
        same([mine], [call.root + 1])
    elif call.kind == "reduce":
        dist.reduce(mine, call.root, op, group)
        same([mine] if rank == call.root else [], [reduced])
    elif call.kind == "all_gather":
        dist.all_gather(many, mine, group)
        same(many, every)
    elif call.kind == "gather":
        dist.gather(mine, many if rank == call.root else None, call.root, group)
        same(many if rank == call.root else [], every)
    elif call.kind == "scatter":
        parts = [filled(value) for value in every] if rank == call.root else None
        dist.scatter(mine, parts, call.root, group)
        same([mine], [rank + 1])
    elif call.kind == "reduce_scatter":
        dist.reduce_scatter(mine, [filled(rank + 1) for _ in every], op, group)
        same([mine], [reduced])
    else:
        whole = filled(0, size * call.count)
        dist.all_to_all_single(whole, mine.repeat(size), group=group)
        same(list(whole.chunk(size)), every)


def same(found: List[torch.Tensor], expected: Any) -> None:
    """Compare each tensor to the number that it must be full of."""
    for tensor, value in zip(found, expected):
        if not bool((tensor == value).all()):
            raise AssertionError(f"{value} expected, {tensor[:5].tolist()} found")


def run(case: Program, group: Any) -> str:
    """The error with which this rank's part of the program has ended, or "left" or "nothing"."""
    for number, call in enumerate(case.calls):
        if number == case.place and dist.get_rank() == case.odd_rank:
            if case.odd is None:
                return "left"
            call = case.odd
        try:
            make(call, group)
        except AssertionError as error:
            return f"WRONG in call {number}: {error}"
        except (RuntimeError, ValueError) as error:
            return f"call {number}: {type(error).__name__}: {error}"
    try:
        dist.barrier(group)
    except RuntimeError as error:
        return f"the last barrier: {type(error).__name__}: {error}"
    return "nothing"


def judge(case: Program, ends: List[str]) -> None:
    """Check that all ranks have raised one text with the cause, and none before the call that differs."""
    texts = set()
    for rank, end in enumerate(ends):
        if case.odd is None and rank == case.odd_rank:
            assert end == "left", (case, ends)
            continue
        at, _, text = end.partition(": ")
        assert at == "the last barrier" or int(at.split()[-1]) >= case.place, (case, ends)
        texts.add(text)
    assert len(texts) == 1, (case, ends)
    (text,) = texts
    if case.odd is None:
        assert text.startswith(f"PeerLostError: rank {case.odd_rank} "), (case, ends)
    else:
        assert text.startswith("MismatchError: The ranks do not make the same call"), (case, ends)


def main(first: int, count: int) -> None:
    """Run these programs one after another."""
    dist.init_process_group("ringcomm")
    everyone = list(range(dist.get_world_size()))
    for seed in range(first, first + count):
        case = program(seed, len(everyone))
        group = dist.new_group(everyone, timeout=timedelta(seconds=LIMIT_S))
        end = run(case, group)
        if end == "left":
            dist.destroy_process_group(group)
        ends: List[Any] = [None] * len(everyone)
        dist.all_gather_object(ends, end)
        if end != "left":
            dist.destroy_process_group(group)
        judge(case, ends)
    if dist.get_rank() == 0:
        print(f"{count} programs of one odd rank from seed {first} on {len(everyone)} ranks", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
