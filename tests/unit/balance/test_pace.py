"""What a rank measures of its steps and reports, and when shares change; on a clock of the test's own."""

from __future__ import annotations

import logging

import pytest

from ringcomm.balance import pace as module
from ringcomm.balance.batches import Balanced
from ringcomm.balance.pace import Pace, weight_of_steps
from ringcomm.balance.plan import NewShares, SampleDivision
from ringcomm.collective.measure import CHOSEN_CODECS, Rates
from ringcomm.errors import ConfigError
from ringcomm.ops import Average, Sum
from tests.unit.balance.job import Job

RATES = dict.fromkeys(CHOSEN_CODECS, Rates(1e-9, 2e-9))

TOTAL = 16


class Clock:
    def __init__(self):
        self.now_s = 0.0

    def perf_counter(self):
        return self.now_s


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(module, "time", made)
    return made


@pytest.fixture
def lines(caplog):
    """What is shown to the user."""
    caplog.set_level(logging.WARNING, "ringcomm")
    return lambda: [record.getMessage() for record in caplog.records]


class Decisions:
    """In place of a replanner: windows of two steps, and the changes of the test."""

    window = 2

    def __init__(self, *changes):
        self.changes = list(changes)
        self.decided = []

    def decide(self, step, reports):
        self.decided.append((step, reports))
        return self.changes.pop(0) if self.changes else None


def pace_of(job, *changes, steps=100, **options):
    """A position at its beginning, and the decisions that will be made."""
    made = Pace(SampleDivision(TOTAL * steps, TOTAL, size=job.size, **options), job)
    decisions = made.replanner = Decisions(*changes)
    made.begin(0, 0)
    return made, decisions


def step(pace, job, clock, compute_s=0.4, waited_s=0.1):
    clock.now_s += compute_s + waited_s
    job.waited_s += waited_s
    pace.take(pace.epoch, pace.step)
    pace.step_done()


class TestReports:
    def test_of_seconds_with_and_without_waiting(self, clock):
        job = Job(rank=1, size=2)
        pace, decisions = pace_of(job)
        for _ in range(3):
            step(pace, job, clock)
        ((name, row),) = job.asked
        # The first step of an iteration has no beginning, so only the second was measured.
        assert name == "ringcomm.balance.1.2" and row[:5] == pytest.approx([8, 0.4, 0.1, 1, 0])
        ((number, reports),) = decisions.decided
        assert number == 3 and [report.samples for report in reports] == [8, 8]
        assert reports[0].compute_s == pytest.approx(0.4) and reports[0].most == 0

    def test_a_step_without_memory_counts_nothing_but_its_size(self, clock):
        job = Job(size=2)
        pace, _ = pace_of(job)
        step(pace, job, clock)
        pace.lose()
        pace.lose()  # for instance in the forward pass that is repeated
        assert pace.share(1) == 0 and pace.share(2) == 8
        step(pace, job, clock)
        assert job.asked[0][1][:5] == [8, 0.0, 0.0, 1, 7]
        pace.division.change(10, (12, 4))
        for _ in range(9):
            step(pace, job, clock)
        pace.lose()  # a larger share, of which nine tenths are more than did not fit before
        step(pace, job, clock)
        assert job.asked[-1][1][4] == 7 and pace.samples == 8 + 8 * 8 + 12


class TestChanges:
    def test_shares_change_at_the_step_that_all_ranks_agree_on(self, clock, lines):
        for rank in (0, 1):
            job = Job(rank=rank, size=2)
            pace, _ = pace_of(job, NewShares(2, (12, 4), "jetson1 is slower"))
            shares = []
            for _ in range(8):
                shares.append(pace.share(pace.step))
                step(pace, job, clock)
            assert shares == [8] * 5 + [(12, 4)[rank]] * 3, "the third step decides, the sixth is the first"
            assert len(job.asked) == 2, "between the decision and the change nothing is measured"
        assert lines() == ["jetson1 is slower"], "rank 0 says it"

    def test_for_some_frameworks_only_the_next_epoch_may_differ(self, clock):
        job = Job(size=2)
        pace, _ = pace_of(job, NewShares(2, (12, 4), "now"), steps=5)
        pace.by_epoch = True
        for _ in range(5):
            step(pace, job, clock)
        assert pace.division.shares(0, 4) == (8, 8) and pace.division.shares(1, 0) == (12, 4)


class TestSteps:
    @pytest.mark.parametrize(
        "rank, size, total, warned", [(0, 2, 8, True), (1, 2, 8, False), (0, 1, 4, False), (0, 2, 16, False)]
    )
    def test_few_samples_for_batch_normalization_are_pointed_out_once(
        self, rank, size, total, warned, clock, lines
    ):
        job = Job(rank=rank, size=size)
        job.batch_norm = True
        pace = Pace(SampleDivision(100 * total, total, size=size), job)
        pace.begin(0, 0)
        for _ in range(3):
            step(pace, job, clock)
        assert len(lines()) == warned and all("only 4 samples per step" in line for line in lines())


class TestCursors:
    @pytest.mark.parametrize("op, passes", [(Sum, 1), (Average, 2)])
    def test_weights_are_those_of_one_average(self, op, passes):
        batches = Balanced(32, 8, context=Job())
        with pytest.raises(ConfigError, match="op=Average and backward_passes_per_step=1"):
            weight_of_steps(batches, op, passes)

    def test_the_first_optimizer_counts_the_steps(self):
        batches = Balanced(20, 8, context=Job())
        first, second = weight_of_steps(batches, Average), weight_of_steps(batches, Average)
        iterator = iter(batches)
        weights = []
        for _ in iterator:
            weights.append((first.now(), second.now(), batches.weight))
            second.reduced()
            assert batches.pace.step == len(weights) - 1
            first.reduced()
            assert batches.pace.step == len(weights)
        assert weights == [(8.0, 8.0, 8), (8.0, 8.0, 8), (4.0, 4.0, 4)]
        assert first.samples == second.samples == 20
        with pytest.raises(ConfigError, match="Step 4 of an epoch of 3"):
            first.now()


class TestAdvice:
    def measured(self, job, clock, monkeypatch):
        """Steps until all ranks have been measured, and the advice is there."""
        monkeypatch.setattr(module, "measured_rates", lambda s: RATES)
        pace = Pace(SampleDivision(TOTAL * 500, TOTAL, size=job.size), job)
        pace.begin(0, 0)
        while not pace.ended and pace.step < 400:
            step(pace, job, clock, 0.01 + 0.001 * pace.share(pace.step), 0.002)
        return pace

    @pytest.mark.parametrize(
        "hosts, named", [(("desk", "jetson1"), "desk, jetson1"), (("desk", "desk"), "desk:0, desk:1")]
    )
    def test_machines_are_recommended_and_the_program_ends(self, hosts, named, clock, monkeypatch, lines):
        job = Job(size=2, advise=True, hosts=hosts)
        with pytest.raises(SystemExit) as ended:
            self.measured(job, clock, monkeypatch)
        assert ended.value.code == 0 and job.advised
        assert any(named in line for line in lines()), lines()
        assert job.asked[-1] == ("ringcomm.balance.codecs", [1e-9, 2e-9] * len(CHOSEN_CODECS))

    @pytest.mark.parametrize("ahead", [0, 1, 8])
    def test_it_takes_64_steps_and_two_for_each_batch_that_a_loader_takes_ahead(
        self, ahead, clock, monkeypatch
    ):
        """As docs/unequal.md and the line without advice say."""
        monkeypatch.setattr(module, "measured_rates", lambda s: RATES)
        job = Job(size=2, advise=True)
        pace = Pace(SampleDivision(TOTAL * 500, TOTAL, size=2), job)
        pace.begin(0, 0)
        with pytest.raises(SystemExit):
            while pace.step < 400:
                pace.take(0, pace.step + ahead)
                step(pace, job, clock)
        assert pace.step == 64 + 2 * ahead
