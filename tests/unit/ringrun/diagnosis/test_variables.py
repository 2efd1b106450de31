"""Variables that are not the same on all hosts: which are named, and which values are shown."""

from __future__ import annotations

from typing import Dict

import pytest

from ringrun.agent.recorders import names_in, value_digests
from ringrun.diagnosis.variables import Variables, is_harmless

SHELL = {"STEPS": "200", "LR": "0.1", "API_TOKEN": "hush", "DATA": "/data", "HOME": "/home/me", "SAME": "1"}
NAMES = [*SHELL, "ONLY_THERE", "RANK"]


def variables(**hosts: Dict[str, str]) -> Variables:
    found = Variables("job", SHELL)
    for host, env in hosts.items():
        found.take(host, value_digests(NAMES, env, "job"))
    return found


def test_what_only_the_launching_shell_has_is_named_with_the_remedy() -> None:
    found = variables(localhost=SHELL, jetson1={"SAME": "1", "DATA": "/mnt", "HOME": "/home/you"})
    assert found.differing() == ["API_TOKEN", "LR", "STEPS"]
    assert found.text(["STEPS"]) == (
        "the program reads variables that are not the same on all hosts: STEPS is 200 on localhost and not "
        "set on jetson1. All ranks get the same with -x STEPS"
    )
    assert "API_TOKEN is set on localhost and not set on jetson1" in found.text(found.differing())
    assert "hush" not in found.text(found.differing())


def test_hosts_with_the_same_value_are_named_together() -> None:
    there: Dict[str, Dict[str, str]] = {"a": {}, "b": {"LR": "0.5"}, "localhost": SHELL, "c": {}}
    assert "LR is 0.1 on localhost, another value on b and not set on a, c" in variables(**there).text(["LR"])
    assert variables(a={"LR": "1"}, b={"LR": "2"}).text(["LR"]) == (
        "the program reads variables that are not the same on all hosts: LR is set on a and another value on "
        "b. All ranks get the same with -x LR"
    )


def test_a_variable_that_the_shell_lacks_gets_a_value_with_the_option() -> None:
    found = variables(localhost=SHELL, jetson1={**SHELL, "ONLY_THERE": "x"})
    assert found.differing() == ["ONLY_THERE"]
    assert "ONLY_THERE is set on jetson1 and not set on localhost" in found.text(["ONLY_THERE"])
    assert found.text(["ONLY_THERE"]).endswith("-x ONLY_THERE=VALUE")


def test_what_is_not_known_of_two_hosts_or_differs_by_design_is_no_difference() -> None:
    assert variables(localhost=SHELL).differing() == []
    assert variables(a={**SHELL, "RANK": "0"}, b={**SHELL, "RANK": "1", "HOME": "x"}).differing() == []
    assert variables(a=SHELL, b=SHELL).text([]) == ""


def test_of_many_the_first_are_named() -> None:
    names = [f"NAME_{number}" for number in range(7)]
    found = Variables("job", dict.fromkeys(names, "1"))
    found.take("a", value_digests(names, dict.fromkeys(names, "1"), "job"))
    found.take("b", value_digests(names, {}, "job"))
    assert "(2 more differ)" in found.text(found.differing()) and "NAME_5" not in found.text(names)


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("STEPS", "200", True),
        ("LR", "1e-3", True),
        ("MODE", "train", True),
        ("API_KEY", "x", False),
        ("DB_PASSWORD", "x", False),
        ("STEPS", "2\n3", False),
        ("STEPS", "", False),
        ("TEXT", "with blanks", False),
        ("URL", "db://me:word@host", False),
        ("HASH", "a1b2c3d4e5f6a7b8c9", False),
        ("LONG", "x" * 25, False),
    ],
)
def test_a_value_is_shown_only_if_it_is_harmless(name: str, value: str, shown: bool) -> None:
    assert is_harmless(name, value) is shown


def test_a_message_that_a_rank_has_sent_in_part_has_no_names() -> None:
    assert names_in(b'{"type":"lookups","names":["A","B",7]}') == ["A", "B"]
    assert names_in(b'{"type":"lookups","names":["A"{"type":') == []
    assert names_in(b'{"type":"lookups"}') == []
