"""How fast a wire is: simulated token buckets, read by a process that does not always run."""

from __future__ import annotations

import random

import pytest

from ringcomm.rendezvous.measuring import (
    BURST_BYTES,
    LIMIT_BYTES,
    LIMIT_S,
    MAX_S,
    MIN_S,
    TAIL_S,
    Lap,
    Meter,
    is_over,
)

MB = 1e6
KB = 1024
BUFFER_BYTES = 1024 * KB


class Wire:
    """A token bucket with a sustained `rate` in bytes/s after a burst at `line_rate`, and a receiver that
    looks from time to time, each time `late_s()` late.
    """

    def __init__(self, rate, burst_bytes=0, line_rate=1250 * MB, late_s=lambda: 0.0002):
        self.rate, self.burst_bytes, self.line_rate, self.late_s = rate, burst_bytes, line_rate, late_s

    def passed(self, tokens, elapsed_s, left):
        """What arrives in this time (no more than the receiver's system holds), and the tokens left."""
        tokens += self.rate * elapsed_s
        passed = int(min(self.line_rate * elapsed_s, tokens, BUFFER_BYTES, left))
        return passed, min(tokens - passed, self.burst_bytes)


def race(*wires, start_s=100.0):
    """Both directions of some wires, measured at the same time: the laps, when it was over, and what came."""
    laps = [Lap(Meter(start_s), Meter(start_s)) for _ in wires]
    meters = [(meter, way) for lap, ways in zip(laps, wires) for meter, way in zip(lap, ways)]
    looks = sorted([start_s + way.late_s(), number] for number, (_, way) in enumerate(meters))
    state = [(0, way.burst_bytes, start_s) for _, way in meters]
    while True:
        now_s, number = looks.pop(0)
        meter, way = meters[number]
        total, tokens, before_s = state[number]
        passed, tokens = way.passed(tokens, now_s - before_s, LIMIT_BYTES - total)
        if passed or now_s - before_s > 0.01:
            state[number] = (total + passed, tokens, now_s)
        if passed:
            meter.arrived(now_s, total + passed)
        if is_over(laps, now_s - start_s, now_s):
            return laps, now_s, [total for total, _, _ in state]
        looks.append([now_s + way.late_s(), number])
        looks.sort()


def busy(seed):
    """A receiver on a loaded machine: usually quick, sometimes kept from running for up to 40 ms."""
    rng = random.Random(seed)
    return lambda: rng.choice([0.0002] * 6 + [0.004, rng.random() * 0.04])


FAST = 125 * MB  # 1 Gbit/s
SLOW = 2.5 * MB  # 20 Mbit/s


@pytest.mark.parametrize("burst_bytes", [0, 256 * KB, 1024 * KB])
@pytest.mark.parametrize("seed", range(6))
def test_a_burst_does_not_make_a_wire_fast(burst_bytes, seed):
    print(f"seed {seed}")
    slow = Wire(SLOW, burst_bytes, late_s=busy(seed))
    free = Wire(FAST, late_s=busy(seed + 1000))
    other = Wire(FAST, late_s=busy(seed + 2000))
    for ways in ((slow, free), (free, slow), (slow, slow)):
        laps, now_s, _ = race(ways, (free, other))
        assert laps[0].rate(now_s) < 1.5 * SLOW
        assert FAST / 6 < laps[1].rate(now_s) < 2 * FAST  # with 1 MiB of buffer and 40 ms without a look


@pytest.mark.parametrize("rate", [1.25 * MB, 2.5 * MB, 12.5 * MB, 125 * MB, 1250 * MB])
def test_what_a_wire_sustains_is_found(rate):
    laps, now_s, _ = race((Wire(rate), Wire(rate)))
    assert laps[0].rate(now_s) == pytest.approx(rate, rel=0.2)


@pytest.mark.parametrize("there, back", [(SLOW, FAST), (FAST, SLOW)])
def test_the_slower_direction_counts(there, back):
    laps, now_s, _ = race((Wire(there), Wire(back)))
    assert laps[0].rate(now_s) == pytest.approx(SLOW, rel=0.1)


@pytest.mark.parametrize("burst_bytes, most", [(64 * KB, 0.5), (256 * KB, 0.7), (1024 * KB, 1.5)])
def test_a_slow_wire_costs_little_beyond_its_burst(burst_bytes, most):
    slow, free = Wire(SLOW, burst_bytes), Wire(FAST)
    _, _, seen = race((slow, slow), (free, free))
    assert max(seen[:2]) < most * MB


def test_it_ends_in_time_whatever_the_wires_are():
    for wires in ([Wire(SLOW)], [Wire(0.0, line_rate=0.0)], [Wire(SLOW), Wire(2 * SLOW)]):
        _, now_s, _ = race(*[(wire, wire) for wire in wires])
        assert now_s - 100.0 <= MAX_S + 0.001


def test_a_measurement_that_has_told_nothing_goes_on():
    """Neither program ran: all wires look alike, and no other one says that they are slow."""
    stalled, free = Lap(Meter(0.0), Meter(0.0)), Lap(Meter(0.0), Meter(0.0))
    for meter in (*stalled, *free):
        meter.arrived(0.3, 100 * KB)
    assert not is_over([stalled, free], LIMIT_S, LIMIT_S)
    assert is_over([stalled, free], MAX_S, MAX_S)
    for meter in free:
        meter.arrived(0.31, LIMIT_BYTES)
    assert is_over([stalled, free], LIMIT_S, LIMIT_S)


def test_a_wire_through_which_nothing_comes():
    dead = Wire(0.0, line_rate=0.0)
    laps, now_s, _ = race((dead, Wire(FAST)), (Wire(FAST), Wire(FAST)))
    assert laps[0].rate(now_s) == 0.0
    assert now_s - 100.0 == pytest.approx(MIN_S, abs=0.001)


@pytest.mark.parametrize("arrived, rate", [(64 * KB, 64 * KB / 0.05), (8 * KB, 8 * KB / 0.05), (0, 0.0)])
def test_a_wire_on_which_a_packet_may_be_on_its_way_is_not_dead(arrived, rate):
    """Packets of 64 KB come every 26 ms at 20 Mbit/s."""
    meter = Meter(0.0)
    for at_s in (0.001, 0.05):
        meter.arrived(at_s, arrived)
    assert meter.rate(0.1) == pytest.approx(rate)


def test_no_wire_is_called_slow_while_a_burst_may_still_hide_it():
    """100 Mbit/s beside 20 Mbit/s with a burst: the slow one looks faster for a long time."""
    slow, free = Wire(SLOW, 1024 * KB), Wire(12.5 * MB)
    laps, now_s, _ = race((slow, slow), (free, free))
    assert now_s - 100.0 > BURST_BYTES / (12.5 * MB) + TAIL_S
    assert laps[0].rate(now_s) == pytest.approx(SLOW, rel=0.2)
    assert laps[1].rate(now_s) == pytest.approx(12.5 * MB, rel=0.2)


@pytest.mark.parametrize(
    "said, rate",
    [
        # a fast wire between programs that hardly run: the acknowledgements come quickly all the same
        ([(BURST_BYTES, 9_000, 900 * MB), (BURST_BYTES + 2_000_000, 19_000, 900 * MB)], 200 * MB),
        # what was acknowledged within the burst says nothing
        ([(500_000, 1_000, 900 * MB), (BURST_BYTES - 1, 2_000, 900 * MB)], SLOW),
        # an old rate, of the burst, with a wire that is active all the time
        ([(BURST_BYTES, 40_000, 900 * MB), (BURST_BYTES + 150_000, 100_000, 900 * MB)], SLOW),
        # a receiver that has no room makes the active time short, but not the rate high
        ([(BURST_BYTES, 40_000, SLOW), (BURST_BYTES + 150_000, 40_000, SLOW)], SLOW),
    ],
)
def test_what_the_senders_system_says(said, rate):
    meter = Meter(0.0)
    for at_s in (0.001, 0.05, 0.07, 0.09, 0.11):
        meter.arrived(at_s, int(BURST_BYTES + SLOW * at_s))
    for each in said:
        meter.told(*each)
    assert meter.rate(0.11) == pytest.approx(rate, rel=0.1)
