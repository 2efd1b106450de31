"""Steps found in a stream of reductions, on a clock of the test's own."""

from __future__ import annotations

import pytest

from ringcomm.scaling.recorder import (
    STEPS,
    WARM_UP,
    Event,
    Measured,
    StepRecorder,
    description,
    doubt,
    measured,
    missing,
    period,
    workload_of,
)


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [([1, 2] * 5, 2), ([1, 1, 2] * 4, 3), ([7] * 9, 1), ([9, 9, 9, 1, 2, 3] + [1, 2, 3] * 6, 3),
     ([1, 2, 1], 0), ([], 0), ([1, 1, 2, 1, 1, 2, 1, 1], 0), ([4, 4, 4, 8] * 6, 4)],
)  # fmt: skip
def test_periods(lengths, expected):
    assert period(lengths) == expected


class Program:
    """Requests reductions, and lets a clock run while it computes and waits."""

    def __init__(self, named=False):
        self.named = named
        self.now_s = self.waited_s = 0.0
        self.results = []
        self.recorder = StepRecorder(lambda: self.waited_s, self.results.append, lambda: self.now_s)

    def step(self, gradients, before_s, after_s, wait_s, blocking=False):
        self.now_s += before_s
        for nbytes, compute_s in gradients:
            self.now_s += compute_s
            self.recorder.requested(nbytes, blocking, self.name(nbytes))
            if blocking:
                self.wait(wait_s)
        if not blocking:
            self.wait(wait_s)
        self.now_s += after_s

    def name(self, nbytes):
        return f"layer {nbytes}" if self.named else ""

    def wait(self, wait_s):
        self.now_s += wait_s
        self.waited_s += wait_s


def test_a_step_with_overlap():
    program = Program()
    for number in range(WARM_UP + STEPS + 40):
        program.step([(100, 0.5), (200, 1.0), (300, 1.5)], 2.0, 0.25, 0.125 * (number + 1))
    (found,) = program.results
    assert found.gradients in ((100, 200, 300), (200, 300, 100), (300, 100, 200))
    assert found.compute_s == pytest.approx(5.25)  # whatever was waited
    assert found.step_s > found.compute_s
    if found.gradients == (100, 200, 300):
        assert found.ready_s == pytest.approx((2.75, 3.75, 5.25))


def test_reductions_that_are_waited_for_hide_nothing():
    program = Program()
    for _ in range(60):
        program.step([(100, 0.0), (50, 0.0)], 2.0, 0.0, 0.5, blocking=True)
    (found,) = program.results
    assert found.compute_s == pytest.approx(2.0)
    assert found.ready_s == pytest.approx((2.0, 2.0))
    assert workload_of(found, [2.0], 64).bucket_bytes == 0  # one after the other


def test_it_ends_after_the_same_count_whatever_the_times():
    counts = []
    for wait_s in (0.0, 3.0):
        program = Program()
        while not program.results:
            program.step([(8, 0.1)] * 3 + [(16, 0.1)], 1.0, 0.0, wait_s)
        counts.append(program.recorder.seen)
    assert counts[0] == counts[1] <= 4 * (WARM_UP + STEPS) + 4


def test_what_comes_before_the_steps_does_not_count():
    program = Program()
    program.step([(number, 0.1) for number in range(1, 40)], 0.0, 0.0, 0.0)
    for _ in range(200):
        program.step([(100, 1.0), (7, 1.0)], 1.0, 0.0, 0.0)
    assert sum(program.results[0].gradients) == 107


def test_reductions_that_never_repeat_end_nothing():
    program = Program()
    for number in range(500):
        program.recorder.requested(number * number, False, "")
    assert program.results == []
    assert "500 reductions" in missing(program.recorder.seen)
    assert "at least two ranks" in missing(0) and "after 1 reduction. It" in missing(1)


def test_the_slowest_rank_sets_the_pace():
    own = Measured(1.0, (10, 20), (0.5, 1.0), step_s=2.25)
    work = workload_of(own, [1.0, 1.0, 2.0], 64)
    assert (work.compute_s, work.usual_s, work.ready_s) == (2.0, 1.0, (1.0, 2.0))
    text = description(own, [1.0, 1.0, 2.0], ["a", "b", "c"], 2.5)
    assert "rank 2 on c needs 2 s" in text
    assert "33 % of them begin" in text
    assert "a step of 2.25 s (the model says 2.5 s)" in text
    assert "rank" not in description(own, [1.0, 1.0], ["a", "b"], 1.0)


OWN = Measured(1.0, (10, 20), (0.5, 1.0), step_s=2.0)


@pytest.mark.parametrize("expected_s", [2.0, 1.75, 2.25])
def test_a_model_that_is_right_enough_leaves_no_doubt(expected_s):
    assert doubt(OWN, [1.0, 5.0], [0.9, 0.9], ["a", "b"], expected_s) == ("", "")


@pytest.mark.parametrize(
    "spread, compute_s, waited, words",
    [
        (0.0, [1.0, 1.0, 1.0], [0.0, 0.0, 0.0], "What it leaves out is not known."),
        (0.0, [1.0, 1.0, 2.0], [0.0, 0.0, 0.0], "the ranks wait for rank 2 on c, which computes 2 s"),
        (0.0, [1.0, 1.0, 1.0], [0.0, 0.6, 0.0], "rank 1 on b waits for a processor for 60% of its time"),
        (0.5, [1.0, 1.0, 1.0], [0.0, 0.0, 0.0], "steps differ: the middle half by 50%"),
    ],
    ids=["unknown", "slow", "busy", "uneven"],
)
def test_a_model_that_is_wrong_says_why_if_that_is_known(spread, compute_s, waited, words):
    for expected_s, bound, percent in ((2.82, "at most", "41%"), (1.5, "at least", "25%")):
        text, found = doubt(OWN._replace(spread=spread), compute_s, waited, ["a", "b", "c"], expected_s)
        assert found == bound and f"the model is {percent} off for these ranks" in text and words in text
        assert text.endswith(f"steps take {bound} as long")


def test_steps_that_differ():
    events = []
    for step in range(STEPS + 1):
        events.append(Event(step + (0.5 if step % 2 else 0.0), 0.0, 8, False, "g"))
    assert measured(events, 1).spread == pytest.approx(1.0)
    assert measured([item._replace(at_s=float(at)) for at, item in enumerate(events)], 1).spread == 0.0


def test_few_steps_are_enough_if_reductions_have_names():
    program = Program(named=True)
    for _ in range(WARM_UP + STEPS + 1):
        assert program.results == []
        program.step([(100, 1.0)], 0.0, 0.0, 0.0)
    assert program.results[0].gradients == (100,)
