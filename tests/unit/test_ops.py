"""The numbers of operations: they stand in headers and in users' scripts, so they never change."""

from __future__ import annotations

import pytest

from ringcomm.errors import Misuse
from ringcomm.ops import (
    CODECS,
    Collective,
    ReduceOp,
    codec_number,
    factor_of,
    name_of,
    op_of,
    weight_of,
)


def test_reductions_have_horovods_numbers():
    numbers = {"AVERAGE": 0, "SUM": 1, "ADASUM": 2, "MIN": 3, "MAX": 4, "PRODUCT": 5}
    assert {op.name: int(op) for op in ReduceOp} == numbers


def test_collectives_on_the_wire():
    names = (
        "ALLREDUCE ALLGATHER BROADCAST REDUCESCATTER ALLTOALL BARRIER EXCHANGE BROADCAST_OBJECT "
        "ALLGATHER_OBJECT JOIN PROCESS_SET GATHER SCATTER REDUCE"
    )
    assert [(item.name, int(item)) for item in Collective] == [
        (name, number) for number, name in enumerate(names.split(), start=1)
    ]


def test_a_reduction_from_what_scripts_pass():
    assert op_of(ReduceOp.MAX) is op_of(4) is ReduceOp.MAX
    for other in (99, "total", None, []):
        with pytest.raises(Misuse, match="is not a reduction; there are Average, Sum"):
            op_of(other)
    for other in (True, False):  # the third argument of Horovod's allreduce was `average` once
        with pytest.raises(Misuse, match="ambiguous: op=rc.Average"):
            op_of(other)


def test_a_codec_from_what_scripts_pass():
    class Kind:
        kind = "int8"

    assert codec_number(None) == codec_number("none") == 0
    assert codec_number("int8") == codec_number(Kind) == CODECS.index("int8")
    for other in ("zip", 8, Kind()):
        if getattr(other, "kind", other) != "int8":
            with pytest.raises(Misuse, match="there are 'none'"):
                codec_number(other)


def test_factors_and_weights_are_numbers():
    assert factor_of(2) == 2.0 and factor_of(float("inf")) == float("inf")
    for other in ("a", "3", b"3", [], None):
        with pytest.raises(Misuse, match="are numbers, not"):
            factor_of(other)
    assert weight_of(0) == 0.0 and weight_of(3) == 3.0
    for other in ("a", "3", b"3", [], None):
        with pytest.raises(Misuse, match="a weight is a number, such as"):
            weight_of(other)
    for number in (-1.0, float("inf"), float("nan")):
        with pytest.raises(Misuse, match="finite number that is not negative"):
            weight_of(number)


def test_a_name_is_text():
    assert name_of(None) == "" and name_of("x") == "x"
    with pytest.raises(Misuse, match="a name is a str, not int"):
        name_of(5)


@pytest.mark.parametrize(
    "given, expected",
    [("sum", "SUM"), ("Sum", "SUM"), ("MEAN", "AVERAGE"), ("avg", "AVERAGE"), ("prod", "PRODUCT")],
)
def test_a_name_in_any_case_is_a_reduction(given, expected):
    assert op_of(given) is ReduceOp[expected]
