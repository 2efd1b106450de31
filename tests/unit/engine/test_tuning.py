"""Autotuning against made-up machines: it climbs, settles, and notices when the world changes."""

from __future__ import annotations

import math
import random

import pytest

from ringcomm.engine.coordinator import Tuning
from ringcomm.engine.tuning import CYCLES_S, FUSIONS_BYTES, Autotuner, Sampling


class Machine:
    """Its speed falls off with the distance from its best tuning, and is noisy."""

    def __init__(self, best: Tuning, seed: int = 0, noise: float = 0.01) -> None:
        self.best = best
        self.now_s = 0.0
        self._chance = random.Random(seed)
        self._noise = noise

    def speed(self, tuning: Tuning) -> float:
        off = abs(math.log2(tuning.fusion_bytes / self.best.fusion_bytes))
        off += 2 * abs(CYCLES_S.index(tuning.cycle_s) - CYCLES_S.index(self.best.cycle_s))
        return 1e9 * 0.85**off * self._chance.uniform(1 - self._noise, 1 + self._noise)

    def run(self, tuner: Autotuner, responses: int, nbytes: int = 1_000_000) -> int:
        """Return how often the tuning changed."""
        changes = 0
        for _ in range(responses):
            self.now_s += nbytes / self.speed(tuner.tuning)
            changes += tuner.ran(nbytes, self.now_s)
        return changes


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("best", [Tuning(1 << 20, 0.0), Tuning(32 << 20, 0.0025), Tuning(128 << 20, 0.01)])
def test_finds_the_best_and_stays(best, seed):
    log = []
    tuner = Autotuner(Tuning(), log=log.append)
    machine = Machine(best, seed)
    machine.run(tuner, 6 * 10 * 48)
    assert tuner.converged and tuner.tuning == best
    assert machine.run(tuner, 2000) == 0
    assert log[0] == "cycle_time_ms,tensor_fusion_threshold,score" and log[-1].startswith("# best: ")
    assert all(len(line.split(",")) == 3 for line in log[:-1])


def test_tunes_again_when_the_machine_has_changed():
    tuner = Autotuner(Tuning(), Sampling(steps=2, samples=3, warmup=1, patience=4))
    machine = Machine(Tuning(64 << 20, 0.001))
    machine.run(tuner, 2000)
    assert tuner.converged
    machine.best = Tuning(2 << 20, 0.0)
    machine.run(tuner, 4000)
    assert tuner.converged and tuner.tuning == machine.best


def test_the_result_stays_while_tuning_begins_again():
    tuner = Autotuner(Tuning(), Sampling(steps=2, samples=3, warmup=1, patience=4))
    machine = Machine(Tuning(64 << 20, 0.001))
    machine.run(tuner, 2000)
    found = tuner.result()
    machine.best = Tuning(2 << 20, 0.0)
    while tuner.converged:
        machine.run(tuner, 1)
    assert found.startswith("Autotuning has found --fusion-threshold 64M") and tuner.result() == found


def test_tunes_again_when_the_model_has_changed():
    tuner = Autotuner(Tuning(), Sampling(steps=2, samples=3, warmup=1, patience=4))
    machine = Machine(Tuning(64 << 20, 0.001))
    machine.run(tuner, 2000)
    assert tuner.converged
    assert machine.run(tuner, 20, nbytes=10_000_000) > 0
    assert not tuner.converged


def test_one_strange_sample_is_not_a_change():
    tuner = Autotuner(Tuning(), Sampling(steps=1, samples=1, warmup=0, patience=3))
    machine = Machine(Tuning(64 << 20, 0.001), noise=0.0)
    machine.run(tuner, 200)
    assert tuner.converged
    for _ in range(20):
        machine.now_s += 5.0
        assert not tuner.ran(1, machine.now_s)
        machine.run(tuner, 1)
    assert tuner.converged


def test_starts_at_the_nearest_point():
    assert Autotuner(Tuning(3_000_000, 0.0007)).tuning == Tuning(2 << 20, 0.0005)
    assert Autotuner(Tuning(1 << 40, 9.0)).tuning == Tuning(FUSIONS_BYTES[-1], CYCLES_S[-1])


def test_it_reports_what_it_has_found_and_how_much_is_missing():
    tuner = Autotuner(Tuning(64 << 20, 0.001), Sampling(steps=2, samples=3, warmup=1))
    machine = Machine(Tuning(64 << 20, 0.001))
    machine.run(tuner, 1 + 7)
    assert tuner.result() == (
        "Autotuning has found nothing: it needs 8 rounds of collectives for each setting that it tries, and "
        "there were 7."
    )
    machine.run(tuner, 3)
    assert "needs at least 30 more rounds of collectives (there were 10)" in tuner.result()
    assert "The best so far: --fusion-threshold 64M --cycle-time 1 (" in tuner.result()
    machine.run(tuner, 29)
    assert not tuner.converged
    machine.run(tuner, 1)
    assert tuner.converged
    assert tuner.result().startswith("Autotuning has found --fusion-threshold 64M --cycle-time 1 (")
