"""Arrays that ranks create in another sequence each are broadcast."""

from __future__ import annotations

import numpy as np
import pytest

from ringcomm._adapter.objects import LateBroadcasts, Presence, disagreement
from ringcomm.calls.process_set import global_process_set

NAMES = ["a", "b", "c", "d"]


@pytest.mark.parametrize(("size", "root"), [(2, 1), (3, 0)])
def test_each_rank_has_a_sequence_of_its_own(ranks_of, size, root):
    def work(context):
        found = []
        for call in range(3):
            late = LateBroadcasts(NAMES, root, "label", global_process_set)
            targets = {name: np.full((2, 3), context.rank, np.float32) for name in NAMES}
            for place in np.random.default_rng([context.rank, call]).permutation(len(NAMES)):
                name = NAMES[place]
                if late.is_root:
                    targets[name][:] = place + 10 * call
                    late.send(name, targets[name])
                    targets[name][:] = -1  # it was copied
                else:
                    late.receive(name, targets[name])
            found.append([float(targets[name].max()) for name in NAMES])
        context.barrier()
        return found

    for rank, found in enumerate(ranks_of(size, work)):
        sent = [[10.0 * call + place for place in range(4)] for call in range(3)]
        assert found == ([[-1.0] * 4] * 3 if rank == root else sent)


def test_what_is_not_finished_does_not_hinder_the_next_call(ranks_of):
    """A second call with the same names, while no array of the first has been sent."""

    def work(context):
        calls = [LateBroadcasts(["x"], 0, "label", global_process_set) for _ in range(2)]
        results = []
        for late, number in zip(calls, (5, 6)):
            array = np.full(3, number, np.int64)
            if late.is_root:
                late.send("x", array)
            else:
                late.request()
        for late in reversed(calls):
            array = np.zeros(3, np.int64)
            if not late.is_root:
                late.receive("x", array)
                results.append(int(array[0]))
        context.barrier()
        return results

    assert ranks_of(3, work) == [[], [6, 5], [6, 5]]


def test_the_reports_of_ranks_are_compared():
    there, later = Presence("w", "float32", True), Presence("w", "float32", False)
    assert disagreement([0, 2], [[there], [later]]) is None
    assert disagreement([0], [[]]) is None
    other = disagreement([0, 2], [[there], [there, Presence("v", "float32", True)]])
    assert other is not None and other.startswith("rank 2 has a parameter 'v', rank 0 does not.")
    other = disagreement([1, 2], [[there], []])
    assert other is not None and other.startswith("rank 1 has a parameter 'w', rank 2 does not.")
    other = disagreement([0, 2], [[there], [Presence("w", "float64", True)]])
    assert other == "parameter 'w' is float32 on rank 0, float64 on rank 2."
    problem = Presence("w", "", False, "it is not initialized")
    assert disagreement([0, 2], [[there], [problem]]) == "rank 2: it is not initialized"
