"""What of a process group is counted and recorded: steps of optimizers, and collectives in the timeline."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

import torch
from torch.optim import optimizer as torch_optimizer

import ringcomm as rc
from ringcomm.clock import StepClock
from ringcomm.engine.observer import Observer
from ringcomm.torch.distributed import _group_transport
from ringcomm.torch.distributed._group_transport import Traced


@pytest.fixture
def fresh(monkeypatch):
    """No step has been counted in this process, and no hook is called but those of the test."""
    hooks = torch_optimizer._global_optimizer_post_hooks
    before = dict(hooks)
    hooks.clear()
    monkeypatch.setattr(_group_transport, "_registered", False)
    monkeypatch.setattr(_group_transport, "_steps", StepClock())
    yield
    hooks.clear()
    hooks.update(before)


def test_steps_are_counted_once_however_many_groups_there_are(fresh):
    steps = _group_transport.optimizer_steps()
    assert _group_transport.optimizer_steps() is steps
    one, other = (torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1) for _ in range(2))
    for made in (one, one, other, one):
        made.step()
    assert steps.count == 3, "of the optimizer with the most steps"


class TestTrace:
    @pytest.fixture
    def observer(self):
        return Observer()

    def events(self, observer):
        return [tuple(event[:3]) for event in observer.drain()]

    def test_a_collective_is_a_row_from_the_call_to_its_end(self, observer):
        traced = Traced(observer, "0", "allreduce", [[torch.ones(2, 3)], torch.ones(4, dtype=torch.int64)])
        row = "group 0: allreduce, 10 x float32/int64"
        assert self.events(observer) == [(row, "B", "QUEUE")]
        with traced:
            assert self.events(observer) == [(row, "E", ""), (row, "B", "ALLREDUCE")]
        assert self.events(observer) == [(row, "E", "")]

    def test_two_at_once_have_a_row_each(self, observer):
        first, second = (Traced(observer, "0", "barrier", []) for _ in range(2))
        with pytest.raises(ZeroDivisionError), first:
            raise ZeroDivisionError
        third = Traced(observer, "0", "barrier", [])
        with second, third:
            pass
        rows = [row for row, phase, activity in self.events(observer) if activity == "QUEUE"]
        assert rows == ["group 0: barrier", "group 0: barrier (2)", "group 0: barrier"]
        assert not any(places for places in _group_transport._open.values()), "all rows are free again"


class TestObserver:
    @pytest.fixture(autouse=True)
    def no_source(self, monkeypatch):
        monkeypatch.setattr(_group_transport, "_default_source", None)

    def test_without_a_group_there_is_none(self):
        assert _group_transport.observer() is None

    def test_it_is_that_of_the_default_group_as_long_as_that_exists(self):
        source = type("Source", (), {"observer": Observer()})()
        _group_transport.write_here(source)
        assert _group_transport.observer() is source.observer
        del source
        assert _group_transport.observer() is None

    def test_in_a_job_it_is_that_of_the_job(self, monkeypatch):
        source = type("Source", (), {"observer": Observer()})()
        _group_transport.write_here(source)
        rc.init()
        try:
            assert _group_transport.observer() is None, "the job records nothing"
            observer = Observer()
            engine = SimpleNamespace(observer=observer)
            monkeypatch.setattr(_group_transport.api, "context", lambda: SimpleNamespace(engine=engine))
            assert _group_transport.observer() is observer
        finally:
            monkeypatch.undo()
            rc.shutdown()
