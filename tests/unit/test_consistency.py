"""The first array that differs, and the ranks in the minority."""

from __future__ import annotations

import numpy as np
import pytest

from ringcomm.calls.direct import difference, hash_of

HOSTS = {rank: f"host{rank}" for rank in range(20)}


@pytest.mark.parametrize(
    ("hashes", "tensor", "ranks", "text"),
    [
        ({0: [1, 2], 1: [1, 2], 2: [1, 3]}, "b", (2,), "in 'b', rank 2 (host2) differs from the others."),
        ({0: [1, 2], 1: [9, 3]}, "a", None,
         "in 'a', and 1 more of 2, rank 0 (host0) and rank 1 (host1) differ from each other."),
        ({0: [1, 0], 1: [1, 0], 2: [4, 0], 3: [5, 0], 4: [1, 0]}, "a", (2, 3),
         "in 'a', ranks 2, 3 differ from the others."),
        ({0: [1, 0], 1: [1, 0], 2: [4, 0], 3: [4, 0]}, "a", None,
         "in 'a', ranks 0, 1 and ranks 2, 3 differ from each other."),
        ({0: [1, 0], **{rank: [rank, 0] for rank in range(1, 20)}}, "a", tuple(range(2, 20)),
         "in 'a', ranks 2, 3, 4, 5, 6, 7, 8, 9, … differ from the others."),
    ],
)  # fmt: skip
def test_the_first_that_differs(hashes, tensor, ranks, text):
    error = difference(["a", "b"], hashes, HOSTS)
    assert (error.tensor, error.ranks) == (tensor, ranks)
    assert text in str(error)


def test_a_hash_depends_on_everything():
    array = np.arange(6, dtype=np.int32)
    others = [array[:-1], array[::-1], array.view(np.uint32), array.reshape(2, 3), array + 1, array[:0]]
    assert len({hash_of("x", item) for item in [array, *others]} | {hash_of("y", array)}) == 8
    assert hash_of("x", array.copy()) == hash_of("x", array)
    assert hash_of("x", np.zeros((0, 2))) != hash_of("x", np.zeros((0, 3)))
