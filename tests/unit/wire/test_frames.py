"""The header in front of every collective's bytes."""

from __future__ import annotations

import doctest
import random

import pytest

from ringcomm.ops import Collective, ReduceOp
from ringcomm.wire import frames
from ringcomm.wire.frames import (
    NO_OP,
    NO_ROOT,
    Header,
    digest,
    unpack_header,
)

FLOAT32 = 11
ALLREDUCE = Header(0, 7, Collective.ALLREDUCE, ReduceOp.SUM, FLOAT32, NO_ROOT, 1000, 1)
BROADCAST = Header(0, 7, Collective.BROADCAST, NO_OP, FLOAT32, 2, 8, 1)


def test_bytes_on_the_wire_never_change():
    header = Header(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11)
    assert header.pack().hex() == (
        "527c" "0100" "02000000" "03" "04" "05" "0b" "06000000" "0700000000000000" "0800000000000000"
        "0900000000000000" "0a00000000000000" "00000000000000000000000000000000"
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(3))
def test_there_and_back(seed):
    print(f"seed {seed}")
    rng = random.Random(seed)
    header = Header(
        rng.getrandbits(16), rng.getrandbits(32), rng.randrange(1, 256), rng.getrandbits(8),
        rng.getrandbits(8), rng.randrange(-1, 1 << 31), *(rng.getrandbits(64) for _ in range(4)),
    )  # fmt: skip
    assert unpack_header(header.pack()) == header


@pytest.mark.parametrize(
    "other",
    [
        ("b", (2, 3), (1.0, 1.0)),
        ("a", (3, 2), (1.0, 1.0)),
        ("a", (6,), (1.0, 1.0)),
        ("a", (), (1.0, 1.0)),
        ("a", (2, 3), (0.5, 1.0)),
        ("a", (2, 3), (1.0, 0.5)),
        ("a\0(2, 3)", (), (1.0, 1.0)),
    ],
)
def test_digest_differs(other):
    assert digest("a", (2, 3), (1.0, 1.0)) != digest(*other)


def test_the_digest_distinguishes_lists_of_sizes():
    digests = {digest("a", (), (1.0, 1.0), bounds) for bounds in ((), (0, 3, 4), (0, 1, 4), (0, 4))}
    assert len(digests) == 4
    assert digest("a", (), (1.0, 1.0), [0, 3, 4]) in digests


def test_digest_is_the_same_everywhere():
    assert digest("grad/ü", (2, 3), (1.0, 0.25)) == digest("grad/ü", [2, 3], (1.0, 0.25))
    assert digest("a", (2, 3), (1.0, 1.0)) == 0xE4769721E8B7BE43


def test_examples_in_docstrings():
    assert doctest.testmod(frames).failed == 0
