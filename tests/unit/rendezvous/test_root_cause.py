"""One root cause out of reports that follow and contradict each other."""

from __future__ import annotations

import itertools

import pytest

from ringcomm.errors import another_call_text
from ringcomm.rendezvous.epoch import (
    RENDEZVOUS,
    SETTLE_S,
    VANISHED,
    RootCauseAnalysis,
    Suspicion,
)
from ringcomm.rendezvous.membership import Process
from ringcomm.rendezvous.routing import ranges_of
from tests.unit.rendezvous.simulated import join_message

DOING = "allreduce(8 x float32), call number 4"


@pytest.fixture
def members():
    """Five ranks, one per host, by rank."""
    found = {}
    for rank in range(5):
        found[rank] = Process(rank, rank, None, join_message(f"pc{rank}", host=f"host{rank}"))
        found[rank].rank = rank
    return found


def loss(reporter, peer, kind="lost", why="connection reset by peer", doing=DOING):
    return Suspicion(reporter, peer, doing, why, kind, 1.0)


def vanished(members, rank):
    members[rank].gone = VANISHED
    return loss(RENDEZVOUS, rank, "vanished", "", "")


def judge(members, suspicions, heartbeats=()):
    """The cause after a census, if there was one: (heard, silent) by the rank that answered."""
    analysis = RootCauseAnalysis()
    for item in suspicions:
        analysis.suspect(item)
    for rank, (heard, silent) in dict(heartbeats).items():
        analysis.answered(rank, ranges_of(heard), ranges_of(silent))
    return analysis.due(members, 10.0)


@pytest.mark.parametrize("length", [2, 3, 4, 5])
@pytest.mark.parametrize("gone", [True, False])
def test_chains_name_the_true_first_in_every_order_of_arrival(members, length, gone):
    """Rank 0 lost 1 because 1 lost 2 because 2 lost 3 …; only the last one lost no rank."""
    chain = [loss(rank, rank + 1) for rank in range(length - 1)]
    if gone:
        chain.append(vanished(members, length - 1))
    for order in itertools.permutations(chain):
        cause = judge(members, order)
        assert (cause.kind, cause.culprit.rank) == ("lost", length - 1)
        assert f"rank {length - 1} (host{length - 1}) was lost" in cause.text
        assert DOING in cause.text


def test_a_rank_that_vanished_is_at_fault_even_if_it_reported_another_before(members):
    reports = [loss(1, 2), loss(0, 2), vanished(members, 1)]
    for order in itertools.permutations(reports):
        assert judge(members, order).culprit.rank == 1


def test_the_call_is_that_in_which_the_culprit_was_lost(members):
    """Rank 0 gave up on rank 2, which gave up on rank 3; 1 and 2 saw that one die, in different calls."""
    reports = [
        loss(0, 2, doing="barrier(), call number 6"), loss(2, 3, doing="broadcast(), call number 4"),
        loss(1, 3, doing="allgather(), call number 5"), loss(4, 3, "closed", doing=""),
        vanished(members, 3),
    ]  # fmt: skip
    for order in itertools.permutations(reports):
        text = judge(members, order).text
        assert text == f"rank 3 (host3) was lost while others were in allgather(), call number 5: {VANISHED}."

# ---- mismatches ------------------------------------------------------------------------------


def test_mismatch_waits_a_moment_for_the_other_side(members):
    analysis = RootCauseAnalysis()
    analysis.mismatch(1, "rank 1 says", 5.0)
    analysis.mismatch(0, "rank 0 says", 5.2)
    assert analysis.due(members, 5.0 + SETTLE_S - 0.01) is None
    cause = analysis.due(members, 5.0 + SETTLE_S)
    assert (cause.kind, cause.culprit) == ("mismatch", None)
    assert cause.text.index("rank 0 says") < cause.text.index("rank 1 says")


def test_ranks_with_one_call_share_a_line_and_a_difference_is_told_once(members):
    analysis = RootCauseAnalysis()
    analysis.mismatch(0, another_call_text(0, "allreduce(3)", 1, "sizes (3 here, 4 there)"), 5.0)
    analysis.mismatch(1, another_call_text(1, "allreduce(4)", 0, "sizes (4 here, 3 there)"), 5.0)
    analysis.mismatch(2, another_call_text(2, "allreduce(3)", 1, "sizes (3 here, 4 there)"), 5.1)
    assert analysis.due(members, 6.0).text.splitlines()[1:] == [
        "ranks 0, 2: allreduce(3); rank 1 makes another call: sizes (3 here, 4 there).",
        "rank 1: allreduce(4).",
    ]
    analysis.mismatch(1, another_call_text(1, "allreduce(4)", 0, "kinds (a here, barrier there)"), 5.0)
    assert "barrier there" in analysis.due(members, 6.0).text, "another difference is told"

# ---- links -------------------------------------------------------------------------------------


SILENT = "no heartbeat for 30 s"


class TestLinks:
    def test_a_cut_between_two_names_both_and_no_other(self, members):
        heartbeats = {0: ([1, 2, 3, 4], []), 1: ([0, 3, 4], [2]), 2: ([0, 3, 4], [1]), 3: ([0, 1, 2, 4], [])}
        for reports in itertools.permutations([loss(1, 2, "silent", SILENT), loss(2, 1, "silent", SILENT)]):
            for count in (1, 2):
                cause = judge(members, reports[:count], heartbeats)
                assert (cause.kind, cause.culprit) == ("cut", None)
                assert [member.rank for member in cause.separated] == [1, 2]
                both = "rank 1 (host1) and rank 2 (host2)"
                assert f"{both} are running, but do not receive each other's messages" in cause.text

    @pytest.mark.parametrize("kind", ["lost", "closed", "still"])
    def test_a_link_that_breaks_between_two_that_live(self, members, kind):
        heartbeats = {rank: ([], []) for rank in range(5)}
        cause = judge(members, [loss(1, 2, kind)], heartbeats)
        assert (cause.kind, [member.rank for member in cause.separated]) == ("cut", [1, 2])

    def test_a_rank_that_does_not_answer_is_at_fault(self, members):
        heartbeats = {rank: ([item for item in (0, 1, 3, 4) if item != rank], [2]) for rank in (0, 1, 3, 4)}
        cause = judge(members, [loss(3, 2, "silent", SILENT)], heartbeats)
        assert (cause.kind, cause.culprit) == ("stalled", members[2])

    def test_a_rank_that_only_the_rendezvous_reaches_is_cut_off(self, members):
        heartbeats = {rank: ([], [2]) for rank in (0, 1, 3, 4)}
        heartbeats[2] = ([], [0, 1, 3, 4])
        cause = judge(members, [loss(3, 2, "silent", SILENT)], heartbeats)
        assert (cause.kind, cause.culprit) == ("stalled", members[2])
        assert "rank 2 (host2) is cut off from rank 0 (host0)" in cause.text

    def test_a_rank_that_has_left_may_close_its_links(self, members):
        members[1].left = "it called shutdown()"
        assert judge(members, [loss(0, 1, "closed")]) is None
