"""Joining and leaving the job of this process, alone: no socket is opened."""

from __future__ import annotations

import sys

import pytest

import ringcomm as rc
from ringcomm import api
from ringcomm.config import Membership, Settings
from ringcomm.job import context as context_module
from ringcomm.job.context import Context, Newcomer


@pytest.fixture
def alone(monkeypatch):
    """A job of this one process, and lists of callbacks of its own."""
    monkeypatch.setattr(context_module, "_before_leaving", [])
    monkeypatch.setattr(context_module, "_after_restart", [])
    for name in ("RINGCOMM_SIZE", "RINGCOMM_ELASTIC"):
        monkeypatch.delenv(name, raising=False)
    rc.init(Membership())
    yield
    rc.shutdown()


@pytest.fixture
def closed(monkeypatch):
    """How contexts have been closed: the arguments."""
    calls = []
    close = Context.close

    def spy(context, *arguments, **options):
        calls.append((*arguments, *options.values()))
        close(context, *arguments, **options)

    monkeypatch.setattr(Context, "close", spy)
    return calls


def test_a_restart_of_a_job_that_is_not_elastic_is_a_new_start(alone, closed):
    seen = []
    api.before_leaving(lambda: seen.append("before"))
    api.after_restart(lambda: seen.append("after"))
    before = api.context()
    api.restart()
    assert seen == ["before"] and len(closed) == 1
    assert api.context() is not before and rc.size() == 1


def test_the_error_for_which_a_process_leaves_is_passed_on(alone, closed):
    api.leave(ValueError("wrong shape"))
    assert closed == [("uncaught ValueError: wrong shape", False)]
    assert not rc.is_initialized()


def test_at_its_end_a_program_leaves(alone, closed, monkeypatch):
    monkeypatch.delattr(sys, "last_value", raising=False)
    seen = []
    api.before_leaving(lambda: seen.append(True))
    context_module._leave_at_exit()
    assert closed == [("its program ended",)] and seen == [True]


def test_a_program_that_has_failed_says_why_and_waits_for_nothing(alone, closed, monkeypatch):
    monkeypatch.setattr(sys, "last_value", KeyError("layer"), raising=False)
    monkeypatch.delattr(sys, "ps1", raising=False)
    seen = []
    api.before_leaving(lambda: seen.append(True))
    context_module._leave_at_exit()
    assert closed == [("uncaught KeyError: 'layer'", False)] and not seen


class Waiting(Newcomer):
    """A process that finds a job of one rank when it joins."""

    def __init__(self, size: int) -> None:
        super().__init__(Membership(elastic=True), Settings(), size)
        self.joined = 0

    def restart(self, position: int = 0) -> Context:
        self.joined += 1
        return Context.start(Membership(), self.settings)


@pytest.fixture
def newcomer(alone, monkeypatch):
    """This process has not joined yet, in a job of two ranks."""
    context_module.shutdown()
    made = Waiting(2)
    monkeypatch.setattr(context_module, "_default", made)
    return made


def test_a_newcomer_has_numbers_and_joins_at_its_first_call(newcomer):
    numbers = [rc.rank(), rc.size(), rc.local_rank(), rc.local_size(), rc.cross_rank(), rc.cross_size()]
    assert numbers == [2, 3, 0, 1, 2, 3]
    assert rc.is_initialized() and context_module.is_elastic() and not rc.is_homogeneous()
    assert context_module.take_changes() == 0 and not context_module.on_changes(None)
    assert newcomer.joined == 0
    assert float(rc.allreduce([1.0])[0]) == 1.0
    assert (rc.rank(), rc.size(), newcomer.joined) == (0, 1, 1)
    assert not context_module.join_now(), "it has joined"
