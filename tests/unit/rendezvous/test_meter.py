"""How fast a wire is: simulated token buckets, read by a process that does not always run."""

from __future__ import annotations

import random

import pytest

from ringcomm.rendezvous.measuring import LIMIT_BYTES, OTHERS_S, Meter

MB, KB = 1e6, 1024
BUFFER_BYTES = 1024 * KB
LINE_RATE = 1250 * MB
FAST, SLOW = 125 * MB, 2.5 * MB  # 1 Gbit/s, 20 Mbit/s


def measured(rate, burst_bytes=0, late_s=lambda: 0.0002, limit_s=0.7):
    """The speed found of a token bucket with this sustained rate after a burst, by a receiver that looks from
    time to time, each time `late_s()` late.
    """
    meter, now_s, total, tokens = Meter(100.0), 100.0, 0, burst_bytes
    while not meter.done(now_s) and now_s < 100.0 + limit_s:
        waited_s = late_s()
        now_s += waited_s
        tokens += rate * waited_s
        passed = int(min(LINE_RATE * waited_s, tokens, BUFFER_BYTES, LIMIT_BYTES - total))
        total, tokens = total + passed, min(tokens - passed, burst_bytes)
        meter.arrived(now_s, total)
    return meter.rate(now_s)


def busy(seed):
    """A receiver on a loaded machine: usually quick, sometimes kept from running for up to 40 ms."""
    rng = random.Random(seed)
    return lambda: rng.choice([0.0002] * 6 + [0.004, rng.random() * 0.04])


@pytest.mark.parametrize("burst_bytes", [0, 256 * KB, 1024 * KB])
@pytest.mark.parametrize("seed", range(3))
def test_a_burst_does_not_make_a_wire_fast(burst_bytes, seed):
    print(f"seed {seed}")
    assert measured(SLOW, burst_bytes, busy(seed)) < 1.5 * SLOW
    assert measured(SLOW, burst_bytes, limit_s=2 * OTHERS_S) == pytest.approx(SLOW, rel=0.2)
    assert FAST / 6 < measured(FAST, late_s=busy(seed)) < 2 * FAST  # with 1 MiB of buffer


@pytest.mark.parametrize("rate", [1.25 * MB, 12.5 * MB, 125 * MB, 1250 * MB])
def test_what_a_wire_sustains_is_found(rate):
    assert measured(rate) == pytest.approx(rate, rel=0.2)


@pytest.mark.parametrize("arrived, rate", [(64 * KB, 64 * KB / 0.05), (8 * KB, 8 * KB / 0.05), (0, 0.0)])
def test_a_wire_on_which_a_packet_may_be_on_its_way_is_not_dead(arrived, rate):
    """Packets of 64 KB come every 26 ms at 20 Mbit/s."""
    meter = Meter(0.0)
    for at_s in (0.001, 0.05):
        meter.arrived(at_s, arrived)
    assert meter.rate(0.1) == pytest.approx(rate)
