"""Announcements of a ``ready`` message, one by one: their order, their weights, and what makes no sense."""

from __future__ import annotations

from itertools import islice

import pytest

from ringcomm.engine.announcements import (
    Announced,
    Announcement,
    announcements,
    masks_as_text,
    masks_of,
    totals_of,
)
from ringcomm.engine.cache import IssuedIds
from ringcomm.ops import Collective, ReduceOp
from ringcomm.wire.frames import NO_ROOT
from ringcomm.wire.signature import Key, Signature

LINES = ["train.py:7", "train.py:9"]


def signature(name, weighted=False):
    kind, op = int(Collective.ALLREDUCE), int(ReduceOp.AVERAGE)
    return Signature(name, 0, kind, op, NO_ROOT, ("float32",), ((4,),), weighted=weighted)


def known(*signatures):
    """The numbers of these signatures, from 1 in their order."""
    ids = IssuedIds(2, 10)
    for item in signatures:
        ids.issue(item)
    return ids


def listed(ids=None, known_=(), short=(), fresh=(), weights=(), absent=()):
    message = {"known": known_, "carried": short, "fresh": fresh, "weights": weights, "absent": absent}
    return list(announcements(message, ids or known(), LINES))


def test_known_short_and_new_operations_follow_each_other():
    plain, weighed, new = signature("plain"), signature("weighed", True), signature("new", True)
    found = listed(
        known(plain, weighed), [1, 0, 0, 2, 0, 1], [[2, 3, 0, "AAAA"], [1, 4, 1, "BBBB"]],
        [[new.to_json(), 5, 1]], [0.5, 2, 0.0], [[1, "a"], [4, "1"]],
    )  # fmt: skip
    assert [item.absent for item in found] == [0, 10, 0, 0, 1]
    assert [(item.signature, item.number, item.site, item.weight, item.packed) for item in found] == [
        (plain, 0, "train.py:7", 1.0, None),
        (weighed, 0, "train.py:9", 0.5, None),
        (weighed, 3, "train.py:7", 2.0, "AAAA"),
        (plain, 4, "train.py:9", 1.0, "BBBB"),
        (new, 5, "train.py:9", 0.0, None),
    ]


@pytest.mark.parametrize(
    "error, message",
    [
        (LookupError, {"known_": [7, 0, 0]}),  # a number that was not given
        (LookupError, {"fresh": [[signature("x").to_json(), 0, 9]]}),  # a line that was not sent
        (ValueError, {"fresh": [[signature("x").to_json()[:-1], 0, 0]]}),
        (TypeError, {"fresh": [[None, 0, 0]]}),
        (ValueError, {"short": [[1, 0, 0]]}),
        (ValueError, {"absent": [[0, "parts"]]}),
        (ValueError, {"absent": [[0, "-1"]]}),
        (ValueError, {"absent": [[0]]}),
        (TypeError, {"absent": [[0, 1]]}),
    ],
)
def test_what_makes_no_sense(error, message):
    with pytest.raises(error):
        listed(known(signature("known")), **message)


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
def test_what_is_no_weight(weight):
    with pytest.raises(ValueError, match="a weight of"):
        listed(fresh=[[signature("w", True).to_json(), 0, 0]], weights=[weight])


def test_a_weight_that_is_missing():
    with pytest.raises(ValueError, match="a weight is missing"):
        listed(known(signature("w", True)), known_=[1, 0, 0, 1, 1, 0], weights=[1.0])


def test_absent_everywhere_is_what_no_rank_that_has_announced_it_has():
    made = Announced(Key(0, "grad", 0), (0, 1, 2), 0.0)
    for rank, absent in enumerate((0b1101, 0b0111)):  # rank 2 has joined
        made.add(rank, Announcement(signature("grad", True), 0, "train.py:7", 0.0, absent))
    assert made.absent == 0b0101
    assert masks_as_text([0, made.absent, 2**70]) == [[1, "5"], [2, format(2**70, "x")]]
    assert list(islice(masks_of(masks_as_text([0, made.absent, 2**70])), 4)) == [0, 5, 2**70, 0]


@pytest.mark.parametrize("text", [[[0.0, 0]], [[-1.0, 0]], [[float("nan"), 0]], [[1.0, 5000]], [[1.0]]])
def test_what_is_no_sum_of_weights(text):
    with pytest.raises(ValueError):
        totals_of(text)
