"""Real processes for checks: all checks of a module run in one job, because starting one takes seconds."""

from __future__ import annotations

import importlib
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple, Sequence, Tuple

import numpy as np

import ringcomm as rc
from ringcomm._adapter import placed
from ringcomm.config import Settings
from tests.support.errors import raises

LIMIT_S = 170.0
Operation = Callable[[Any, Any], Any]


def run_checks(modules: Sequence[str], before: Callable[[], Any] = lambda: None) -> Dict[str, str]:
    """Run the modules' ``check_*`` functions in order on every rank, each after `before`; return results."""
    checks = {
        f"{module.rpartition('.')[2]}.{name}": item
        for module in modules
        for name, item in vars(importlib.import_module(module)).items()
        if name.startswith("check_")
    }
    outcome: Dict[str, str] = {}
    rc.init()
    for name, check in checks.items():
        before()
        started = time.perf_counter()
        try:
            check()
            rc.barrier()
        except Exception:  # noqa: BLE001 - reported by the test
            outcome[name] = traceback.format_exc()
            print(f"{name}: {outcome[name]}", file=sys.stderr)  # the others may be left waiting, and fail
            break
        outcome[name] = f"ok {time.perf_counter() - started:.2f} s"
    rc.shutdown()
    return outcome


def run_on(ranks: int, modules: Sequence[str], runner: Any = run_checks, **environment: str) -> None:
    """Run modules' checks as a job, by `runner`, and fail if one has failed on any rank."""
    outcomes: List[Dict[str, str]] = run(runner, (list(modules),), ranks, **environment)
    assert len(outcomes) == ranks
    check_outcomes(outcomes)


def check_outcomes(outcomes: Sequence[Dict[str, str]]) -> None:
    """Print how long each check took, and fail if any has failed on any rank: see :func:`run_checks`."""
    for name, result in outcomes[0].items():
        print(f"{name} {result if result.startswith('ok') else 'failed'}")
    bad = [
        f"rank {rank}: {name}: {result}"
        for rank, outcome in enumerate(outcomes)
        for name, result in outcome.items()
        if not result.startswith("ok")
    ]
    assert not bad, "\n".join(bad)
    assert len(outcomes[0]) > 1


def run(function: Any, arguments: Any, ranks: int, **environment: str) -> List[Any]:
    """Run a function as a job of so many processes, none of which uses all cores."""
    quiet = {"OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3", "TF_NUM_INTRAOP_THREADS": "1"}
    results: List[Any] = rc.run(
        function,
        arguments,
        np=ranks,
        start_timeout_s=LIMIT_S,
        env={**quiet, **environment},
    )
    return results


def warned_about_different_weights(train: Callable[[str, int], None]) -> None:
    """Ranks are told once that their weights differ; ``train`` takes a name and what to add to them."""
    context = rc.api.context()
    for name, apart in (("alike", False), ("apart", True)):
        topics: List[str] = []
        context.announce = lambda topic, text, topics=topics: topics.append(topic)  # type: ignore[method-assign, misc]
        try:
            train(name, context.rank if apart else 0)
        finally:
            del context.announce  # type: ignore[method-assign]
        assert topics == ["different weights"] * (apart and context.rank == 0 and context.size > 1), topics


def lose_a_rank(start: Callable[[], Callable[[], Any]], notes: str) -> None:
    """Rank 1 ends in the middle of training; the others write down the error that they get."""
    rc.init()
    step = start()
    try:
        for number in range(1000):
            if number == 3 and rc.rank() == 1:
                os._exit(7)
            step()
    except rc.HorovodInternalError as error:
        assert isinstance(error, rc.Recoverable), error
        Path(notes, str(rc.rank())).write_text(str(error))
        raise


def check_a_lost_rank(start: Callable[[], Callable[[], Any]], folder: Path) -> None:
    """Rank 1 of three ends in training (steps of `start`): the others get the same error, which names it."""
    from ringrun.function import RemoteError  # the ranks do without it

    raises(RemoteError, lambda: run(lose_a_rank, (start, str(folder)), 3), "rank 1")
    texts = {path.name: path.read_text() for path in folder.iterdir()}
    assert sorted(texts) == ["0", "2"] and texts["0"] == texts["2"], texts
    assert texts["0"].startswith("rank 1"), texts


class Failure(NamedTuple):
    """What a rank raised: its traceback."""

    text: str


class InTurn:
    """Each rank's results (or failures) of jobs that ran in turn, by function name and number of ranks."""

    def __init__(self, outcomes: Dict[Tuple[str, int], List[Any]]) -> None:
        self._outcomes = outcomes

    def results(self, function: Any, ranks: int) -> List[Any]:
        """Return what the ranks returned, in rank order; an assertion fails if one of them raised."""
        found = self._outcomes[function.__name__, ranks]
        bad = [f"rank {rank} of {ranks}: {item.text}" for rank, item in enumerate(found)
               if isinstance(item, Failure)]  # fmt: skip
        assert not bad, f"{function.__name__}:\n" + "\n".join(bad)
        return found


def run_in_turn(parts: Sequence[Tuple[Any, int]], **environment: str) -> InTurn:
    """Run all functions as jobs in turn, the largest first, in processes that import the framework once."""
    ordered = sorted(parts, key=lambda part: -part[1])
    settings = Settings(timeout_s=LIMIT_S, start_timeout_s=LIMIT_S)
    jobs = [
        placed.PlacedJob("test", ranks, settings, [placed.Host("here", "localhost")] * ranks)
        for _, ranks in ordered
    ]
    try:
        calls = [(function, job.tickets) for (function, _), job in zip(ordered, jobs)]
        by_process = run(take_part, (calls,), ordered[0][1], **environment)
    finally:
        for job in jobs:
            job.close()
    return InTurn({
        (function.__name__, ranks): [found[place] for found in by_process[:ranks]]
        for place, (function, ranks) in enumerate(ordered)
    })  # fmt: skip


def take_part(calls: Sequence[Tuple[Any, Sequence[placed.Ticket]]]) -> List[Any]:
    """In each process: call the functions of the jobs in which it is a rank; what became of each."""
    rank = int(os.environ["RINGCOMM_SLOT"].rpartition(":")[2])
    outcomes: List[Any] = []
    for function, tickets in calls:
        if rank >= len(tickets):
            break
        try:
            outcomes.append(placed.call(tickets[rank], function, (), {}))
        except Exception:  # noqa: BLE001 - reported by the test
            outcomes.append(Failure(traceback.format_exc()))
    return outcomes


def numbers(rank: int, shape: Any, dtype: Any, salt: int = 0) -> Any:
    """Return what a rank contributes; every rank can compute those of the others."""
    whole = np.random.default_rng([salt, rank]).integers(-9, 10, shape)
    kind = np.dtype(dtype)
    if kind == np.bool_:
        return whole > 0
    if kind.kind == "u":
        return np.abs(whole).astype(kind)
    # ml_dtypes' bfloat16 is of no kind of NumPy's own.
    return whole.astype(kind) if kind.kind in "iu" else (whole / 4).astype(kind)


def everybodys(shape: Any, dtype: Any, salt: int = 0) -> Any:
    """All contributions, in float64, stacked."""
    return np.stack([numbers(rank, shape, dtype, salt).astype(np.float64) for rank in range(rc.size())])


def close(result: Any, expected: Any) -> None:
    """The same up to the rounding of the result's own type."""
    found = np.asarray(result)
    exact = found.dtype.kind in "iub"
    target = np.trunc(expected) if exact else expected
    places = {"float16": 1e-3, "bfloat16": 8e-3, "float32": 1e-6}.get(found.dtype.name, 1e-12)
    assert found.shape == np.shape(expected), (found.shape, np.shape(expected))
    np.testing.assert_allclose(
        found.astype(np.float64), target, rtol=0 if exact else places, atol=0 if exact else places
    )


def same_everywhere(array: Any) -> None:
    """Every rank has the same bits."""
    found = rc.allgather_object(np.asarray(array).tobytes())
    assert all(item == found[0] for item in found)


def operations_with_a_set(hvd: Any, mine: Any, root: int) -> Dict[str, Tuple[Operation, float]]:
    """Return each operation in this rank's set, where `root` broadcasts, and the gradient from ones."""
    members, at_root = mine.size(), 1.0 if hvd.rank() == root else 0.0
    return {
        "sum": (lambda item, group: hvd.allreduce(item, op=hvd.Sum, process_set=group), members),
        "average": (lambda item, group: hvd.allreduce(item, process_set=group), 1.0),
        "grouped": (
            lambda item, group: hvd.grouped_allreduce([item, item], op=hvd.Sum, process_set=group)[1], members
        ),
        "allgather": (lambda item, group: hvd.allgather(item, process_set=group), 1.0),
        "gathered": (lambda item, group: hvd.grouped_allgather([item], process_set=group)[0], 1.0),
        "broadcast": (lambda item, group: hvd.broadcast(item, root, process_set=group), at_root),
        "alltoall": (lambda item, group: hvd.alltoall(item, process_set=group), 1.0),
        "scatter": (lambda item, group: hvd.reducescatter(item, op=hvd.Sum, process_set=group), members),
        "part": (lambda item, group: hvd.reducescatter(item, process_set=group), 1.0),
        "parts": (
            lambda item, group: hvd.grouped_reducescatter([item], op=hvd.Sum, process_set=group)[0], members
        ),
    }  # fmt: skip
