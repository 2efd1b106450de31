"""Ranks whose calls differ in one argument: every rank gets the same error, and none a wrong number.

Each case is an operation in which rank 1 differs from the others in one respect. Each runs in a group of
its own, since that ends with it.
"""

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
SMALL, LARGE = 3, 120_001
LIMIT = timedelta(seconds=20)
AT_ONCE = 8

Act = Callable[[Any, bool, int], None]
"""Called with the group, whether this rank is the one that differs, and a number of elements."""

CASES: List[Tuple[str, List[str], Act]] = []
"""Name, words that the error must have, and the operation."""


def case(name: str, *words: str) -> Callable[[Act], Act]:
    def keep(act: Act) -> Act:
        CASES.append((name, list(words), act))
        return act

    return keep


def full(count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(count, dtype=torch.uint8).to(dtype)


def empty(*counts: int, dtype: torch.dtype = torch.float32) -> List[torch.Tensor]:
    return [torch.zeros(count, dtype=torch.uint8).to(dtype) for count in counts]


def on_root(group: Any, n: int, root: int = 0) -> Any:
    """A tensor for each rank; on the root only."""
    return empty(*[n] * group.size()) if group.rank() == root else None


def lists(group: Any, n: int, odd: bool) -> List[int]:
    """Sizes for each rank with the same sum, in another order on the rank that differs."""
    sizes = [n, n + 2, *[n] * (group.size() - 2)]
    return [sizes[1], sizes[0], *sizes[2:]] if odd else sizes


# ---- one parameter of one collective ---------------------------------------------------------------


def reductions() -> None:
    pairs: Dict[str, Tuple[Any, Any, torch.dtype]] = {
        "SUM, MAX": (REDUCE.SUM, REDUCE.MAX, torch.float32),
        "SUM, AVG": (REDUCE.SUM, REDUCE.AVG, torch.float32),
        "BAND, BOR": (REDUCE.BAND, REDUCE.BOR, torch.int32),
        "BXOR, SUM": (REDUCE.BXOR, REDUCE.SUM, torch.int64),
        "SUM, PREMUL_SUM": (REDUCE.SUM, dist._make_nccl_premul_sum(2.0), torch.float32),
    }
    for name, (ours, theirs, dtype) in pairs.items():
        words = name.replace("SUM", "Sum").replace("MAX", "Max").replace("AVG", "Average")
        words = words.replace("PREMUL_Sum", "PREMUL_SUM").split(", ")

        def all_reduce(group: Any, odd: bool, n: int, o: Any = ours, t: Any = theirs, d: Any = dtype) -> None:
            dist.all_reduce(full(n, d), t if odd else o, group=group)

        def reduce(group: Any, odd: bool, n: int, o: Any = ours, t: Any = theirs, d: Any = dtype) -> None:
            dist.reduce(full(n, d), dist.get_global_rank(group, 0), t if odd else o, group=group)

        def scatter(group: Any, odd: bool, n: int, o: Any = ours, t: Any = theirs, d: Any = dtype) -> None:
            whole = full(n * group.size(), d)
            dist.reduce_scatter_tensor(full(n, d), whole, t if odd else o, group=group)

        case(f"all_reduce: {name}", "allreduce(", *words)(all_reduce)
        case(f"reduce: {name}", "reduce(", *words)(reduce)
        case(f"reduce_scatter_tensor: {name}", "reducescatter(", *words)(scatter)


reductions()


def types() -> None:
    """The types differ, the bytes need not."""
    for ours, theirs in (
        (torch.float32, torch.float64),
        (torch.int32, torch.uint32),
        (torch.bfloat16, torch.int16),
        (torch.float8_e4m3fn, torch.uint8),
    ):
        name = f"{ours}, {theirs}".replace("torch.", "")

        def broadcast(group: Any, odd: bool, n: int, o: Any = ours, t: Any = theirs) -> None:
            dist.broadcast(full(n, t if odd else o), 1, group=group)

        def gather(group: Any, odd: bool, n: int, o: Any = ours, t: Any = theirs) -> None:
            dtype = t if odd else o
            places = empty(*[n] * group.size(), dtype=dtype) if group.rank() == 0 else None
            dist.gather(full(n, dtype), places, 0, group=group)

        def exchange(group: Any, odd: bool, n: int, o: Any = ours, t: Any = theirs) -> None:
            dtype, count = t if odd else o, n * group.size()
            dist.all_to_all_single(full(count, dtype), full(count, dtype), group=group)

        def all_gather(group: Any, odd: bool, n: int, o: Any = ours, t: Any = theirs) -> None:
            dtype = t if odd else o
            dist.all_gather_into_tensor(full(n * group.size(), dtype), full(n, dtype), group=group)

        case(f"broadcast: {name}", "broadcast(")(broadcast)
        case(f"gather: {name}", "gather(")(gather)
        case(f"all_to_all_single: {name}", "alltoall(")(exchange)
        case(f"all_gather_into_tensor: {name}", "allgather(")(all_gather)


types()


case("all_reduce: count", "allreduce(", "number of elements")(
    lambda group, odd, n: dist.all_reduce(full(n + odd), group=group)
)
case("all_reduce: type", "float32", "float64")(
    lambda group, odd, n: dist.all_reduce(full(n, torch.float64 if odd else torch.float32), group=group)
)
case("all_reduce: BAND of other counts", "allreduce(", "op=BAND")(
    lambda group, odd, n: dist.all_reduce(full(n + odd, torch.int32), REDUCE.BAND, group=group)
)
case("all_reduce: sparse or not", "allreduce(", "sparse")(
    lambda group, odd, n: dist.all_reduce(full(n).to_sparse() if odd else full(n), group=group)
)
case("all_reduce: sparse, SUM and AVG", "op=Sum", "op=Average")(
    lambda group, odd, n: dist.all_reduce(full(n).to_sparse(), REDUCE.AVG if odd else REDUCE.SUM, group=group)
)
case("all_reduce: sparse, other shapes", "sparse")(
    lambda group, odd, n: dist.all_reduce(full(n + odd).to_sparse(), group=group)
)
case("all_reduce_coalesced: (2, 3) and (3, 2)", "allreduce(")(
    lambda group, odd, n: dist.all_reduce_coalesced([full(n + 1 - odd), full(n + odd)], group=group)
)
case("all_reduce_coalesced: one more", "allreduce(")(
    lambda group, odd, n: dist.all_reduce_coalesced([full(n) for _ in range(2 + odd)], group=group)
)
case("all_reduce_coalesced: none", "no tensors")(
    lambda group, odd, n: group.allreduce_coalesced([] if odd else [full(n), full(n)]).wait()
)
case("reduce: root", "root_rank=0", "root_rank=1")(
    lambda group, odd, n: dist.reduce(full(n), int(odd), group=group)
)
case("reduce: count", "reduce(")(lambda group, odd, n: dist.reduce(full(n + odd), 0, group=group))
case("reduce: small or large", "reduce(")(
    lambda group, odd, n: dist.reduce(full(1 if odd else LARGE), 0, group=group)
)
case("broadcast: root", "root_rank=0", "root_rank=1")(
    lambda group, odd, n: dist.broadcast(full(n), int(odd), group=group)
)
case("broadcast: count", "number of elements")(
    lambda group, odd, n: dist.broadcast(full(n + odd), 0, group=group)
)


@case("all_gather: [3, 1] and [1, 3]", "allgather(", "sizes [")
def _(group: Any, odd: bool, n: int) -> None:
    places = empty(*lists(group, n, odd))
    dist.all_gather(places, torch.zeros_like(places[group.rank()]), group=group)


case("all_gather: count", "allgather(")(
    lambda group, odd, n: dist.all_gather(empty(*[n + odd] * group.size()), full(n + odd), group=group)
)
case("all_gather_into_tensor: count", "allgather(")(
    lambda group, odd, n: dist.all_gather_into_tensor(
        full((n + odd) * group.size()), full(n + odd), group=group
    )
)


@case("all_gather_into_tensor coalesced: one more", "tensor 1 of 2", "tensor 1 of 3")
def _(group: Any, odd: bool, n: int) -> None:
    pairs = [(full(n * group.size()), full(n)) for _ in range(2 + odd)]
    group.all_gather_single_coalesced(*zip(*pairs)).wait()


@case("all_gather coalesced: swapped", "allgather(")
def _(group: Any, odd: bool, n: int) -> None:
    inputs = [full(n + odd), full(n + 1 - odd)]
    group.allgather_coalesced([[t.clone() for t in inputs] for _ in range(group.size())], inputs).wait()


def gather_case(group: Any, n: int, mine: int) -> None:
    places = [on_root(group, n)] if group.rank() == 0 else []
    group.gather(places, [full(mine)], gather_to(0)).wait()


case("gather: one sends less", "gather(", "elements")(lambda group, odd, n: gather_case(group, n, n - odd))
case("gather: one sends more", "gather(", "elements")(
    lambda group, odd, n: gather_case(group, n, n + 2 * odd)
)
case("gather: root", "root_rank=0", "root_rank=1")(
    lambda group, odd, n: dist.gather(full(n), on_root(group, n, int(odd)), int(odd), group=group)
)
case("scatter: one expects less", "scatter(", "elements")(
    lambda group, odd, n: dist.scatter(full(n - odd), on_root(group, n), 0, group=group)
)
case("scatter: root", "root_rank=0", "root_rank=1")(
    lambda group, odd, n: dist.scatter(full(n), on_root(group, n, int(odd)), int(odd), group=group)
)


@case("reduce_scatter: [3, 1] and [1, 3]", "reducescatter(", "sizes [")
def _(group: Any, odd: bool, n: int) -> None:
    pieces = empty(*lists(group, n, odd))
    dist.reduce_scatter(torch.zeros_like(pieces[group.rank()]), pieces, group=group)


@case("reduce_scatter: BOR of [3, 1] and [1, 3]", "reducescatter(", "op=BOR")
def _(group: Any, odd: bool, n: int) -> None:
    pieces = empty(*lists(group, n, odd), dtype=torch.int32)
    dist.reduce_scatter(torch.zeros_like(pieces[group.rank()]), pieces, REDUCE.BOR, group=group)


case("reduce_scatter_tensor: count", "reducescatter(")(
    lambda group, odd, n: dist.reduce_scatter_tensor(
        full(n + odd), full((n + odd) * group.size()), group=group
    )
)


@case("reduce_scatter_tensor coalesced: one more", "tensor 1 of 2", "tensor 1 of 3")
def _(group: Any, odd: bool, n: int) -> None:
    pairs = [(full(n), full(n * group.size())) for _ in range(2 + odd)]
    group.reduce_scatter_single_coalesced(*zip(*pairs)).wait()


@case("all_to_all: one sends less", "alltoall(", "elements")
def _(group: Any, odd: bool, n: int) -> None:
    inputs = empty(n - odd if group.rank() else n, *[n] * (group.size() - 1))
    places = empty(*[n] * group.size())
    group.alltoall(places, inputs).wait()


@case("all_to_all_single: count", "alltoall(")
def _(group: Any, odd: bool, n: int) -> None:
    count = (n + odd) * group.size()
    dist.all_to_all_single(full(count), full(count), group=group)


case("all_to_all_single: sends n, expects n - 1", "alltoall(", "sending")(
    lambda group, odd, n: splits_case(group, odd, n, -1)
)
case("all_to_all_single: sends n, expects n + 17", "alltoall(", "sending")(
    lambda group, odd, n: splits_case(group, odd, n, 17)
)


def splits_case(group: Any, odd: bool, n: int, more: int) -> None:
    send = [n] * group.size()
    into = [n + more if odd and peer == 0 else n for peer in range(group.size())]
    dist.all_to_all_single(full(sum(into)), full(sum(send)), into, send, group=group)


# ---- messages: rank 0 receives, rank 1 sends -------------------------------------------------------


def message(more: int, theirs: torch.dtype = torch.float32, late: bool = False) -> Act:
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


for late in (False, True):
    when = ", before the receive" if late else ""
    case(f"send one less{when}", "recv(", "send(", "bytes")(message(-1, late=late))
    case(f"send one more{when}", "recv(", "send(", "bytes")(message(1, late=late))
    case(f"send another type{when}", "float32", "int32")(message(0, torch.int32, late))


@case("batch_isend_irecv: count", "recv(", "send(", "bytes")
def _(group: Any, odd: bool, n: int) -> None:
    if group.rank() > 1:
        return
    peer = 1 - group.rank()
    batch = [
        dist.P2POp(dist.isend, full(n + odd), peer, group),
        dist.P2POp(dist.irecv, full(n), peer, group),
    ]
    for work in dist.batch_isend_irecv(batch):
        work.wait()


# ---- other calls -----------------------------------------------------------------------------------


def others() -> None:
    calls: Dict[str, Callable[[Any, int], None]] = {
        "allreduce": lambda group, n: dist.all_reduce(full(n), group=group),
        "reduce": lambda group, n: dist.reduce(full(n), 0, group=group),
        "broadcast": lambda group, n: dist.broadcast(full(n), 0, group=group),
        "allgather": lambda group, n: dist.all_gather(empty(*[n] * group.size()), full(n), group=group),
        "gather": lambda group, n: dist.gather(full(n), on_root(group, n), 0, group=group),
        "scatter": lambda group, n: dist.scatter(full(n), on_root(group, n), 0, group=group),
        "alltoall": lambda group, n: dist.all_to_all_single(
            full(n * group.size()), full(n * group.size()), group=group
        ),
        "reducescatter": lambda group, n: dist.reduce_scatter_tensor(
            full(n), full(n * group.size()), group=group
        ),
        "barrier": lambda group, n: dist.barrier(group=group),
    }
    names = list(calls)
    for first, second in zip(names, [*names[1:], names[0]]):

        def act(group: Any, odd: bool, n: int, first: str = first, second: str = second) -> None:
            calls[second if odd else first](group, n)

        words = [f"{name}(" + ("|barrier(" if name == "broadcast" else "") for name in (first, second)]
        case(f"{first}, {second}", *words)(act)  # a short broadcast may be over: then the next call differs


others()


def gather_to(root: int) -> Any:
    """Options, which a group's own methods take: ``dist.gather`` checks sizes on each rank before."""
    options = dist.GatherOptions()
    options.rootRank = root
    return options


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
    """All problems are reported together, since a table of them says more than the first.

    Some cases run side by side, each in a thread: most of their time they wait for the root cause.
    """
    problems = []
    cases = [(f"{name}, n = {n}", words, act, n) for name, words, act in CASES for n in (SMALL, LARGE)]
    assert len({name for name, *_ in cases}) == len(cases) > 150
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for start in range(0, len(cases), AT_ONCE):
            batch = cases[start : start + AT_ONCE]
            groups = [dist.new_group(timeout=LIMIT) for _ in batch]
            mine = [
                pool.submit(told, group, act, on.rank == 1, n) for group, (_, _, act, n) in zip(groups, batch)
            ]
            on.store.set(f"{start} {on.rank}", json.dumps([future.result() for future in mine]))
            seen = [json.loads(on.store.get(f"{start} {rank}")) for rank in range(on.size)]
            for index, (name, words, _, _) in enumerate(batch):
                texts, at_once = (list(column) for column in zip(*(answers[index] for answers in seen)))
                problem = problem_with(texts, at_once, words)
                problems += [f"{name}: {problem}"] if problem else []
            for group in groups:
                dist.destroy_process_group(group)
    assert not problems, f"{len(problems)} of {len(cases)}:\n" + "\n".join(problems)
