"""All algorithms with plain integers, replayed by the simplest executor there could be.

It shares nothing with the checker: it runs whole steps, in the order of each rank's list.
"""

from __future__ import annotations

import doctest
import importlib

import pytest

from ringcomm.schedule import direct
from ringcomm.schedule.steps import DATA, SELF, Send, even_bounds
from tests.unit.schedule.building import make, names


def replay(schedules, data, source=None):
    """Run the schedules on lists of numbers, in place; the wires hold as much as they are given."""
    size = len(schedules)
    wires = {(a, b): [] for a in range(size) for b in range(size)}
    cursors = [0] * size
    moved = True
    while moved:
        moved = False
        for rank, steps in enumerate(schedules):
            while cursors[rank] < len(steps):
                step = steps[cursors[rank]]
                if isinstance(step, Send):
                    buffer = data[rank] if step.buffer == DATA else source[rank]
                    wires[rank, step.peer].append(buffer[step.start : step.stop])
                elif not all(wires[peer, rank] for peer in step.peers):
                    break
                else:
                    operands = {peer: wires[peer, rank].pop(0) for peer in step.peers}
                    operands[SELF] = data[rank][step.start : step.stop]
                    order = step.fold or step.peers
                    data[rank][step.start : step.stop] = map(sum, zip(*(operands[p] for p in order)))
                cursors[rank] += 1
                moved = True
    assert cursors == [len(steps) for steps in schedules]
    assert not any(wires.values())


def numbers(size, count):
    return [[1000 * rank + i for i in range(count)] for rank in range(size)]


@pytest.mark.parametrize("name", names("allreduce"))
@pytest.mark.parametrize("size", [*range(1, 10), 16, 23])
def test_all_reduce(name, size):
    for count in {0, 1, size - 1, size, size + 1, 37}:
        data = numbers(size, count)
        expected = [sum(column) for column in zip(*data)]
        replay([make("allreduce", name, r, size, count) for r in range(size)], data)
        assert data == [expected] * size


@pytest.mark.parametrize("name", names("reducescatter"))
@pytest.mark.parametrize("size", range(1, 10))
def test_reduce_scatter_then_all_gather(name, size):
    bounds = even_bounds(31, size)
    data = numbers(size, 31)
    expected = [sum(column) for column in zip(*data)]
    replay([make("reducescatter", name, r, size, bounds[-1], bounds=bounds) for r in range(size)], data)
    for rank in range(size):
        assert data[rank][bounds[rank] : bounds[rank + 1]] == expected[bounds[rank] : bounds[rank + 1]]
    replay([make("allgather", name, r, size, bounds[-1], bounds=bounds) for r in range(size)], data)
    assert data == [expected] * size


@pytest.mark.parametrize("name", names("broadcast"))
@pytest.mark.parametrize("size", range(1, 10))
def test_broadcast(name, size):
    for root in range(size):
        data = numbers(size, 11)
        expected = list(data[root])
        replay([make("broadcast", name, r, size, 11, root=root) for r in range(size)], data)
        assert data == [expected] * size


@pytest.mark.parametrize("size", range(1, 8))
def test_all_to_all(size):
    lengths = [[(3 * i + 5 * j) % 4 for j in range(size)] for i in range(size)]
    sends = [[sum(lengths[i][:k]) for k in range(size + 1)] for i in range(size)]
    recvs = [[sum(lengths[i][j] for i in range(k)) for k in range(size + 1)] for j in range(size)]
    source = [[(i, k) for k in range(sends[i][-1])] for i in range(size)]
    data = [[None] * recvs[j][-1] for j in range(size)]
    # tuples cannot be summed, so give every pair a number
    source = [[100 * i + k for i, k in row] for row in source]
    replay([direct.all_to_all(r, size, sends[r], recvs[r]) for r in range(size)], data, source)
    for j in range(size):
        for i in range(size):
            got = data[j][recvs[j][i] : recvs[j][i + 1]]
            meant = source[i][sends[i][j] : sends[i][j + 1]]
            assert got == ([None] * len(meant) if i == j else meant)


@pytest.mark.parametrize(
    "module",
    ["choose", "cost", "direct", "doubling", "hierarchy", "ring", "shares", "calibration", "steps", "tree"],
)
def test_examples_in_docstrings(module):
    result = doctest.testmod(importlib.import_module(f"ringcomm.schedule.{module}"))
    assert result.attempted > 0
    assert result.failed == 0
