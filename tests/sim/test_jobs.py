"""Whole jobs on bad networks: right numbers everywhere, or everywhere the same error that names the culprit.

Another seed is another order of events, another network and another trouble. `--schedules 10000` runs more of
them; a seed that fails is part of the message, and `Simulated(seed).run()` repeats it.
"""

from __future__ import annotations

import pytest

from tests.sim.conftest import BLOCK
from tests.sim.jobs import FAULTS, HARMLESS, Plan, Simulated


def test_right_numbers_or_the_same_error(first):
    for seed in range(first, first + BLOCK):
        Simulated(seed).run()


def test_slow_is_never_dead(first):
    """Ranks that get little time, sleep for a while or are not reached for a while: no false alarm."""
    for seed in range(first, first + BLOCK):
        Simulated(seed, HARMLESS).run()


def test_everything_that_can_go_wrong_does():
    assert {Plan.of(seed).fault for seed in range(4 * BLOCK)} == set(FAULTS)
    assert {Plan.of(seed, HARMLESS).fault for seed in range(4 * BLOCK)} == set(HARMLESS)


@pytest.mark.parametrize("broken", ["no beats", "blames the first accused"])
def test_the_simulation_notices_mistakes(monkeypatch, broken):
    """... of the two kinds that matter: no rank raises an error, or the wrong rank is named."""
    if broken == "no beats":
        monkeypatch.setattr("ringcomm.engine.peer_channels.FailureDetector.due", lambda self, now_s: False)
    else:
        monkeypatch.setattr("ringcomm.rendezvous.epoch.RootCauseAnalysis._cut_from", lambda *_: set())
    with pytest.raises(AssertionError, match="seed"):
        for seed in range(4 * BLOCK):
            Simulated(seed).run()
