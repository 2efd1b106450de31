"""A reducescatter whose rows are divided by a list: wrong lists, and ranks that disagree about it."""

from __future__ import annotations

import numpy as np
import pytest

import ringcomm as rc
from ringcomm.errors import ConfigError, MismatchError

FORMS = {
    "direct": rc.reducescatter,
    "in place": rc.reducescatter_,
    "by name": lambda array, **options: rc.reducescatter_async(array, **options).wait(),
    "grouped": lambda array, **options: rc.grouped_reducescatter([array, 2 * array], **options)[0],
}


@pytest.mark.parametrize(
    ("splits", "words"),
    [
        ([1, 1], r"reducescatter: splits \[1, 1\] have sum 2, the tensor 3 rows"),
        ([4, 0], "reducescatter: the sum of the splits"),
        ([4, -1], "or one of them is negative"),
        ([1, 1, 1], r"number of entries in splits \(3\) does not equal the number of workers \(2\)"),
        ([1.5, 1.5], "reducescatter: splits=.* is not a list of whole numbers"),
        (3, "reducescatter: splits=3 is not a list"),
    ],
)
def test_wrong_lists_are_named_before_anything_is_sent(ranks_of, splits, words):
    def work(context):
        for form in FORMS.values():
            with pytest.raises(ConfigError, match=words):
                form(np.ones((3, 2)), splits=splits)
        return float(rc.allreduce(1.0, op="sum"))

    assert ranks_of(2, work) == [2.0, 2.0]


def disagree(ranks_of, form, **options):
    def work(context):
        with pytest.raises(MismatchError) as caught:
            FORMS[form](np.ones((3, 2)), splits=[[3, 0], [1, 2]][context.rank], **options)
        return str(caught.value)

    return ranks_of(2, work)


def test_ranks_that_disagree_by_name(ranks_of):
    for text in disagree(ranks_of, "by name", name="rows"):
        assert "lists of sizes" in text and "[3, 0] rows by rank" in text and "[1, 2] rows by rank" in text


@pytest.mark.parametrize("weight", [None, 1.0])
def test_ranks_that_disagree_with_a_codec(ranks_of, weight):
    for text in disagree(ranks_of, "direct", compression="int8", weight=weight):
        assert "makes another call: they disagree about the shape, the scale factors or the list" in text
