"""Heartbeats, transfers that stand still, and ranks that do not come: the detectors, and the channels."""

from __future__ import annotations

import pytest

from ringcomm.collective.observe import Progress
from ringcomm.engine.peer_channels import (
    CALLS,
    ENGINE,
    FailureDetector,
    ProgressReports,
    SilenceLimits,
)  # fmt: skip
from ringcomm.errors import ProtocolError

HOSTS = ["desk", "jetson1", "jetson2"]


def detector(*peers, dead_after_s=30.0):
    return FailureDetector(peers, dead_after_s, SilenceLimits(dead_after_s).interval_s, 0.0)


def test_silence_means_death_after_the_limit():
    life = detector(1, 2)
    for second in range(1, 30):
        life.received(2, second)
        assert life.silent(float(second)) is None
    assert life.silent(30.0) == (1, 30.0)


def test_a_rank_that_was_frozen_itself_does_not_blame_others():
    life = detector(1)
    assert life.silent(5.0) is None
    assert life.silent(100.0) is None  # this process did not run for 95 s
    for second in range(101, 130):
        assert life.silent(float(second)) is None
    assert life.silent(130.0) == (1, 30.0)


def test_no_heartbeat_is_expected_of_a_rank_that_has_left_or_without_a_limit():
    life, unlimited = detector(1), detector(1, dead_after_s=0.0)
    life.left(1)
    life.received(1, 1.0)
    for second in range(1, 100, 5):
        assert life.silent(float(second)) is None and unlimited.silent(1e6 * second) is None


def reports(rank=1, limits=SilenceLimits(30.0, 60.0, 600.0)):  # noqa: B008
    return ProgressReports(rank, HOSTS, limits)


def calling(number, moved=0, *waits_for, exchanged=()):
    return Progress(2 * number, moved, "allreduce(8 x float32)", waits_for, exchanged)


def between(number):
    return Progress(2 * number)


class TestStuck:
    def stuck_at(self, mine, theirs, channel=CALLS):
        """When rank 1 finds its transfer stuck, if nothing moves; and with which rank."""
        state = reports()
        for second in range(40):
            state.report(1, channel, mine, float(second))
            for rank, progress in theirs.items():
                state.report(rank, channel, progress, float(second))
            found = state.stuck(float(second))
            if found:
                return second, found[0]
        return None

    @pytest.mark.parametrize("channel", [CALLS, ENGINE])
    def test_bytes_do_not_arrive(self, channel):
        others = {0: calling(4, 10, 2, exchanged=((1, 5, 5),)), 2: calling(4, 30, 1, exchanged=((1, 8, 8),))}
        own = calling(4, 20, 0, 2, exchanged=((0, 5, 5), (2, 8, 7)))
        assert self.stuck_at(own, others, channel) == (30, 2)

    def test_both_wait_for_each_other_because_of_a_third(self):
        others = {0: calling(4, 10, 2), 2: calling(4, 30, 1, exchanged=((1, 7, 8),))}
        assert self.stuck_at(calling(4, 20, 0, 2, exchanged=((2, 8, 7),)), others) is None

    def test_the_other_is_through_with_it_or_has_not_come(self):
        assert self.stuck_at(calling(4, 20, 2), {2: between(4)}) == (30, 2)
        assert self.stuck_at(calling(4, 20, 2), {2: calling(5, 0, 0)}) == (30, 2)
        assert self.stuck_at(calling(4, 20, 0), {0: calling(4, 10, 2), 2: between(3)}) is None
        assert self.stuck_at(calling(4, 20, 0), {0: between(3)}) is None

    @pytest.mark.parametrize("moving", [1, 2])
    def test_that_one_of_them_moves_is_enough(self, moving):
        state = reports()
        for second in range(0, 10_000, 20):
            for rank in (1, 2):
                moved = second if rank == moving else 7
                state.report(rank, CALLS, calling(4, moved, 3 - rank), float(second))
            assert state.stuck(second + 19.0) is None


class TestLate:
    def watch(self, seconds, calls, paused=lambda second: ()):
        """What rank 0 reports, and when, if no rank makes progress."""
        state, said = reports(0), []
        for second in range(seconds):
            for rank, progress in calls.items():
                state.report(rank, CALLS, progress, float(second))
            late = state.late(paused(second), float(second))
            if late:
                said.append((second, late))
        return said

    def test_a_warning_a_minute_and_then_the_end(self):
        said = self.watch(602, {0: calling(4), 1: between(3), 2: calling(4)})
        assert [second for second, _ in said] == [60, 120, 180, 240, 300, 360, 420, 480, 540, 600]
        assert [late.given_up for _, late in said] == [False] * 9 + [True]
        assert {tuple(late.ranks) for _, late in said} == {(1,)}
        assert said[0][1].text == (
            "allreduce(8 x float32), call number 4, has waited for 60 s on ranks 0 (desk) and 2 (jetson2) "
            "for rank 1 (jetson1)"
        )

    def test_the_last_of_a_chain_is_late_unless_a_slow_transfer_comes_before(self):
        said = self.watch(100, {0: calling(5), 1: between(3), 2: calling(4)})
        assert [late.ranks for _, late in said] == [[1]]
        assert self.watch(1000, {0: calling(5), 1: calling(4), 2: calling(4)}) == []

    def test_a_pause_stops_the_clock(self):
        calls = {0: calling(4), 1: between(3), 2: calling(4)}
        assert self.watch(5000, calls, lambda _: {1}) == []
        said = self.watch(200, calls, lambda second: {1} if second < 100 else ())
        assert [second for second, _ in said] == [155]


@pytest.mark.parametrize("data", [[], [1, 2, "x", 5, []], ["x", 2, "x", [], []], [1, 2, "x", [], [[1, 2]]]])
def test_what_travels_is_what_was_said(data):
    progress = calling(4, 96, 0, 2, exchanged=((0, 5, 6), (2, 7, 8)))
    assert Progress.from_json(progress.to_json()) == progress
    with pytest.raises(ProtocolError):
        Progress.from_json(data)
