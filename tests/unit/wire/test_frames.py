"""The header in front of every collective's bytes."""

from __future__ import annotations

import doctest
import random

import pytest

from ringcomm.dtypes import name_of_code
from ringcomm.ops import Collective, ReduceOp
from ringcomm.wire import frames
from ringcomm.wire.frames import (
    HEADER_BYTES,
    NO_OP,
    NO_ROOT,
    Header,
    digest,
    explain_difference,
    unpack_header,
)

FLOAT32 = 11
ALLREDUCE = Header(0, 7, Collective.ALLREDUCE, ReduceOp.SUM, FLOAT32, NO_ROOT, 1000, 1)
BROADCAST = Header(0, 7, Collective.BROADCAST, NO_OP, FLOAT32, 2, 8, 1)


def test_header_is_56_bytes():
    assert HEADER_BYTES == 56
    assert len(ALLREDUCE.pack()) == 56


def test_bytes_on_the_wire_never_change():
    header = Header(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11 << 32 | 12)
    assert header.pack().hex() == (
        "527c" "0100" "02000000" "03" "04" "05" "00" "06000000" "0700000000000000" "0800000000000000"
        "0900000000000000" "0a00000000000000" "0b000000" "0c000000"
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(20))
def test_there_and_back(seed):
    print(f"seed {seed}")
    rng = random.Random(seed)
    header = Header(
        rng.getrandbits(16), rng.getrandbits(32), rng.randrange(1, 256), rng.getrandbits(8),
        rng.getrandbits(8), rng.randrange(-1, 1 << 31), *(rng.getrandbits(64) for _ in range(5)),
    )  # fmt: skip
    assert unpack_header(header.pack()) == header


def test_counters_wrap_and_stay_equal():
    header = ALLREDUCE._replace(generation=0x12345, sequence=0x1_0000_0007)
    received = unpack_header(header.pack())
    assert (received.generation, received.sequence) == (0x2345, 7)
    assert explain_difference(header, received) == explain_difference(ALLREDUCE, ALLREDUCE)


@pytest.mark.parametrize("data", [bytes(56), b"\xff" * 56, b"GET / HTTP/1.1\r\nHost: there\r\n".ljust(56)])
def test_no_header_at_all(data):
    assert "not the start of a ringcomm message" in explain_difference(ALLREDUCE, unpack_header(data))


def test_where_a_call_is_made_makes_no_difference():
    assert explain_difference(ALLREDUCE._replace(site=1), ALLREDUCE._replace(site=2)) == ""


@pytest.mark.parametrize("seed", range(20))
def test_no_56_bytes_break_the_explanation(seed):
    print(f"seed {seed}")
    rng = random.Random(seed)
    for _ in range(100):
        noise = bytes(rng.getrandbits(8) for _ in range(54))
        for data in (noise + b"ab", b"\x52\x7c" + noise):
            header = unpack_header(data)
            assert header.describe()
            assert explain_difference(ALLREDUCE, header)


@pytest.mark.parametrize(
    "header, text",
    [
        (ALLREDUCE, "allreduce(1000 x float32, op=Sum)"),
        (ALLREDUCE._replace(op=ReduceOp.AVERAGE, dtype=15), "allreduce(1000 x bfloat16, op=Average)"),
        (BROADCAST, "broadcast(8 x float32, root_rank=2)"),
        (BROADCAST._replace(root=0, items=0), "broadcast(float32, root_rank=0)"),
        (Header(0, 1, Collective.ALLGATHER, NO_OP, 12, NO_ROOT, 0, 0), "allgather(float64)"),
        (ALLREDUCE._replace(collective=99), "something that this version of ringcomm does not have"),
        (ALLREDUCE._replace(op=99), "something that this version of ringcomm does not have"),
        (ALLREDUCE._replace(dtype=99), "something that this version of ringcomm does not have"),
    ],
)
def test_description(header, text):
    assert header.describe() == text


def test_every_known_call_can_be_described():
    for collective in set(Collective) - {Collective.EXCHANGE}:
        for code in range(1, 16):
            for op in (NO_OP, *ReduceOp):
                text = Header(0, 0, collective, op, code, NO_ROOT, 3, 0).describe()
                assert collective.name.lower() in text and name_of_code(code) in text
    internal = Header(0, 0, Collective.EXCHANGE, NO_OP, 10, NO_ROOT, 1, 0).describe()
    assert internal == "the measurement of links in init()"


@pytest.mark.parametrize(
    "mine, change, words",
    [
        (ALLREDUCE, {"generation": 1}, ["different generations", "0 here", "1 there"]),
        (ALLREDUCE, {"sequence": 9}, ["not the same call", "number 7 here", "9 there"]),
        (ALLREDUCE, {"collective": 3}, ["what to do", "allreduce(", "broadcast("]),
        (ALLREDUCE, {"op": 4}, ["the reduction", "op=Sum", "op=Max"]),
        (ALLREDUCE, {"dtype": 12}, ["the element type", "float32", "float64"]),
        (ALLREDUCE, {"op": 32, "items": 9}, ["only one of the two gives a weight (no weight here, one th"]),
        (BROADCAST, {"root": 1}, ["the root rank", "root_rank=2) here", "root_rank=1) there"]),
        (ALLREDUCE, {"items": 999}, ["the number of elements", "1000 here", "999 there"]),
        (ALLREDUCE, {"digest": 2}, ["the name, and about nothing else"]),
        (ALLREDUCE, {"digest": 5 << 32 | 1}, ["about the shape, the scale factors or the list of sizes"]),
        (ALLREDUCE, {"digest": 2 << 32 | 2}, ["the name, the shape, the scale factors or the list of sizes"]),
        (ALLREDUCE, {"sends": 3}, ["its message has 3 elements", "0 are expected here"]),
        (ALLREDUCE, {"expects": 3}, ["it expects 3 elements", "the message from here has 0"]),
    ],
)
def test_difference_in_every_field(mine, change, words):
    text = explain_difference(mine, mine._replace(**change))
    assert [word for word in words if word not in text] == []


def test_every_field_is_compared():
    """A field added to the header must get its words, too."""
    equal = explain_difference(BROADCAST, BROADCAST._replace(digest=5))
    others = [name for name in Header._fields if name not in ("digest",)]
    texts = [explain_difference(BROADCAST, BROADCAST._replace(**{name: 6})) for name in others]
    assert len(set(texts)) == len(others) and equal not in texts


def test_the_first_difference_that_matters_is_named():
    """Another call altogether differs in everything; the sequence or the collective says most."""
    text = explain_difference(ALLREDUCE, BROADCAST)
    assert "what to do" in text


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


def test_what_goes_there_comes_from_here():
    header = ALLREDUCE._replace(sends=2, expects=3)
    assert header.turned() == ALLREDUCE._replace(sends=3, expects=2)


def test_digest_is_the_same_everywhere():
    assert digest("grad/ü", (2, 3), (1.0, 0.25)) == digest("grad/ü", [2, 3], (1.0, 0.25))
    assert digest("a", (2, 3), (1.0, 1.0)) == 0xE4769721E8B7BE43


def test_examples_in_docstrings():
    assert doctest.testmod(frames).failed == 0
