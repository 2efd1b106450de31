"""Elastic jobs on bad networks: right numbers, or the same error on all members of a view; no view twice.

`--schedules 10000` runs more seeds; `ElasticSim(seed).run()` repeats the one that a failure names.
"""

from __future__ import annotations

import pytest

from ringcomm.rendezvous import state
from ringcomm.rendezvous.membership import Process, View
from tests.sim.conftest import BLOCK
from tests.sim.elastic import EVENTS, ElasticSim


def test_right_numbers_or_the_same_error_on_all_members(first):
    for seed in range(first, first + BLOCK):
        ElasticSim(seed).run()


def test_everything_that_can_happen_does():
    planned = {what for seed in range(4 * BLOCK) for _, what in ElasticSim(seed).plan}
    assert planned == set(EVENTS)


MISTAKES = ("any rank 0", "an epoch twice", "keeps stopped members", "waits for ever")


@pytest.mark.parametrize("broken", MISTAKES)
def test_the_simulation_notices_mistakes(monkeypatch, broken):
    if broken == "any rank 0":
        monkeypatch.setattr(Process, "position", 1)
    elif broken == "an epoch twice":
        monkeypatch.setattr(state, "View", lambda epoch, members: View(epoch // 2, members))
    elif broken == "keeps stopped members":
        monkeypatch.setattr(state.Rendezvous, "_drop", lambda *_: [])
    else:
        monkeypatch.setattr(state.Rendezvous, "_look_for_silent", lambda *_: [])
    with pytest.raises(AssertionError, match="epoch"):
        for seed in range(16 * BLOCK):
            ElasticSim(seed).run()
