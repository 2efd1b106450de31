"""What ``ringrun.run()`` sends to workers instead of a function that they can import."""

from __future__ import annotations

import functools
import json

import pytest

from ringrun.agent.worker import Call
from ringrun.function import _pack


@pytest.mark.parametrize("by_value", [False, True])
@pytest.mark.parametrize("function", [json.dumps, functools.partial(json.dumps, 1)])
def test_an_installed_function_is_sent_by_its_name(function, by_value):
    packed = _pack(Call(function, (), {}), by_value)
    assert b"dumps" in packed and len(packed) < 20_000
    assert b"separators" not in packed, "its code was sent"


def test_a_function_of_a_module_that_is_not_installed_is_sent_with_its_code():
    assert b"a_text_in_its_code" in _pack(Call(of_this_module, (), {}), True)


def of_this_module():
    return "a_text_in_its_code"
