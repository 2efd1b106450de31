"""What happens to signals before the command line is read."""

from __future__ import annotations

import runpy
import signal
import sys
from pathlib import Path
from typing import Iterator, List

import pytest

from ringrun import __main__, cli


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Handlers are as before in the end."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGUSR1)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("before", "then"),
    [(signal.default_int_handler, signal.SIG_DFL), (signal.SIG_IGN, signal.SIG_IGN)],
)
def test_ctrl_c_ends_the_process_unless_it_is_ignored(
    monkeypatch: pytest.MonkeyPatch, before: signal.Handlers, then: signal.Handlers
) -> None:
    seen: List[object] = []
    monkeypatch.setattr(cli, "main", lambda: seen.append(signal.getsignal(signal.SIGINT)))
    signal.signal(signal.SIGINT, before)
    __main__.main()
    assert seen == [then]
    signal.raise_signal(signal.SIGUSR1)  # does nothing
    assert signal.getsignal(signal.SIGUSR1) != signal.SIG_IGN


def test_it_runs_as_a_module(monkeypatch: pytest.MonkeyPatch) -> None:
    called: List[bool] = []
    monkeypatch.setattr(cli, "main", lambda: called.append(True))
    monkeypatch.delitem(sys.modules, "ringrun.__main__")
    monkeypatch.setattr(sys, "path", [str(Path.cwd()), *sys.path[1:]])
    rest = sys.path[1:]
    runpy.run_module("ringrun", run_name="__main__")
    assert called == [True]
    assert sys.path == [*rest, str(Path.cwd())]  # a numpy.py there is not imported
