"""Elastic states, and the loop that restarts training from them."""

from __future__ import annotations

import pytest

import ringcomm as rc
from ringcomm import api
from ringcomm.calls import direct
from ringcomm.elastic.state import ObjectState, run


def state(**values):
    return ObjectState(lambda value: value, lambda: 0, **values)


class Counter:
    def __init__(self):
        self.count = 0

    def state_dict(self):
        return {"count": [self.count]}

    def load_state_dict(self, state):
        (self.count,) = state["count"]


def test_rank_0_decides():
    other = ObjectState(lambda value: {"epoch": 7} if isinstance(value, dict) else value, lambda: 1, epoch=1)
    other.sync()
    assert other.epoch == 7
    other.epoch = 8
    other.restore()
    assert other.epoch == 7


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


def test_what_the_launcher_reports_interrupts_training(monkeypatch):
    reports = [0, 1, 2]
    monkeypatch.setattr(api, "take_changes", lambda: reports.pop(0))
    kept = state(epoch=0)
    kept.check_host_updates()
    for skip_sync in (True, False):
        with pytest.raises(rc.HostsUpdatedInterrupt) as caught:
            kept.check_host_updates()
        assert caught.value.skip_sync is skip_sync
