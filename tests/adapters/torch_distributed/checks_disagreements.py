"""Ranks whose calls differ in one respect, on rank 1: all get the same error, and none a wrong number."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, Callable, Dict, List, Tuple

import torch
import torch.distributed as dist

from ringcomm.errors import MismatchError
from tests.adapters.torch_distributed.harness import Ranks

REDUCE = dist.ReduceOp
COUNTS = (3, 120_001)
"""Elements of tensors: every second case is long."""
LIMIT = timedelta(seconds=20)
AT_ONCE = 16

Act = Callable[[Any, bool, int], Any]
"""Called with the group, whether this rank is the one that differs, and a number of elements."""


def full(count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(count, dtype=torch.uint8).to(dtype)


def each(group: Any, n: int, dtype: torch.dtype = torch.float32) -> List[torch.Tensor]:
    """A tensor for each rank."""
    return [full(n, dtype) for _ in range(group.size())]


def at(group: Any, n: int, root: int = 0) -> Any:
    """A tensor for each rank; on the root only."""
    return each(group, n) if group.rank() == root else None


def uneven(group: Any, odd: bool, n: int, dtype: torch.dtype = torch.float32) -> List[torch.Tensor]:
    """Tensors for each rank with the same sum of sizes, in another order on the rank that differs."""
    sizes = [n + 2 * odd, n + 2 * (not odd), *[n] * (group.size() - 2)]
    return [full(size, dtype) for size in sizes]


def rooted(kind: Any, root: int) -> Any:
    """Options, which a group's own methods take: ``dist.gather`` checks sizes on each rank before."""
    options = kind()
    options.rootRank = root
    return options


def gather(group: Any, n: int, mine: int) -> None:
    places = [at(group, n)] if group.rank() == 0 else []
    group.gather(places, [full(mine)], rooted(dist.GatherOptions, 0)).wait()


def scattered(group: Any, pieces: List[torch.Tensor], op: Any = REDUCE.SUM) -> None:
    dist.reduce_scatter(torch.zeros_like(pieces[group.rank()]), pieces, op, group=group)


def message(more: int, theirs: torch.dtype, late: bool) -> Act:
    """Rank 0 receives n elements of float32; rank 1 sends `more` of them, or of another type. `late`: the
    receive is posted when the message has come, or has been announced.
    """

    def act(group: Any, odd: bool, n: int) -> None:
        dist.barrier(group=group)
        if odd:
            sending = dist.isend(full(n + more, theirs), dist.get_global_rank(group, 0), group=group)
            dist.send(full(1), dist.get_global_rank(group, 0), group=group, tag=1)
            sending.wait()
        elif group.rank() == 0:
            if late:
                dist.recv(full(1), 1, group=group, tag=1)
            dist.recv(full(n), 1, group=group)

    return act


def ops(ours: Any, theirs: Any, call: Callable[[Any, Any, int], Any]) -> Act:
    """A call with a reduction, a type or a root, which is another one on the rank that differs."""
    return lambda group, odd, n: call(group, theirs if odd else ours, n)


CASES: Dict[str, Tuple[str, Act]] = {
    "all_reduce: SUM, MAX": ("allreduce(;Sum;Max", ops(
        REDUCE.SUM, REDUCE.MAX, lambda group, op, n: dist.all_reduce(full(n), op, group=group))),
    "all_reduce: type": ("float32;float64", ops(
        torch.float32, torch.float64,
        lambda group, dtype, n: dist.all_reduce(full(n, dtype), group=group))),
    "all_reduce: count": ("allreduce(;number of elements", lambda group, odd, n: dist.all_reduce(
        full(n + odd), group=group)),
    "all_reduce: sparse or not": ("allreduce(;sparse", lambda group, odd, n: dist.all_reduce(
        full(n).to_sparse() if odd else full(n), group=group)),
    "all_reduce_coalesced: (2, 3) and (3, 2)": ("allreduce(", lambda group, odd, n: (
        dist.all_reduce_coalesced([full(n + 1 - odd), full(n + odd)], group=group))),
    "reduce: root": ("root_rank=0;root_rank=1", ops(
        0, 1, lambda group, root, n: dist.reduce(full(n), root, group=group))),
    "reduce_scatter: [3, 1] and [1, 3]": ("reducescatter(;sizes [", lambda group, odd, n: (
        scattered(group, uneven(group, odd, n)))),
    "all_gather: [3, 1] and [1, 3]": ("allgather(;sizes [", lambda group, odd, n: dist.all_gather(
        uneven(group, odd, n), torch.zeros_like(uneven(group, odd, n)[group.rank()]), group=group)),
    "all_gather_into_tensor: float8, uint8": ("allgather(", ops(
        torch.float8_e4m3fn, torch.uint8, lambda group, dtype, n: dist.all_gather_into_tensor(
            full(n * group.size(), dtype), full(n, dtype), group=group))),
    "gather: one sends less": ("gather(;elements", lambda group, odd, n: gather(group, n, n - odd)),
    "scatter: one expects less": ("scatter(;elements", lambda group, odd, n: dist.scatter(
        full(n - odd), at(group, n), 0, group=group)),
    "all_to_all: one sends less": ("alltoall(;elements", lambda group, odd, n: group.alltoall(
        each(group, n), [full(n - odd), *each(group, n)[1:]]).wait()),
    "broadcast, allgather": ("broadcast(|barrier(;allgather(", lambda group, odd, n: (
        # A short broadcast may be over: then the next call differs.
        dist.all_gather(each(group, n), full(n), group=group) if odd
        else dist.broadcast(full(n), 0, group=group))),
    "reduce_scatter, barrier": ("reducescatter(;barrier(", lambda group, odd, n: (
        dist.barrier(group=group) if odd else dist.reduce_scatter(full(n), each(group, n), group=group))),
    **{f"send {name}, late={late}": (words, message(*what, late))
       for name, words, *what in (("one more", "recv(;send(;bytes", 1, torch.float32),
                                  ("another type", "float32;int32", 0, torch.int32))
       for late in (False, True)},
}  # fmt: skip


def told(group: Any, act: Act, odd: bool, n: int) -> Tuple[str, bool]:
    """Return what a rank is told, and whether it was told at the call."""
    at_once = True
    try:
        act(group, odd, n)
        at_once = False  # whose own part was right may learn at the next call
        dist.barrier(group=group)
    except Exception as error:  # noqa: BLE001 - what it is, the caller judges
        return f"{type(error).__name__}: {error}", at_once
    return "", False


def problem_with(texts: List[str], at_once: List[bool], words: List[str]) -> str:
    if len(set(texts)) > 1:
        return "ranks were told different things: " + " | ".join(texts)
    if not texts[0].startswith(f"{MismatchError.__name__}: "):
        return f"not a mismatch: {texts[0] or 'no error'}"
    missing = [word for word in words if not any(form in texts[0] for form in word.split("|"))]
    if missing:
        return f"{missing} not in: {texts[0]}"
    if f"{__file__}:" not in texts[0]:
        return f"where it was called is not in: {texts[0]}"
    return "" if any(at_once) else "no rank got an error at the call"


def check_ranks_that_disagree(on: Ranks) -> None:
    """All problems are reported together, since a table of them says more than the first. Each case runs in a
    group of its own, which ends with it; some run side by side: most of their time they wait for the root
    cause.
    """
    problems = []
    cases = list(CASES.items())
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for start in range(0, len(cases), AT_ONCE):
            part = cases[start : start + AT_ONCE]
            groups = [dist.new_group(timeout=LIMIT) for _ in part]
            mine = [
                pool.submit(told, group, act, on.rank == 1, COUNTS[number % 2])
                for number, (group, (_, (_, act))) in enumerate(zip(groups, part))
            ]
            on.store.set(f"{start} {on.rank}", json.dumps([future.result() for future in mine]))
            seen = [json.loads(on.store.get(f"{start} {rank}")) for rank in range(on.size)]
            for index, (name, (words, _)) in enumerate(part):
                texts, at_once = (list(column) for column in zip(*(answers[index] for answers in seen)))
                problem = problem_with(texts, at_once, words.split(";"))
                problems += [f"{name}: {problem}"] if problem else []
            for group in groups:
                dist.destroy_process_group(group)
    assert not problems, f"{len(problems)} of {len(cases)}:\n" + "\n".join(problems)
