"""Elastic states of values, arrays and parts, and the loop that restarts training from them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, List

import numpy as np
import pytest

import ringcomm as rc
from ringcomm import api
from ringcomm.calls import direct
from ringcomm.elastic import state as module
from ringcomm.elastic.state import (
    ArrayState,
    DictPart,
    ObjectState,
    PartsState,
    VariablesPart,
    _synchronize,
    check_built,
    run,
)  # fmt: skip
from ringcomm.errors import ConfigError, HostsUpdatedInterrupt, Misuse, PeerLostError
from ringcomm.ops import Max


def state(**values):
    return ObjectState(lambda value: value, lambda: 0, **values)


def test_changed_hosts_interrupt_once():
    kept = state(epoch=0)
    kept.check_host_updates()
    kept.on_hosts_updated(5.0, 1)
    with pytest.raises(rc.HostsUpdatedInterrupt) as caught:
        kept.commit()
    assert caught.value.skip_sync
    kept.check_host_updates()
    kept.on_hosts_updated(4.0, 2)  # old news
    kept.check_host_updates()
    kept.on_hosts_updated(6.0, 2)
    kept.on_hosts_updated(7.0, 1)
    with pytest.raises(rc.HostsUpdatedInterrupt) as caught:
        kept.check_host_updates()
    assert not caught.value.skip_sync


def test_processes_that_are_being_started_interrupt_nothing():
    kept = state(epoch=0)
    kept._last_updated_timestamp = 1e12  # of a rank 0 whose clock is ahead
    kept._take_change(2, False)
    assert kept._host_messages.qsize() == 1, "programs of Horovod look there"
    kept.check_host_updates()
    kept._take_change(2, True)
    with pytest.raises(rc.HostsUpdatedInterrupt):
        kept.commit()
    kept._take_change(2, False)
    kept.on_reset()
    kept.check_host_updates()


def test_a_loss_restores_the_last_commit_and_changed_hosts_do_not():
    kept, seen, resets = state(step=0), [], []

    def train(kept, end):
        seen.append(kept.step)
        kept.step += 1
        if len(seen) == 1:
            kept.commit()
            kept.step = 99
            raise rc.PeerLostError("gone")
        if len(seen) == 2:
            raise rc.HostsUpdatedInterrupt(True)
        return end

    kept.register_reset_callbacks([lambda: resets.append("callback")])
    assert run(train, lambda: resets.append("reset"))(kept, end="done") == "done"
    assert seen == [0, 1, 2]
    assert resets == ["reset", "callback"] * 2


def test_errors_of_the_program_are_not_retried():
    calls = []

    @run
    def train(kept):
        calls.append(1)
        raise rc.MismatchError("wrong program")

    with pytest.raises(rc.MismatchError):
        train(state(a=1))
    assert calls == [1]


def test_a_report_whose_exchange_failed_does_not_end_the_next_view_too(monkeypatch):
    """The next view already contains the processes that the report was about."""
    reports, exchanges, views = [2], [], []

    def allreduce(values, op):
        exchanges.append(int(values[0]))
        if len(exchanges) == 1:
            raise rc.PeerLostError("gone")
        return values

    monkeypatch.setattr(api, "take_changes", lambda: reports.pop() if reports else 0)
    monkeypatch.setattr(api, "is_initialized", lambda: True)
    monkeypatch.setattr(direct, "allreduce", allreduce)
    monkeypatch.setattr(api, "gather_positions", lambda position: [position, position])

    def train(kept):
        while kept.step < 3:
            with kept.update():
                kept.total += 1

    kept = rc.elastic.ArrayState(total=0)
    kept._position = 1
    run(train, lambda: views.append(kept.step))(kept)
    assert (exchanges, views, kept.total) == ([2, 0, 0], [1], 3)

# ---- arrays ------------------------------------------------------------------------------------------------


class Job:
    """The calls of one rank, which the test answers for the other ranks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.changes: List[int] = []  # changed hosts that this rank is told, one item per request
        self.others = 0  # those that other ranks are told; the greatest counts
        self.exchanges = 0  # between ranks
        self.initialized = True
        self.sent: List[Any] = []  # broadcasts of rank 0, in order: a value, then arrays
        monkeypatch.setattr(api, "take_changes", lambda: self.changes.pop(0) if self.changes else 0)
        monkeypatch.setattr(api, "is_initialized", lambda: self.initialized)
        monkeypatch.setattr(direct, "allreduce", self._allreduce)
        monkeypatch.setattr(direct, "broadcast_", self._broadcast)

    def _allreduce(self, array: Any, op: Any) -> Any:
        assert op == Max and array.dtype == np.int32
        self.exchanges += 1
        return np.maximum(array, self.others)

    def _broadcast(self, array: Any) -> None:
        assert array.flags.c_contiguous
        array[...] = self.sent.pop(0)

    def state(self, **values: Any) -> ArrayState:
        made = ArrayState(**values)
        made._bcast_object = lambda value: self.sent.pop(0)  # type: ignore[method-assign]
        return made


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Job:
    return Job(monkeypatch)


class TestUpdates:
    def test_a_step_is_counted_when_its_block_ends(self, job: Job) -> None:
        state = job.state(weights=np.zeros(2), rate=0.5)
        with state.update():
            state.weights += 1
            assert state.step == 0
        assert state.step == state._position == 1 and job.exchanges == 1
        assert state.weights.tolist() == [1.0, 1.0] and state.rate == 0.5

    def test_a_collective_that_fails_in_the_block_cannot_be_repeated(self, job: Job) -> None:
        state = job.state()
        with pytest.raises(Misuse, match="inside `with state.update") as caught, state.update():
            raise PeerLostError("rank 1 is gone")
        assert isinstance(caught.value.__cause__, PeerLostError) and state.step == 0


class TestChangedHosts:
    def test_the_step_is_complete_before_training_is_interrupted(self, job: Job) -> None:
        job.changes = [0, 2]
        state = job.state()
        state.commit()
        with pytest.raises(HostsUpdatedInterrupt), state.update():
            pass
        assert state.step == 1
        state.commit()  # the interrupt was for this change

    def test_the_next_view_contains_what_was_reported(self, job: Job) -> None:
        job.changes, job.initialized = [2], False
        state, called = job.state(), []
        state.commit()  # nothing is exchanged yet, so it is kept
        state.register_reset_callbacks([lambda: called.append("reset")])
        state.on_reset()
        job.initialized = True
        state.commit()
        assert called == ["reset"]


class TestSynchronization:
    def test_arrays_are_overwritten_and_values_replaced(self, job: Job) -> None:
        weights, turned = np.zeros(3), np.zeros((2, 2), order="F")
        state = job.state(weights=weights, turned=turned, rate=0.5)
        # In the order of their names.
        job.sent = [(7, {"rate": 0.25}), [[1.0, 2.0], [3.0, 4.0]], [5.0, 6.0, 7.0]]
        state.sync()
        assert (state.step, state._position, state.rate) == (7, 0, 0.25), "the loop sets the position"
        assert state.weights is weights and weights.tolist() == [5.0, 6.0, 7.0]
        assert state.turned is turned and turned.tolist() == [[1.0, 2.0], [3.0, 4.0]]
        assert job.sent == []

# ---- parts -------------------------------------------------------------------------------------------------


class Variable:
    """A framework's variable, as far as a part is concerned."""

    def __init__(self, number: float) -> None:
        self.number = number


class Layer:
    def __init__(self, *numbers: float) -> None:
        self.variables = [Variable(number) for number in numbers]


class Thing:
    def __init__(self, number: float) -> None:
        self.number = number

    def state_dict(self) -> float:
        return self.number

    def load_state_dict(self, number: float) -> None:
        self.number = number


def test_a_loss_between_two_parts_leaves_no_state_that_counts_as_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two processes with equal positions have equal states: one with half of a newer state has none."""
    first, second = Thing(5), Thing(5)
    made = PartsState({"first": DictPart(first), "second": DictPart(second)})
    made._position, sent = 5, [6]

    def broadcast(value: Any, *_: Any, **__: Any) -> Any:
        if not sent:
            raise PeerLostError("rank 0 is gone")
        return sent.pop()

    monkeypatch.setattr(api, "gather_positions", lambda position: [6, position])
    monkeypatch.setattr(module, "broadcast_object", broadcast)
    with pytest.raises(PeerLostError):
        _synchronize(made)
    made.restore()
    assert (first.number, second.number, made._position) == (6, 5, 0)


def numbers_of(variables: List[Variable]) -> List[float]:
    return [item.number for item in variables]


def assign(variables: List[Variable], values: List[float]) -> None:
    for item, value in zip(variables, values):
        item.number = value


def test_a_state_of_parts_and_values(alone: Any):
    layer, sent = Layer(1.0), []
    state: Any = PartsState({"layer": VariablesPart(layer, numbers_of, assign, sent.append)}, epoch=3)
    assert state.layer is layer and state.epoch == 3
    state.epoch, layer.variables[0].number = 4, 9.0
    state.restore()
    assert (state.epoch, layer.variables[0].number) == (3, 1.0)
    state.epoch, layer.variables[0].number = 5, 2.0
    state.save()
    state.epoch, layer.variables[0].number = 6, 3.0
    state.restore()
    assert (state.epoch, layer.variables[0].number) == (5, 2.0)
    state.sync()
    assert sent == [layer.variables]


def test_a_model_that_is_not_built_cannot_be_saved():
    with pytest.raises(ConfigError, match="must be built first"):
        check_built(SimpleNamespace(built=False), None)
