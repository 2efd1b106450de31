"""Which members are pinged, how often, and which of them count as failed."""

from __future__ import annotations

from typing import Any

import pytest

from ringcomm.rendezvous.actions import Send, Timer
from ringcomm.rendezvous.listening import census, listen
from ringcomm.rendezvous.membership import Member
from tests.unit.rendezvous.simulated import join_message


def member(rank: int, heard_s: float = 100.0, dead_after: float = 6.0) -> Member:
    message = join_message(hostname=f"host{rank}", dead_after=dead_after)
    made = Member(10 + rank, message, None, f"host{rank}")
    made.rank, made.heard_s = rank, heard_s
    return made


def pinged(actions: Any) -> Any:
    return [item.connection for item in actions if isinstance(item, Send) and item.message["type"] == "ping"]


@pytest.mark.parametrize("running", [False, True])
def test_every_member_is_pinged(running: bool) -> None:
    actions, causes = listen([member(0), member(1, dead_after=12.0)], running, 101.0)
    assert pinged(actions) == [10, 11] and causes == []
    assert actions[-1] == Timer(1.0), "six pings within the shortest limit"


def test_members_that_have_ended_and_those_without_a_limit_are_not_pinged() -> None:
    left, gone, endless = member(0), member(1), member(2, dead_after=0.0)
    left.left, gone.gone = "it called shutdown()", "exit code 1"
    assert listen([left, gone, endless], False, 10_000.0) == ([], [])


@pytest.mark.parametrize(
    "running, words", [(False, "links were being built"), (True, "others have left already")]
)
def test_the_member_that_has_been_silent_for_longest_is_the_root_cause(running: bool, words: str) -> None:
    members = [member(0, 95.0), member(1, 94.0), member(2, 99.0)]
    actions, (cause,) = listen(members, running, 100.0)
    assert actions == [] and cause.culprit is members[1] and cause.kind == "stalled"
    assert "rank 1 (host1) has been silent for 6 s" in cause.text and words in cause.text


def test_just_before_the_limit_there_is_no_root_cause() -> None:
    actions, causes = listen([member(0, 94.1)], False, 100.0)
    assert pinged(actions) == [10] and causes == []


def test_a_member_that_has_not_answered_is_not_asked_again() -> None:
    members = [member(0), member(1), member(2)]
    members[2].left = "it called shutdown()"
    assert pinged(census(members)) == [10, 11]
    assert census(members) == []
    members[0].asked = False
    assert pinged(census(members)) == [10]
