"""The elastic state of arrays: steps are counted, and rank 0's arrays are copied into the ranks' own."""

from __future__ import annotations

from typing import Any, List

import numpy as np
import pytest

from ringcomm import api
from ringcomm.calls import direct
from ringcomm.elastic.state import ArrayState, _synchronize
from ringcomm.errors import HostsUpdatedInterrupt, Misuse, PeerLostError
from ringcomm.ops import Max


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

    def test_a_loss_within_it_leaves_a_state_that_is_not_the_newest(
        self, job: Job, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def lost(array: Any) -> None:
            raise PeerLostError("rank 0 is gone")

        state = job.state(weights=np.zeros(3))
        state._position = 4
        job.sent = [(7, {})]
        monkeypatch.setattr(direct, "broadcast_", lost)
        monkeypatch.setattr(api, "gather_positions", lambda position: [9, position])
        with pytest.raises(PeerLostError):
            _synchronize(state)
        assert state._position == 0
