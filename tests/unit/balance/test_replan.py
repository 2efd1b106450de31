"""Measurements in, new shares out: on simulated ranks, without clocks or waiting."""

from __future__ import annotations

from typing import List, Optional

import numpy as np
import pytest

from ringcomm.balance.plan import (
    PAUSE,
    ComputeTime,
    NewShares,
    RankTimes,
    Replanner,
    ShareLimits,
    compute_s,
    proportional_shares,
    typical_s,
)


class Ranks:
    """Ranks of given speeds that report whenever they should."""

    def __init__(
        self, speeds: List[ComputeTime], total: int = 96, noise: float = 0.0, ahead: int = 0
    ) -> None:
        self.speeds = speeds
        hosts = [f"jetson{rank}" for rank in range(len(speeds))]
        self.planner = Replanner(proportional_shares([1] * len(speeds), total), total, ShareLimits(), hosts)
        self.shares = self.planner.shares
        self.noise = np.random.default_rng(0).normal
        self.scale = noise
        self.ahead = ahead
        self.steps = 0
        self.changes: List[NewShares] = []
        self.most = [0] * len(speeds)

    def run(self, steps: int) -> Optional[NewShares]:
        stop = self.steps + steps
        change = None
        while self.steps + self.planner.window <= stop:
            self.steps += self.planner.window
            longest_s = compute_s(self.speeds, self.shares)
            reports = []
            for rank, speed in enumerate(self.speeds):
                own_s = speed.compute_s(self.shares[rank]) * (1.0 + self.scale * self.noise())
                wait_s = max(0.0, longest_s - own_s) + 0.01
                reports.append(RankTimes(self.shares[rank], own_s, wait_s, self.ahead, self.most[rank]))
            change = self.planner.decide(self.steps, reports)
            if change is not None:
                self.changes.append(change)
                self.shares = change.shares
        return change

    def spread(self) -> float:
        times = [speed.compute_s(share) for speed, share in zip(self.speeds, self.shares) if share]
        return (max(times) - min(times)) / max(times)


def test_equal_ranks_are_left_alone():
    ranks = Ranks([ComputeTime(0.01, 0.01)] * 3, noise=0.03)
    ranks.run(1000)
    assert ranks.changes == []


def test_a_rank_that_slows_down_is_found_and_named():
    ranks = Ranks([ComputeTime(0.005, 0.01)] * 3, noise=0.02)
    ranks.run(200)
    ranks.speeds[1] = ComputeTime(0.01, 0.02)
    ranks.run(80)
    assert len(ranks.changes) == 1
    assert ranks.changes[0].text.startswith("jetson1 slowed to 0.5")
    assert ranks.spread() < 0.10
    ranks.speeds[1] = ComputeTime(0.005, 0.01)
    ranks.run(70)
    assert "jetson1 sped up to 2" in ranks.changes[1].text
    assert ranks.spread() < 0.10


def test_communication_that_nothing_can_shorten_counts():
    """A gain of a fifth of the computation is no tenth of a step that is mostly communication."""
    planner = Replanner((48, 48), 96, ShareLimits(), ["a", "b"])
    assert planner.decide(5, [RankTimes(48, 0.8, 4.2, 0), RankTimes(48, 1.0, 4.0, 0)]) is None
    planner = Replanner((48, 48), 96, ShareLimits(), ["a", "b"])
    assert planner.decide(5, [RankTimes(48, 0.5, 0.5, 0), RankTimes(48, 1.0, 0.0, 0)]) is not None


def test_a_rank_out_of_memory_is_bounded_at_once():
    ranks = Ranks([ComputeTime(0.0, 0.01)] * 3)
    ranks.run(100)
    ranks.most[2] = 20
    ranks.run(20)
    assert ranks.shares == (38, 38, 20)


def test_a_change_that_makes_steps_longer_is_taken_back():
    planner = Replanner((32, 32), 64, ShareLimits(), ["a", "b"])
    first = planner.decide(5, [RankTimes(32, 0.5, 0.5, 3), RankTimes(32, 1.0, 0.0, 11)])
    assert first is not None and first.shares == (43, 21) and first.lead > 11, "further than any loader takes"
    even = [RankTimes(43, 0.67, 0.0, 0), RankTimes(21, 0.66, 0.01, 0)]
    assert planner.decide(16, even) is None and planner.decide(40, even) is None
    slower = [RankTimes(43, 1.0, 0.0, 0), RankTimes(21, 0.66, 0.34, 0)]
    assert planner.decide(5 + PAUSE - 1, slower) is None  # too early
    change = planner.decide(60, slower)
    assert change is not None and change.shares[0] < 40
    first, other = change.shares
    back = planner.decide(90, [RankTimes(first, 0.6, 0.6, 0), RankTimes(other, 1.2, 0.0, 0)])
    assert back is not None and back.shares == (43, 21)
    assert back.text == f"steps became longer at step 90, 1 -> 1.2 s: batches {first}/{other} -> 43/21 again"


def test_a_step_that_compiles_or_writes_a_checkpoint_is_left_out():
    assert typical_s([0.1, 0.1, 4.0, 0.1]) == pytest.approx(0.1)
    assert typical_s([0.05, 0.15] * 10) == pytest.approx(0.1), "a quota makes steps uneven: no median"
