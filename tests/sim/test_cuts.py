"""A link breaks, at every byte of a collective: right numbers or `LinkClosed`, never neither."""

from __future__ import annotations

import numpy as np
import pytest

from ringcomm.testing.faulty import Cut, Faults
from ringcomm.transport.base import LinkClosed
from ringcomm.wire.frames import HEADER_BYTES
from tests.support.simulation import simulate


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
