"""One verdict out of reports that follow and contradict each other."""

from __future__ import annotations

import itertools
import random

import pytest

from ringcomm.config import Slot
from ringcomm.rendezvous.membership import Member
from ringcomm.rendezvous.root_cause import EVIDENCE_S, NOBODY, SETTLE_S, VANISHED, Blame, Suspicion
from tests.unit.rendezvous.simulated import join_message

DOING = "allreduce(8 x float32), call number 4"


@pytest.fixture
def members():
    """Five ranks, one per host, by rank."""
    found = {}
    for rank in range(5):
        found[rank] = Member(rank, join_message(f"pc{rank}"), Slot(rank, 0), f"host{rank}")
        found[rank].rank = rank
    return found


def loss(reporter, peer, kind="lost", why="connection reset by peer", doing=DOING, due_s=1.0):
    return Suspicion(reporter, peer, doing, why, kind, due_s)


def vanished(members, rank, due_s=1.0):
    members[rank].gone = VANISHED
    return loss(NOBODY, rank, "vanished", "", "", due_s)


def judge(members, suspicions, now_s=10.0):
    blame = Blame()
    for item in suspicions:
        blame.suspect(item)
    return blame.due(members, now_s)


def test_nothing_known_nothing_said(members):
    assert Blame().due(members, 1e9) is None


def test_a_verdict_waits_for_its_time(members):
    blame = Blame()
    blame.suspect(loss(0, 1, due_s=5.0))
    assert blame.due(members, 4.9) is None
    assert blame.due(members, 5.0).culprit is members[1]


def test_the_first_suspicion_to_fall_due_triggers_the_judgement(members):
    blame = Blame()
    blame.suspect(loss(0, 1, due_s=5.0))
    blame.suspect(loss(1, 2, due_s=3.0))
    assert blame.due(members, 3.0).culprit is members[2]


@pytest.mark.parametrize("length", [2, 3, 4, 5])
@pytest.mark.parametrize("gone", [True, False])
def test_chains_name_the_true_first_in_every_order_of_arrival(members, length, gone):
    """Rank 0 lost 1 because 1 lost 2 because 2 lost 3 …; only the last one lost nobody."""
    chain = [loss(rank, rank + 1) for rank in range(length - 1)]
    if gone:
        chain.append(vanished(members, length - 1))
    for order in itertools.permutations(chain):
        verdict = judge(members, order)
        assert (verdict.kind, verdict.culprit.rank) == ("lost", length - 1)
        assert f"rank {length - 1} (host{length - 1}) was lost" in verdict.text
        assert DOING in verdict.text


@pytest.mark.parametrize("seed", range(30))
def test_everybody_reports_somebody(members, seed):
    """Rank 2 dies. Its neighbours lose it, and everybody else loses one who gave up before."""
    print(f"seed {seed}")
    rng = random.Random(seed)
    reports = [vanished(members, 2), loss(1, 2), loss(3, 2)]
    given_up = [1, 3]
    for rank in (0, 4):
        reports.append(loss(rank, rng.choice(given_up)))
        given_up.append(rank)
    rng.shuffle(reports)
    assert judge(members, reports).culprit.rank == 2


def test_who_vanished_is_to_blame_even_if_it_reported_another_before(members):
    reports = [loss(1, 2), loss(0, 2), vanished(members, 1)]
    for order in itertools.permutations(reports):
        assert judge(members, order).culprit.rank == 1


def test_accusing_each_other_ends(members):
    verdict = judge(members, [loss(0, 1), loss(1, 0)])
    assert verdict.culprit.rank in (0, 1)
    ring = [loss(rank, (rank + 1) % 5) for rank in range(5)]
    assert judge(members, ring).culprit in members.values()


def test_vanished_without_a_launcher(members):
    assert judge(members, [vanished(members, 3)]).text == f"rank 3 (host3) was lost: {VANISHED}."


def test_what_the_launcher_knows_is_part_of_the_verdict(members):
    blame = Blame()
    blame.exited(Slot(3, 0), "killed by SIGKILL", False)
    blame.suspect(loss(0, 3))
    text = blame.due(members, 10.0).text
    assert text == (
        f"rank 3 (host3) was lost while others were in {DOING}: rank 0 (host0) reports: "
        "connection reset by peer, killed by SIGKILL."
    )


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


def test_if_nobody_lost_the_culprit_in_a_call_it_is_that_of_those_who_suffered(members):
    reports = [vanished(members, 3), loss(4, 2, doing="barrier()"), loss(2, 3, "closed", doing="")]
    assert "while others were in barrier(): it vanished" in judge(members, reports).text


def test_how_it_ended_is_not_said_twice(members):
    members[3].gone = "killed by SIGKILL"
    blame = Blame()
    blame.exited(Slot(3, 0), "killed by SIGKILL", False)
    blame.suspect(loss(0, 3))
    assert blame.due(members, 10.0).text.count("SIGKILL") == 1


def test_exit_is_remembered_over_generations(members):
    blame = Blame()
    blame.exited(Slot(3, 0), "exit code 1", False)
    blame.suspect(loss(0, 3))
    blame.mismatch(0, "differs", 1.0)
    blame.forget_reports()
    assert blame.due(members, 1e9) is None
    assert blame.exit_of(Slot(3, 0)) == "exit code 1"
    assert blame.exit_of(Slot(0, 0)) is None
    assert blame.exit_of(None) is None


# ---- silence ---------------------------------------------------------------------------------


def test_stalled(members):
    verdict = judge(members, [loss(0, 3, "stalled", "not a byte for 5 s, 100 bytes into it")])
    assert (verdict.kind, verdict.culprit.rank) == ("stalled", 3)
    assert verdict.text == (
        f"rank 3 (host3) is silent while others were in {DOING}: "
        "rank 0 (host0) reports: not a byte for 5 s, 100 bytes into it."
    )


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_chain_of_stalls_names_the_one_who_waits_for_nobody(members, order):
    chain = [loss(rank, rank + 1, "stalled", "not a byte for 5 s") for rank in range(3)]
    verdict = judge(members, [chain[index] for index in order])
    assert (verdict.kind, verdict.culprit.rank) == ("stalled", 3)


def test_a_silent_rank_that_turns_out_dead_was_lost(members):
    verdict = judge(members, [loss(0, 3, "stalled", "not a byte for 5 s"), vanished(members, 3)])
    assert (verdict.kind, verdict.culprit.rank) == ("lost", 3)


# ---- those who finished ----------------------------------------------------------------------


def test_a_finished_rank_that_others_still_need(members):
    members[2].left = "it called shutdown()"
    verdict = judge(members, [loss(0, 2)])
    assert (verdict.kind, verdict.culprit.rank) == ("lost", 2)
    assert verdict.text == (
        f"rank 2 (host2) has finished (it called shutdown()) while others were in {DOING}. "
        "Every rank must make the same calls before it ends; one that has less data than others can call "
        "join()."
    )


def test_finished_but_its_process_failed_after_that(members):
    members[2].left, members[2].gone = "its program ended", "exit code 1"
    assert "was lost" in judge(members, [loss(0, 2)]).text
    assert "exit code 1" in judge(members, [loss(0, 2)]).text


# ---- mismatches ------------------------------------------------------------------------------


def test_mismatch_waits_a_moment_for_the_other_side(members):
    blame = Blame()
    blame.mismatch(1, "rank 1 says", 5.0)
    blame.mismatch(0, "rank 0 says", 5.2)
    assert blame.due(members, 5.0 + SETTLE_S - 0.01) is None
    verdict = blame.due(members, 5.0 + SETTLE_S)
    assert (verdict.kind, verdict.culprit) == ("mismatch", None)
    assert verdict.text.index("rank 0 says") < verdict.text.index("rank 1 says")


def test_mismatch_comes_before_the_losses_it_causes(members):
    blame = Blame()
    blame.suspect(loss(2, 1, due_s=5.3))
    blame.mismatch(0, "they differ", 5.0)
    assert blame.due(members, 5.3).kind == "mismatch"


def test_one_rank_reports_several_mismatches_the_last_counts(members):
    blame = Blame()
    blame.mismatch(0, "first", 5.0)
    blame.mismatch(0, "second", 5.1)
    text = blame.due(members, 6.0).text
    assert "second" in text and "first" not in text


def test_limits_are_humane():
    """Everybody learns of a death well within the 5 s that are promised."""
    assert SETTLE_S < EVIDENCE_S <= 2.0


# ---- links -------------------------------------------------------------------------------------


def verdict_of(members, suspicions, hears):
    """The verdict after a census: (heard, silent) of every rank that answered."""
    blame = Blame()
    for item in suspicions:
        blame.suspect(item)
    for rank, (heard, silent) in hears.items():
        blame.answered(rank, heard, silent)
    return blame.due(members, 10.0)


SILENT = "not a sign of life for 30 s"


class TestLinks:
    def test_a_cut_between_two_names_both_and_nobody_else(self, members):
        hears = {0: ([1, 2, 3, 4], []), 1: ([0, 3, 4], [2]), 2: ([0, 3, 4], [1]), 3: ([0, 1, 2, 4], [])}
        for reports in itertools.permutations([loss(1, 2, "silent", SILENT), loss(2, 1, "silent", SILENT)]):
            for count in (1, 2):
                verdict = verdict_of(members, reports[:count], hears)
                assert (verdict.kind, verdict.culprit) == ("cut", None)
                assert [member.rank for member in verdict.apart] == [1, 2]
                assert "rank 1 (host1) and rank 2 (host2) live, but do not hear each other" in verdict.text

    def test_on_one_host_no_cable_is_looked_for(self, members):
        for member in members.values():
            member.host = "desk"
        hears = {0: ([1, 2, 3, 4], []), 1: ([0, 3, 4], [2]), 2: ([0, 3, 4], [1]), 3: ([0, 1, 2, 4], [])}
        verdict = verdict_of(members, [loss(1, 2, "silent", SILENT)], hears)
        assert verdict.kind == "cut" and "cable" not in verdict.text
        assert "All of them are on desk, so that host has much more to do than it can" in verdict.text

    @pytest.mark.parametrize("kind", ["lost", "closed", "still"])
    def test_a_link_that_breaks_between_two_that_live(self, members, kind):
        hears = {rank: ([], []) for rank in range(5)}
        verdict = verdict_of(members, [loss(1, 2, kind)], hears)
        assert (verdict.kind, [member.rank for member in verdict.apart]) == ("cut", [1, 2])

    def test_who_does_not_answer_is_to_blame(self, members):
        hears = {rank: ([item for item in (0, 1, 3, 4) if item != rank], [2]) for rank in (0, 1, 3, 4)}
        verdict = verdict_of(members, [loss(3, 2, "silent", SILENT)], hears)
        assert (verdict.kind, verdict.culprit) == ("stalled", members[2])

    def test_who_is_heard_by_others_is_not_to_blame_although_the_rendezvous_does_not_hear_it(self, members):
        hears = {0: ([2, 3, 4], [1]), 2: ([0, 1, 3, 4], []), 3: ([0, 1, 2, 4], []), 4: ([0, 1, 2, 3], [])}
        verdict = verdict_of(members, [loss(0, 1, "silent", SILENT)], hears)
        assert (verdict.kind, [member.rank for member in verdict.apart]) == ("cut", [0, 1])

    def test_one_that_nobody_hears_but_the_rendezvous_is_cut_off(self, members):
        hears = {rank: ([], [2]) for rank in (0, 1, 3, 4)}
        hears[2] = ([], [0, 1, 3, 4])
        verdict = verdict_of(members, [loss(3, 2, "silent", SILENT)], hears)
        assert (verdict.kind, verdict.culprit) == ("stalled", members[2])
        assert "rank 2 (host2) is cut off from rank 0 (host0)" in verdict.text

    def test_a_host_with_several_ranks(self, members):
        members[3].host = "host2"
        hears = {rank: ([], [2, 3]) for rank in (0, 1, 4)}
        hears.update({rank: ([5 - rank], [0, 1, 4]) for rank in (2, 3)})
        verdict = verdict_of(members, [loss(0, 3, "silent", SILENT)], hears)
        assert (verdict.kind, verdict.culprit) == ("stalled", members[2])
        assert "rank 2 (host2) and rank 3 (host2) are cut off from" in verdict.text

    def test_between_two_hosts_with_several_ranks(self, members):
        members[1].host, members[3].host = "host0", "host2"
        hears = {rank: ([4], [2, 3]) for rank in (0, 1)}
        hears.update({rank: ([4], [0, 1]) for rank in (2, 3)})
        verdict = verdict_of(members, [loss(0, 3, "silent", SILENT)], hears)
        assert (verdict.kind, [member.rank for member in verdict.apart]) == ("cut", [0, 1, 2, 3])
        assert "between host0 and host2" in verdict.text

    def test_a_limit_without_a_byte_accuses_although_the_accused_answers(self, members):
        verdict = verdict_of(members, [loss(0, 1, "stalled", "not a byte for 9 s")], {1: ([], [])})
        assert (verdict.kind, verdict.culprit) == ("stalled", members[1])

    def test_late_is_late_although_it_answers(self, members):
        verdict = verdict_of(members, [loss(0, 1, "late", "it has not come")], {1: ([], [])})
        assert (verdict.kind, verdict.culprit) == ("stalled", members[1])
        assert "rank 1 (host1) is late" in verdict.text

    def test_who_has_left_may_hang_up(self, members):
        members[1].left = "it called shutdown()"
        assert verdict_of(members, [loss(0, 1, "closed")], {}) is None

    def test_answers_from_before_the_first_report_do_not_count(self, members):
        blame = Blame()
        blame.answered(2, [], [])
        blame.suspect(loss(0, 2, "silent", SILENT))
        assert blame.due(members, 10.0).culprit is members[2]
