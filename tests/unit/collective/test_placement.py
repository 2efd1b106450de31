"""The agreement of ranks on where their arrays are: a vote that floods along any schedule."""

from __future__ import annotations

import random

import pytest

from ringcomm.collective.headers import Headers
from ringcomm.collective.placement import Placement
from ringcomm.schedule import direct, hierarchy, ring
from ringcomm.schedule.steps import Recv, Send, even_bounds
from ringcomm.wire.frames import VOTE, Header, unpack_header

HEADER = Header(0, 0, 1, 1, 11, -1, 0, 99)


def senders_of(schedules):
    """By rank, the ranks whose headers reach it."""
    return [{peer for step in made if isinstance(step, Recv) for peer in step.peers} for made in schedules]


def call(placements, senders, on_device):
    """One all-reduce of all ranks."""
    bits = [placement.vote(flag) for placement, flag in zip(placements, on_device)]
    for rank, placement in enumerate(placements):
        placement.record_votes(bits[rank] and all(bits[peer] for peer in senders[rank]))


def all_reduces(size):
    bounds = even_bounds(64, size)
    yield [direct.all_reduce(rank, size, bounds) for rank in range(size)]
    yield [ring.all_reduce(rank, size, bounds) for rank in range(size)]
    if size == 6:
        yield [hierarchy.all_reduce(rank, ((0, 1, 2), (3, 4, 5)), bounds) for rank in range(size)]


@pytest.mark.parametrize("size", [2, 3, 4, 6, 9])
def test_all_ranks_have_the_same_answer_after_every_call(size):
    """Arrays move to the host and back between calls, and calls are run by different algorithms."""
    generator = random.Random(size)
    ways = [senders_of(made) for made in all_reduces(size)]
    placements = [Placement(size) for _ in range(size)]
    first, answer = [], False
    for number in range(60 * size):
        flags = [generator.random() < 0.97 for _ in range(size)]
        if number % max(1, size - 1) == 0:
            first = flags
        call(placements, generator.choice(ways), flags)
        if (number + 1) % max(1, size - 1) == 0:
            answer = all(first)
        assert [placement.agreed for placement in placements] == [answer] * size


@pytest.mark.parametrize("mine, theirs, expected", [(1, 1, True), (1, 0, False), (0, 1, False)])
def test_the_bit_in_the_header_says_nothing_about_the_line(mine, theirs, expected):
    line = 5 << 32 | 7
    headers = Headers(HEADER, [Recv((1,), 0, 3), Send(1, 0, 0)], 0)
    headers.stamp(7, line | VOTE * mine)
    sent = unpack_header(headers.outgoing[1])
    assert sent.site == line | VOTE * mine
    headers.check(1, memoryview(HEADER._replace(sequence=7, sends=3, site=line | VOTE * theirs).pack()))
    assert headers.unanimous is expected and not headers.other_sites
    headers.stamp(8, line | VOTE)
    assert headers.unanimous
    headers.check(1, memoryview(HEADER._replace(sequence=8, sends=3, site=0).pack()))
    assert not headers.unanimous
