"""Programs from seeds, the same on all ranks but for delays and for the order of what has a name.

    ringrun -np 3 python -m tests.fuzz.agreeing FIRST COUNT

runs programs FIRST to FIRST + COUNT - 1 of each family on the ranks of one job. Every rank computes what all
of them put in, so it works out alone what must come out. The first program that gives something else ends the
job, and says its family and seed; with these it runs again (``… SEED 1 FAMILY``).
"""

from __future__ import annotations

import random
import sys
import time
import zlib
from fractions import Fraction
from typing import Any, Dict, List, NamedTuple, Sequence

import numpy as np

import ringcomm as rc
from ringcomm.dtypes import dtype_named
from ringcomm.ops import ReduceOp
from ringcomm.schedule.steps import even_bounds
from tests.support.reference import all_dtypes, assert_reduced, contributions, ops_for

DTYPES = all_dtypes()
KINDS = (
    "allreduce", "allreduce", "grouped", "broadcast", "allgather", "gathers", "alltoall", "reducescatter",
    "barrier", "object",
)  # fmt: skip
BY_ROWS = ("allgather", "gathers", "alltoall")
MANY = 5000
WAYS = ("direct", "in place", "async", "async", "async")


def delay(rng: random.Random) -> None:
    """Now and then, wait for a few milliseconds."""
    if rng.random() < 0.1:
        time.sleep(rng.uniform(0.0, 0.004))


class Step(NamedTuple):
    """One operation of a program, the same on all ranks."""

    number: int
    kind: str
    way: str  # direct, in place or async
    dtype: np.dtype[Any]
    rows: Sequence[int]  # of the array; for each rank if the collective is by rows
    width: int
    op: ReduceOp
    root: int
    named: bool
    group: Sequence[int]  # the ranks that take part
    seed: int

    def inputs(self, size: int) -> List[np.ndarray[Any, Any]]:
        """Return what each rank puts in."""
        most = max(self.rows)
        arrays = contributions(self.dtype, size, most * self.width, self.seed)
        return [array.reshape(most, self.width)[: self.rows[rank]] for rank, array in enumerate(arrays)]


def numpy_program(seed: int, size: int, groups: Sequence[Sequence[int]]) -> List[Step]:
    """The steps of a program over the NumPy interface."""
    rng = random.Random(seed)
    steps = []
    for number in range(rng.randrange(3, 12)):
        kind, way = rng.choice(KINDS), rng.choice(WAYS)
        dtype = rng.choice(DTYPES)
        rows = [rng.choice((0, 1, 2, 3, 5, 17, 300)) for _ in range(size)]
        if kind not in BY_ROWS:
            rows = rows[:1] * size
        elif rng.random() < 0.05:
            rows[rng.randrange(size)] = MANY  # with 64 columns it travels alone, and those of others do not
        group = rng.choice(groups) if way == "async" and rng.random() < 0.3 else range(size)
        steps.append(
            Step(
                number, kind, way, dtype, rows, rng.choice((1, 3, 64)), rng.choice(ops_for(dtype)),
                rng.choice(list(group)), rng.random() < 0.7, tuple(group), rng.getrandbits(30),
            )  # fmt: skip
        )
    return steps


def laid_out(array: np.ndarray[Any, Any], rng: random.Random) -> np.ndarray[Any, Any]:
    """The same numbers in an array of its own, in one of several memory layouts."""
    layout = rng.randrange(5)
    if layout == 0:
        return array.copy()
    if layout == 1:
        return np.asfortranarray(array)
    if layout == 2:
        return np.repeat(array, 2, axis=0)[::2]
    if layout == 3:
        return array[::-1].copy()[::-1]
    unaligned = np.empty(array.nbytes + 1, np.uint8)[1:].view(array.dtype).reshape(array.shape)
    unaligned[...] = array
    return unaligned


class NumpyFamily:
    """Direct calls, calls in place, operations by name or by order, grouped, and in process sets."""

    def __init__(self) -> None:
        self.rank, self.size = rc.rank(), rc.size()
        pairs = [(first, second) for first in range(self.size) for second in range(first + 1, self.size)]
        pairs = [pair for pair in pairs if len(pair) < self.size]
        self.sets = {pair: rc.add_process_set(list(pair)) for pair in pairs}
        self.sets[tuple(range(self.size))] = rc.global_process_set
        self.digest = 0

    def run(self, seed: int) -> int:
        """Run a program; a digest of what all ranks must have alike."""
        rng = random.Random(f"{seed} {self.rank}")
        steps = numpy_program(seed, self.size, list(self.sets))
        self.digest = 0
        while steps:
            count = next((i for i, step in enumerate(steps) if step.way != "async"), len(steps)) or 1
            burst, steps = steps[:count], steps[count:]
            delay(rng)
            if burst[0].way != "async":
                self._check(burst[0], self._direct(burst[0], rng))
            else:
                self._burst([step for step in burst if self.rank in step.group], rng)
        return self.digest

    def _burst(self, steps: List[Step], rng: random.Random) -> None:
        # Those without a name are matched by their order; the others may come in any.
        free = [step for step in steps if step.named]
        rng.shuffle(free)
        order = [free.pop() if step.named else step for step in steps]
        handles: Dict[int, Any] = {}
        for step in order:
            handles[step.number] = self._start(step, rng)
            delay(rng)
        rng.shuffle(order)
        results = {step.number: handles[step.number].wait() for step in order}
        for step in steps:
            self._check(step, results[step.number])

    def _direct(self, step: Step, rng: random.Random) -> Any:
        mine = laid_out(step.inputs(self.size)[self.rank], rng)
        suffix = "_" if step.way == "in place" else ""
        name = f"s{step.number}" if step.named else None
        if step.kind == "grouped":
            return [rc.allreduce(array, step.op, name) for array in (mine, mine[:1])]
        if step.kind == "allreduce":
            return getattr(rc, f"allreduce{suffix}")(mine, step.op, name)
        if step.kind == "reducescatter":
            return getattr(rc, f"reducescatter{suffix}")(mine, step.op, name)
        if step.kind == "broadcast":
            return getattr(rc, f"broadcast{suffix}")(mine, step.root, name)
        if step.kind == "allgather":
            return rc.allgather(mine, name)
        if step.kind == "gathers":
            return rc.grouped_allgather([mine, mine[:1]], name)
        if step.kind == "alltoall":
            return rc.alltoall(mine, self._splits(step, self.rank), name)
        if step.kind == "object":
            return rc.allgather_object((self.rank, step.seed), name)
        return rc.barrier(name)

    def _start(self, step: Step, rng: random.Random) -> Any:
        mine = laid_out(step.inputs(self.size)[self.rank], rng)
        options = {"name": f"s{step.number}" if step.named else None}
        options["process_set"] = self.sets[tuple(step.group)]
        if step.kind == "grouped":
            return rc.grouped_allreduce_async([mine, mine[:1]], op=step.op, **options)
        if step.kind == "reducescatter":
            return rc.reducescatter_async(mine, op=step.op, **options)
        if step.kind == "broadcast":
            return rc.broadcast_async(mine, step.root, **options)
        if step.kind == "allgather":
            return rc.allgather_async(mine, **options)
        if step.kind == "gathers":
            return rc.grouped_allgather_async([mine, mine[:1]], **options)
        if step.kind == "alltoall":
            return rc.alltoall_async(mine, self._splits(step, self.rank), **options)
        return rc.allreduce_async(mine, op=step.op, **options)  # of the others there is no such form

    @staticmethod
    def _splits(step: Step, rank: int) -> List[int]:
        rng = random.Random(f"{step.seed} {rank}")
        cuts = sorted(rng.randint(0, step.rows[rank]) for _ in step.group[1:])
        return [stop - start for start, stop in zip([0, *cuts], [*cuts, step.rows[rank]])]

    def _check(self, step: Step, result: Any) -> None:
        inputs = [step.inputs(self.size)[rank] for rank in step.group]
        mine = step.group.index(self.rank)
        kind = step.kind
        if step.way == "async" and kind in ("object", "barrier"):
            kind = "allreduce"
        common = [result]
        if kind == "allreduce":
            assert_reduced(result, inputs, step.op)
        elif kind == "grouped":
            assert_reduced(result[0], inputs, step.op)
            assert_reduced(result[1], [array[:1] for array in inputs], step.op)
            common = list(result)
        elif kind == "reducescatter":
            rows = even_bounds(step.rows[0], len(inputs))
            assert_reduced(result, [array[rows[mine] : rows[mine + 1]] for array in inputs], step.op)
            common = []
        elif kind == "broadcast":
            np.testing.assert_array_equal(result, inputs[step.group.index(step.root)])
        elif kind == "allgather":
            np.testing.assert_array_equal(result, np.concatenate(inputs))
        elif kind == "gathers":
            np.testing.assert_array_equal(result[0], np.concatenate(inputs))
            np.testing.assert_array_equal(result[1], np.concatenate([array[:1] for array in inputs]))
            common = list(result)
        elif kind == "alltoall":
            rows, counts = result
            cuts = [np.cumsum([0, *self._splits(step, rank)]) for rank in step.group]
            parts = [array[cut[mine] : cut[mine + 1]] for array, cut in zip(inputs, cuts)]
            np.testing.assert_array_equal(rows, np.concatenate(parts))
            assert counts.tolist() == [len(part) for part in parts]
            common = []
        elif kind == "object":
            assert result == [(rank, step.seed) for rank in step.group]
            common = []
        else:
            common = []
        if len(step.group) == self.size:
            for array in common:
                self.digest = zlib.crc32(np.ascontiguousarray(array).tobytes(), self.digest)


WEIGHTS = (0.0, 0.0, 5e-324, 1e-308, 1e-46, 1e-9, 1.0, 3, 50, 1e9, 1e39, 1e308, 1.7976931348623157e308)
BITS = {"float16": 10, "bfloat16": 7, "float32": 23, "float64": 52}


class WeightFamily:
    """``weight=`` in direct calls, in place and by name, with weights of all magnitudes.

    Expected is the average in exact arithmetic, rounded to the type; or one error on all ranks.
    """

    def run(self, seed: int) -> int:
        """Run a program; a digest of its results."""
        pick, rank, size = random.Random(f"weights {seed}"), rc.rank(), rc.size()
        digest = 0
        for number in range(4):
            kind, way = pick.choice(list(BITS)), pick.choice(("direct", "in place", "named", "grouped"))
            count = pick.choice((0, 1, 2, 7, 300))
            alike = pick.choice(WEIGHTS) if pick.random() < 0.2 else None
            weights = [pick.choice(WEIGHTS) if alike is None else alike for _ in range(size)]
            arrays = [_values(seed * 10 + number, other, count, kind) for other in range(size)]
            own = arrays[rank].copy() if weights[rank] else np.full_like(arrays[rank], np.nan)
            delay(random.Random(f"{seed} {number} {rank}"))
            case = f"{kind}, {way}, {count} elements, weights {weights}"
            try:
                found = _average(way, own, weights[rank])
            except rc.RingcommError as error:
                assert not any(weights) and "weights of all ranks are 0" in str(error), (case, error)
                continue
            assert any(weights), f"{case}: no error"
            _check(found, arrays, weights, BITS[kind], case)
            digest = zlib.crc32(found.tobytes(), digest)
        return digest


def _values(seed: int, rank: int, count: int, kind: str) -> np.ndarray[Any, Any]:
    rng = np.random.default_rng((seed, rank))
    return rng.uniform(-9.0, 9.0, count).astype(dtype_named(kind))


def _average(way: str, array: np.ndarray[Any, Any], weight: float) -> np.ndarray[Any, Any]:
    if way == "in place":
        rc.allreduce_(array, weight=weight)
        return array
    if way == "named":
        return rc.allreduce_async(array, name="average", weight=weight).wait()
    if way == "grouped":
        return rc.grouped_allreduce([array, array[:1]], name="both", weight=weight)[0]
    return rc.allreduce(array, weight=weight)


def _check(
    found: np.ndarray[Any, Any], arrays: List[Any], weights: List[float], bits: int, case: str
) -> None:
    total = sum(map(Fraction, weights))
    shares = [Fraction(weight) / total for weight in weights]
    wide = [array.astype(np.float64) for array in arrays]
    for place, value in enumerate(found.astype(np.float64).tolist()):
        parts = [share * Fraction(float(array[place])) for share, array in zip(shares, wide)]
        # Each part is rounded, and so is every sum; a part may be multiplied by the number of ranks first.
        bound = 4 * len(parts) * sum(map(abs, parts)) * Fraction(1, 2**bits) + Fraction(1, 10**6) / 2**bits
        assert abs(Fraction(value) - sum(parts)) <= bound, (case, place, value, float(sum(parts)))


FAMILIES = ["numpy", "weight", "facts"]


def made(name: str) -> Any:
    """The family of this name."""
    if name == "facts":
        from tests.fuzz.agreeing_facts import FactsFamily  # which needs PyTorch

        return FactsFamily()
    return NumpyFamily() if name == "numpy" else WeightFamily()


def main(first: int, count: int, names: Sequence[str]) -> None:
    """Run programs of these families one after another."""
    rc.init()
    for name in names:
        family = made(name)
        for seed in range(first, first + count):
            try:
                digest = family.run(seed)
            except BaseException:
                print(f"program {seed} of family {name} failed on rank {rc.rank()}", flush=True)
                raise
            digests = rc.allgather_object((seed, digest))
            assert len(set(digests)) == 1, f"program {seed} of family {name}: {digests}"
        if rc.rank() == 0:
            print(f"{count} programs of family {name} from seed {first} on {rc.size()} ranks", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:] or FAMILIES)
