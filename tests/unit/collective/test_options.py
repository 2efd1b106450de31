"""How a collective's function takes its options, by place and by name, and what it says of wrong ones."""

from __future__ import annotations

import inspect

import pytest

from ringcomm.collective.options import HOROVODS, KINDS, Options, names_of, takes
from ringcomm.errors import Misuse
from ringcomm.ops import Average, Sum


@takes("reducescatter", "name priority op", "mx")
def scattered(tensor: object, options: Options) -> tuple:
    """Divide.

    Args:
        tensor: anything.
        {options}
    """
    return tensor, options


def test_options_are_taken_by_place_and_by_name():
    assert scattered(1) == (1, Options())
    assert scattered(1, "x", 5, "sum") == (1, Options(Sum, "x"))
    assert scattered(tensor=1, weight=2.0, op=None) == (1, Options(Average, weight=2.0))


def test_every_option_is_declared_and_described():
    for kind, names in KINDS.items():
        assert set(names.split()) <= {*Options._fields, *HOROVODS}, kind
    assert names_of("reducescatter", "priority name", without="weight")[:3] == ["priority", "name", "op"]
    assert "weight" not in names_of("reducescatter", without="weight")


def test_the_signature_and_the_description_have_every_option():
    shown = inspect.signature(scattered)
    assert list(shown.parameters) == ["tensor", *names_of("reducescatter", "name priority op")]
    assert shown.parameters["priority"].default == 0 and shown.parameters["weight"].default is None
    assert shown.return_annotation == "tuple"
    assert shown.parameters["name"].annotation == "Optional[str]"
    assert all(f"\n        {name}: " in scattered.__doc__ for name in shown.parameters)


@pytest.mark.parametrize(
    ("given", "named", "words"),
    [
        ((1,), {"opp": 1}, r"scattered\(\) has no option 'opp': there are name, priority, op, prescale_f"),
        ((1, "x"), {"name": "y"}, r"scattered\(\) got name twice"),
        ((), {"name": "y"}, r"scattered\(\) lacks its argument 'tensor'"),
        (range(30), {}, r"scattered\(\) takes at most \d+ arguments \(tensor, name, priority"),
    ],
)
def test_wrong_options_are_named(given, named, words):
    with pytest.raises(TypeError, match=words):
        scattered(*given, **named)


def test_what_is_no_reduction_is_refused():
    with pytest.raises(Misuse, match="is not a reduction"):
        scattered(1, op="median")
