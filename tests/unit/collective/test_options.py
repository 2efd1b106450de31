"""How a collective's function takes its options, by place and by name, and what it says of wrong ones."""

from __future__ import annotations

import inspect

import pytest

from ringcomm.collective.options import Options, takes
from ringcomm.errors import ConfigError, Misuse
from ringcomm.ops import Average, Min, Sum


@takes("reducescatter", "name priority op", "mx")
def scattered(tensor: object, options: Options) -> tuple:
    """Divide.

    Args:
        tensor: anything.
        {options}
    """
    return tensor, options


@takes("allreduce", "average op")
def reduced(tensor: object, options: Options) -> Options:
    return options


def test_options_are_taken_by_place_and_by_name():
    assert scattered(1) == (1, Options())
    assert scattered(1, "x", 5, "sum") == (1, Options(Sum, "x"))
    assert scattered(tensor=1, weight=2.0, op=None) == (1, Options(Average, weight=2.0))


@pytest.mark.parametrize(
    ("given", "named", "words"),
    [
        ((1,), {"opp": 1}, r"scattered\(\) got an unexpected keyword argument 'opp'"),
        ((1, "x"), {"name": "y"}, r"scattered\(\) got multiple values for argument 'name'"),
        ((), {"name": "y"}, r"scattered\(\) missing 1 required positional argument: 'tensor'"),
        (range(30), {}, r"scattered\(\) takes from 1 to \d+ positional arguments but 30 were given"),
    ],
)
def test_wrong_options_are_named(given, named, words):
    with pytest.raises(TypeError, match=words):
        scattered(*given, **named)


def test_what_is_no_reduction_is_refused():
    with pytest.raises(Misuse, match="is not a reduction"):
        scattered(1, op="median")


def test_the_older_form_of_op():
    assert reduced(1).op == Average and reduced(1, None, 3).op == Min
    with pytest.warns(DeprecationWarning, match="use op=Average or op=Sum") as caught:
        assert reduced(1, False).op == Sum
        assert reduced(1, average=True).op == Average
    assert {item.filename for item in caught} == {__file__}
    with pytest.raises(ConfigError, match="average and op both"):
        reduced(1, True, Sum)
    shown = inspect.signature(reduced).parameters
    assert shown["op"].default is None and shown["op"].annotation == "Optional[ReduceOp]"
