"""The real executor under every order of events: right numbers, the same bits, never a hang."""

from __future__ import annotations

import numpy as np
import pytest

from ringcomm.collective.reduce import Kernel
from ringcomm.ops import Min, Sum
from ringcomm.testing.faulty import Cut, Faults
from ringcomm.transport.base import LinkClosed
from ringcomm.wire.frames import HEADER_BYTES
from tests.sim.cases import grid
from tests.support.reference import hard_bits
from tests.support.simulation import simulate
from tests.unit.schedule.building import make as make_schedule
from tests.unit.schedule.building import names

SEGMENT_BYTES = 32


def run(case, seed, **options):
    options.setdefault("segment_bytes", SEGMENT_BYTES)
    errors = simulate(
        case.schedules, case.data, seed=seed, kernel=case.kernel(), sources=case.sources, **options
    )
    assert errors == [None] * len(errors), f"seed {seed}"
    for rank in range(len(case.schedules)):
        case.check(rank)


def counts(size, item_bytes):
    """Nothing, less than one per rank, about one per rank, about a segment per rank, and an odd one."""
    segment = SEGMENT_BYTES // item_bytes
    return sorted({0, 1, size - 1, size, size + 1, segment * size - 1, segment * size + 1, 53})


@pytest.mark.parametrize("size", range(1, 10))
def test_right_numbers_at_every_size_and_count(make_case, size):
    for count in counts(size, 8):
        run(make_case(size, count, np.float64), seed=count, capacity_bytes=48)


@pytest.mark.parametrize("size", [2, 3, 5, 8])
def test_right_numbers_on_a_bad_network(make_case, size):
    for seed in range(4):
        count = [size + 1, 29, 8 * size, 3][seed]
        dtype = [np.int16, np.float32, np.complex128, np.uint8][seed]
        faults = Faults(seed=seed, delay=0.1, most_turns=20)
        run(make_case(size, count, dtype), seed, faults=faults, capacity_bytes=100)


@pytest.mark.parametrize("size", [2, 3, 4, 7])
def test_links_that_hold_a_single_byte(make_case, size):
    for seed in range(2):
        run(make_case(size, 5 * size + seed, np.int32), seed, capacity_bytes=1)


@pytest.mark.parametrize("size", [2, 3, 5, 8])
def test_short_and_long_executions_understand_each_other(make_case, size):
    for seed in range(6):
        count = [size + 1, 29, 8 * size, 3, 0, 1][seed]
        dtype = [np.int16, np.float32, np.complex128, np.uint8, np.int8, np.int64][seed]
        segments = [[4096], [SEGMENT_BYTES, 4096], [4096, SEGMENT_BYTES]][seed % 3] * size
        faults = Faults(seed=seed, delay=0.1, most_turns=20)
        run(make_case(size, count, dtype), seed, segment_bytes=segments[:size], faults=faults,
            capacity_bytes=[1, 100, 1 << 20][seed // 2])  # fmt: skip


@pytest.mark.parametrize("name", names("allreduce", hosts=True))
@pytest.mark.parametrize("size", [2, 3, 6, 8])
def test_timing_changes_no_bit(name, size):
    count = 40
    random = np.random.default_rng(size)
    contributions = [(random.standard_normal(count) * 10.0 ** (rank % 5)).astype(np.float32)
                     for rank in range(size)]  # fmt: skip
    exact = np.sum(np.asarray(contributions, np.float64), axis=0)
    hosts = grid(size)
    schedules = [make_schedule("allreduce", name, rank, size, count, hosts=hosts) for rank in range(size)]
    seen = set()
    for seed in range(6):
        data = [array.copy() for array in contributions]
        faults = Faults(seed=seed, short=0.1 * seed, delay=0.05, most_turns=9) if seed else None
        simulate(
            schedules, data, seed=seed, kernel=lambda: Kernel(Sum, np.dtype(np.float32), size),
            segment_bytes=[16, 32, 4096][seed % 3], capacity_bytes=[1 << 20, 7, 64][seed % 3], faults=faults,
        )  # fmt: skip
        np.testing.assert_allclose(data[0], exact, rtol=1e-4, atol=1e-3)
        seen.update(array.tobytes() for array in data)
    assert len(seen) == 1


@pytest.mark.parametrize("name", names("allreduce", hosts=True))
@pytest.mark.parametrize(("op", "dtype"), [(Sum, "float32"), (Sum, "complex64"), (Min, "float64")])
def test_timing_and_alignment_change_no_bit_of_nans_and_zeros(name, op, dtype):
    """Which of two NaNs numpy keeps depends on how the array lies in memory and on where it is cut."""
    size, count, dtype = 4, 67, np.dtype(dtype)
    contributions = [hard_bits(dtype, count, (size, rank)) for rank in range(size)]
    hosts = grid(size)
    schedules = [make_schedule("allreduce", name, rank, size, count, hosts=hosts) for rank in range(size)]
    seen = set()
    for seed in range(8):
        data = [np.empty(count + seed + rank, dtype)[seed + rank :] for rank in range(size)]
        for array, contribution in zip(data, contributions):
            array[:] = contribution
        faults = Faults(seed=seed, short=0.1 * seed, delay=0.05, most_turns=9) if seed else None
        with np.errstate(all="ignore"):
            simulate(schedules, data, seed=seed, kernel=lambda: Kernel(op, dtype, size),
                     segment_bytes=16 << (seed % 4), faults=faults)  # fmt: skip
        seen.update(array.tobytes() for array in data)
    assert len(seen) == 1


# ---- a link breaks, at every byte of a collective: right numbers or `LinkClosed`, never neither --


def cut_run(case, cut, seed, segment_bytes=16):
    """Simulate with one cut; the errors, after a check of the numbers of ranks without one."""
    errors = simulate(
        case.schedules, case.data, seed=seed, kernel=case.kernel(), sources=case.sources,
        segment_bytes=segment_bytes, capacity_bytes=64,
        faults=Faults(seed=seed, would_block=0.1, short=0.3, cuts=(cut,)),
    )  # fmt: skip
    for rank, error in enumerate(errors):
        if error is None:
            case.check(rank)
        else:
            assert isinstance(error, LinkClosed), f"{cut}, seed {seed}: {error!r}"
    return errors


def bytes_between(case, sender, receiver):
    """How many bytes go from one rank to another, header included."""
    item = case.data[0].itemsize
    steps = [step for step in case.schedules[sender] if getattr(step, "peer", None) == receiver]
    return HEADER_BYTES + item * sum(step.stop - step.start for step in steps) if steps else 0


@pytest.mark.parametrize("segment_bytes", [16, 4096])
@pytest.mark.parametrize("sending", [True, False])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_cut_at_every_byte(make_case, size, sending, segment_bytes):
    for sender, receiver in [(0, 1), (size - 1, 0)]:
        total = bytes_between(make_case(size, 11, np.int32), sender, receiver)
        for offset in range(total):
            rank, peer = (sender, receiver) if sending else (receiver, sender)
            cut = Cut(rank, peer, sending, offset)
            errors = cut_run(make_case(size, 11, np.int32), cut, offset, segment_bytes)
            assert errors[receiver] is not None, f"{cut}: bytes are missing, but no rank noticed"


@pytest.mark.parametrize("size", [2, 5])
def test_a_cut_after_the_last_byte_harms_no_rank(make_case, size):
    case = make_case(size, 13, np.float64)
    errors = cut_run(case, Cut(0, 1, True, bytes_between(case, 0, 1) or 1), seed=7)
    assert errors == [None] * size
