"""The description of a call that direct calls and the engine share: its text, and how two of them differ."""

from __future__ import annotations

import doctest
import json

import pytest

from ringcomm.ops import CODECS, Collective, ReduceOp
from ringcomm.wire import frames
from ringcomm.wire import signature as module
from ringcomm.wire.frames import (
    NO_OP,
    NO_ROOT,
    Header,
    digest,
    unpack_header,
)
from ringcomm.wire.signature import Signature, explain_difference

FLOAT32 = 11
ALLREDUCE = Header(0, 7, Collective.ALLREDUCE, ReduceOp.SUM, FLOAT32, NO_ROOT, 1000, 1)
BROADCAST = Header(0, 7, Collective.BROADCAST, NO_OP, FLOAT32, 2, 8, 1)
SUM = Signature("", 0, int(Collective.ALLREDUCE), int(ReduceOp.SUM), NO_ROOT, ("float32",), ((4,),))


@pytest.mark.parametrize("data", [bytes(64), b"\xff" * 64, b"GET / HTTP/1.1\r\nHost: there\r\n".ljust(64)])
def test_no_header_at_all(data):
    assert "not the start of a ringcomm message" in explain_difference(ALLREDUCE, unpack_header(data))


@pytest.mark.parametrize(
    "mine, change, words",
    [
        (ALLREDUCE, {"generation": 1}, ["different generations", "0 here", "1 there"]),
        (ALLREDUCE, {"sequence": 9}, ["not the same call", "number 7 here", "9 there"]),
        (ALLREDUCE, {"collective": 3}, ["the operation", "allreduce(", "broadcast("]),
        (ALLREDUCE, {"op": 4}, ["the reduction", "op=Sum", "op=Max"]),
        (ALLREDUCE, {"dtype": 12}, ["the data type", "float32", "float64"]),
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


class TestSignature:
    @pytest.mark.parametrize(
        ("change", "text"),
        [
            ({}, "allreduce(shape (4,), float32, op=Sum)"),
            (
                {"dtypes": ("float32", "float16", "float32"), "shapes": ((4,), (), (2,))},
                "grouped_allreduce(3 tensors, types float16/float32, op=Sum)",
            ),
            ({"codec": 1}, f"allreduce(shape (4,), float32, op=Sum, compression={CODECS[1]!r})"),
            ({"weighted": True}, "allreduce(shape (4,), float32, op=Sum, with a weight)"),
            ({"process_set": 3}, "allreduce(shape (4,), float32, op=Sum, process set 3)"),
            (
                {"prescale": 0.5, "postscale": 2.0},
                "allreduce(shape (4,), float32, op=Sum, prescale_factor=0.5, postscale_factor=2.0)",
            ),
            (
                {"kind": int(Collective.BROADCAST), "op": NO_OP, "root": 2},
                "broadcast(shape (4,), float32, root_rank=2)",
            ),
            (
                {"kind": int(Collective.BROADCAST), "op": NO_OP, "root": 0, "process_set": -2},
                "message(shape (4,), float32)",
            ),
            ({"kind": int(Collective.ALLGATHER), "op": NO_OP}, "allgather(rows of shape (4,), float32)"),
            ({"kind": int(Collective.BARRIER), "op": NO_OP, "dtypes": (), "shapes": ()}, "barrier()"),
        ],
        ids=lambda value: value if isinstance(value, str) else "",
    )
    def test_it_is_described_as_the_call_and_comes_back_from_a_message(self, change, text):
        signature = SUM._replace(**change)
        assert signature.describe() == text
        assert Signature.from_json(json.loads(json.dumps(signature.to_json()))) == signature

    @pytest.mark.parametrize(
        "change",
        [
            {"codec": len(CODECS)}, {"codec": -1}, {"kind": 99}, {"dtypes": ("float33",)}, {"shapes": ()},
            {"shapes": ((-4,),)}, {"prescale": "much"},
        ],
        ids=str,
    )  # fmt: skip
    def test_what_could_not_be_run_is_refused(self, change):
        with pytest.raises((ValueError, TypeError)):
            Signature.from_json(SUM._replace(**change).to_json())

    def test_it_is_what_its_header_says(self):
        call = SUM._replace(op=int(ReduceOp.AVERAGE), weighted=True, codec=1, items=4)
        assert Signature.from_header(call.header(0)) == call._replace(shapes=())


def test_examples_in_docstrings():
    assert doctest.testmod(module).failed == doctest.testmod(frames).failed == 0

# ---- the header in front of every collective's bytes ---------------------------------------------


def test_bytes_on_the_wire_never_change():
    header = Header(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11)
    assert header.pack().hex() == (
        "527c" "0100" "02000000" "03" "04" "05" "0b" "06000000" "0700000000000000" "0800000000000000"
        "0900000000000000" "0a00000000000000" "00000000000000000000000000000000"
    )  # fmt: skip


@pytest.mark.parametrize(
    "other",
    [
        ("b", (2, 3), (1.0, 1.0)), ("a", (3, 2), (1.0, 1.0)), ("a", (6,), (1.0, 1.0)), ("a", (), (1.0, 1.0)),
        ("a", (2, 3), (0.5, 1.0)), ("a", (2, 3), (1.0, 0.5)), ("a\0(2, 3)", (), (1.0, 1.0)),
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
