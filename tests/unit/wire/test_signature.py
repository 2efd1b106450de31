"""The description of a call that direct calls and the engine share: its text, and how two of them differ."""

from __future__ import annotations

import doctest
import json
from typing import Tuple

import numpy as np
import pytest

from ringcomm.dtypes import name_of_code
from ringcomm.ops import CODECS, Collective, ReduceOp
from ringcomm.wire import signature as module
from ringcomm.wire.frames import NO_OP, NO_ROOT, Header, unpack_header
from ringcomm.wire.signature import Signature, explain_difference, header_text, sizes_text

FLOAT32 = 11
ALLREDUCE = Header(0, 7, Collective.ALLREDUCE, ReduceOp.SUM, FLOAT32, NO_ROOT, 1000, 1)
BROADCAST = Header(0, 7, Collective.BROADCAST, NO_OP, FLOAT32, 2, 8, 1)
SUM = Signature("", 0, int(Collective.ALLREDUCE), int(ReduceOp.SUM), NO_ROOT, ("float32",), ((4,),))


def direct(kind: Collective, shape: Tuple[int, ...], name: str = "", items: int = 0) -> Signature:
    """A direct call that reduces nothing."""
    return Signature(name, 0, int(kind), NO_OP, NO_ROOT, ("float32",), (shape,), items=items)


def test_what_no_program_has_called_is_described_without_internal_names() -> None:
    call = direct(Collective.EXCHANGE, (), "measure")
    assert call.describe() == call.verb == "the measurement of links in init()"
    ahead = direct(Collective.ALLGATHER, (3,), "a")._replace(ahead=True)
    assert ahead.describe() == "allgather(rows of shape (3,), float32, name='a')"
    assert ahead.describe(named=False) == "allgather(rows of shape (3,), float32)"


def test_a_shape_that_does_not_hold_the_elements_is_none() -> None:
    call = direct(Collective.BROADCAST, (), items=6)
    assert call.describe() == "broadcast(6 elements, float32)"
    assert call._replace(shapes=((2, 3),)).describe() == "broadcast(shape (2, 3), float32)"


@pytest.mark.parametrize(
    ("bounds", "text"),
    [
        ((0, 3, 4), "sizes [3, 1]"),
        ((0, 3, 6), "2 x 3 elements"),
        ((0, 5), "sizes [5]"),
        ((), "sizes []"),
        (tuple(range(0, 200, 2)) + (300,), "100 sizes [2, 2, "),
    ],
)
def test_sizes_in_words(bounds: Tuple[int, ...], text: str) -> None:
    assert sizes_text(bounds).startswith(text)


def test_an_intent_becomes_a_call_on_an_array() -> None:
    intent = Signature.intent(Collective.BROADCAST, root=2, name="weights", text="6 elements")
    call = intent.on(np.zeros(6, np.float32), bounds=(0, 3, 6))
    assert call.describe() == "broadcast(6 elements, float32, root_rank=2, name='weights')"
    assert (call.items, call.bounds, call.shapes) == (6, (0, 3, 6), ((),))


@pytest.mark.parametrize("data", [bytes(64), b"\xff" * 64, b"GET / HTTP/1.1\r\nHost: there\r\n".ljust(64)])
def test_no_header_at_all(data):
    assert "not the start of a ringcomm message" in explain_difference(ALLREDUCE, unpack_header(data))


def test_counters_that_have_wrapped_make_no_difference():
    header = ALLREDUCE._replace(generation=0x12345, sequence=0x1_0000_0007)
    assert explain_difference(header, unpack_header(header.pack())) == ""


@pytest.mark.parametrize(
    "header, text",
    [
        (ALLREDUCE, "allreduce(1000 elements, float32, op=Sum)"),
        (ALLREDUCE._replace(op=ReduceOp.AVERAGE, dtype=15), "allreduce(1000 elements, bfloat16, op=Average)"),
        (BROADCAST, "broadcast(8 elements, float32, root_rank=2)"),
        (BROADCAST._replace(root=0, items=0), "broadcast(float32, root_rank=0)"),
        (Header(0, 1, Collective.ALLGATHER, NO_OP, 12, NO_ROOT, 0, 0), "allgather(float64)"),
        (ALLREDUCE._replace(collective=99), "something that this version of ringcomm does not have"),
        (ALLREDUCE._replace(op=99), "something that this version of ringcomm does not have"),
        (ALLREDUCE._replace(dtype=99), "something that this version of ringcomm does not have"),
    ],
)
def test_description(header, text):
    assert header_text(header) == text


def test_every_known_call_can_be_described():
    for collective in set(Collective) - {Collective.EXCHANGE}:
        for code in range(1, 16):
            for op in (NO_OP, *ReduceOp):
                text = header_text(Header(0, 0, collective, op, code, NO_ROOT, 3, 0))
                assert collective.name.lower() in text
                assert name_of_code(code) in text or text.endswith("()"), "a call without an array"
    internal = header_text(Header(0, 0, Collective.EXCHANGE, NO_OP, 10, NO_ROOT, 1, 0))
    assert internal == "the measurement of links in init()"


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
    assert doctest.testmod(module).failed == 0
