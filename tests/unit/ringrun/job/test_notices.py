from __future__ import annotations

from typing import Any, List

import pytest

from ringcomm.config import Settings
from ringcomm.rendezvous.actions import Notice
from ringrun.job.launch import Options, prepare
from ringrun.job.notices import REFUSALS_SHOWN, Notices
from ringrun.reach import doors


@pytest.fixture(autouse=True)
def no_lookups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which hosts are this machine is not asked of any resolver here."""
    local = lambda specs, **_: [spec.name == "localhost" for spec in specs]  # noqa: E731
    monkeypatch.setattr(doors, "find_local", local)


class Screen:
    """Keeps what is shown."""

    def __init__(self) -> None:
        self.lines: List[str] = []

    def show(self, text: str) -> None:
        self.lines.append(text)


def notices(verbose: bool = False, hosts: str = "a,b") -> Any:
    job = prepare(Options(hosts=hosts, verbose=verbose), ["true"], {})
    assert isinstance(job.settings, Settings)
    screen: Any = Screen()
    return Notices(job, screen), screen.lines


def test_warnings_are_shown_and_the_rest_only_on_request() -> None:
    for verbose, shown in ((False, ["slow"]), (True, ["slow", "linked"])):
        found, lines = notices(verbose)
        for kind, text in (("warning", "slow"), ("linked", "linked"), ("ended", "")):
            found.take(Notice(kind, text))
        assert lines == shown


def test_of_many_refusals_the_first_are_shown() -> None:
    found, lines = notices()
    for number in range(REFUSALS_SHOWN + 3):
        found.take(Notice("refused", f"peer {number}"))
    assert len(lines) == REFUSALS_SHOWN
    assert lines[0] == "refused: peer 0"
    assert lines[-1] == f"refused: peer {REFUSALS_SHOWN - 1} (further ones are not shown)"


def test_how_unequal_the_ranks_were_is_known_when_all_have_told() -> None:
    found, lines = notices()
    found.take(Notice("usage", "", rank=0, detail={"elapsed_s": 100.0, "waited_s": 60.0}))
    assert found.unequal() == ""
    found.take(Notice("usage", "", rank=1, detail={"elapsed_s": 100.0, "waited_s": 1.0}))
    text = found.unequal()
    assert "b" in text and "60" in text and lines == []


def test_equal_ranks_are_not_worth_a_line() -> None:
    found, _ = notices()
    for rank in (0, 1):
        found.take(Notice("usage", "", rank=rank, detail={"elapsed_s": 100.0, "waited_s": 1.0}))
    assert found.unequal() == ""
