from __future__ import annotations

from typing import Any, Callable, Dict, List, Set

import pytest

from ringrun.job.agents import INTERRUPT, term
from ringrun.job.grace import GRACE_S, LEAVING_S, Grace, killed_text


class Alarms:
    """Keeps timers, in place of the supervisor's loop."""

    def __init__(self) -> None:
        self.set: Dict[str, Callable[[], None]] = {}
        self.seconds: List[float] = []

    def is_set(self, name: str) -> bool:
        return name in self.set

    def after(self, name: str, seconds: float, action: Callable[[], None]) -> None:
        self.set[name] = action
        self.seconds.append(seconds)

    def cancel(self, name: str) -> None:
        del self.set[name]

    def ring(self) -> None:
        self.set.pop("grace")()


def grace() -> Any:
    alarms: Any = Alarms()
    exited: Set[int] = set()
    ended: List[str] = []
    return Grace(alarms, exited, lambda: ended.append("end")), alarms, exited, ended


def test_the_others_have_some_time_after_the_first_failure() -> None:
    found, alarms, _, ended = grace()
    assert found.begin() and not found.begin(), "it begins once"
    assert alarms.seconds == [GRACE_S] and ended == []
    alarms.ring()
    assert ended == ["end"]


def test_a_rank_that_is_leaving_has_longer() -> None:
    found, alarms, exited, ended = grace()
    found.begin()
    found.leaving.add(2)
    found.exited()  # another rank; the first time is not shortened
    alarms.ring()
    assert alarms.seconds == [GRACE_S, LEAVING_S] and ended == []
    found.exited()
    assert ended == []
    exited.add(2)
    found.exited()
    assert ended == ["end"] and not alarms.set


def test_it_does_not_last_for_ever() -> None:
    found, alarms, _, ended = grace()
    found.begin()
    found.leaving.add(2)
    alarms.ring()
    alarms.ring()
    assert ended == ["end"]
    found.exited()
    assert ended == ["end"]


@pytest.mark.parametrize(
    ("steps", "at_once_s", "text"),
    [
        (term(30.0), None, "killed 30 s after SIGTERM, while handling it; --grace S gives them longer"),
        (term(30.0), 40.0, "killed 30 s after SIGTERM, while handling it; --grace S gives them longer"),
        (term(30.0), 4.04, "killed by the second signal, 4.0 s after SIGTERM, while handling it"),
        (INTERRUPT, None, "killed 3.5 s after SIGINT, while handling it"),
    ],
)
def test_ranks_that_were_killed_are_named_with_the_time_that_they_had(
    steps: Any, at_once_s: Any, text: str
) -> None:
    assert killed_text(steps, at_once_s) == text
