"""Ranks that are lost, leave, fail or come again; events of the rendezvous and their effects."""

from __future__ import annotations

import itertools

import pytest

from ringcomm.errors import StartupError
from ringcomm.rendezvous.control import error_from
from ringcomm.rendezvous.epoch import EVIDENCE_S, SETTLE_S, VANISHED
from ringcomm.rendezvous.membership import Send
from tests.unit.rendezvous.simulated import Job, seats_of

# ---- losing a rank ---------------------------------------------------------------------------


@pytest.mark.parametrize("seats", [(), (3,)])
def test_vanished_rank_is_named_to_all_after_a_moment(seats):
    job = Job(3, seats_of(*seats))
    job.run_on_one_host()
    job.hang_up(1)
    assert not job.aborts()
    job.pass_time(EVIDENCE_S)
    assert job.root_cause()["rank"] == 1
    assert VANISHED in job.root_cause()["text"]
    assert {0, 2} <= set(job.aborts())
    failed = job.notice("failed")
    assert (failed.culprit, failed.detail) == (1, {"kind": "lost", "leaving": False})


def test_how_its_process_ended_is_known_a_little_later():
    job = Job(3, seats_of(3))
    job.run_on_one_host()
    job.hang_up(1)
    job.lost(0, peer=1)
    job.pass_time(0.1)
    job.exit(1, "killed by SIGKILL")
    assert "rank 1 (host0) was lost while others were in allreduce" in job.root_cause()["text"]
    assert "killed by SIGKILL" in job.root_cause()["text"]
    assert VANISHED not in job.root_cause()["text"]


def test_a_rank_that_finishes_while_others_need_it():
    job = Job(3)
    job.run_on_one_host()
    job.leave(2, "its program ended")
    assert not job.aborts()
    job.lost(0, peer=2)
    job.pass_time(SETTLE_S)
    assert set(job.aborts()) >= {0, 1}
    assert "has finished (its program ended)" in job.root_cause()["text"]


def test_a_rank_that_leaves_with_an_error_ends_it_for_all_at_once():
    job = Job(3)
    job.run_on_one_host()
    job.leave(2, "uncaught ValueError: boom", ok=False)
    assert job.root_cause()["text"] == "rank 2 (host0) was lost: uncaught ValueError: boom."


class TestInterrupted:
    """A rank has left a collective half-way and says so; its program may go on."""

    DOING = "allreduce(8 x float32), call number 4, 96 bytes into it"

    def interrupted(self, *lost):
        job = Job(3)
        job.run_on_one_host()
        for peer in lost:
            job.lost(1, peer)
        job.say(1, {"type": "interrupted", "doing": self.DOING, "why": "KeyboardInterrupt"})
        assert not job.aborts()
        return job

    def test_it_is_named_even_if_others_lose_each_other_because_of_it(self):
        job = self.interrupted()
        job.lost(0, peer=2, kind="still")
        for connection in range(3):
            job.state.handle(connection, {"type": "pong", "heard": [], "silent": []}, job.now_s)
        job.pass_time(SETTLE_S)
        root_cause = job.root_cause()
        assert (root_cause["kind"], root_cause["rank"]) == ("lost", 1)
        assert root_cause["text"] == (
            f"rank 1 (host0) was interrupted (KeyboardInterrupt) in {self.DOING} and left it "
            "unfinished, so the job cannot go on."
        )

    def test_one_that_was_interrupted_because_it_had_lost_another_is_not_the_cause(self):
        job = self.interrupted(2)
        job.hang_up(2)
        job.pass_time(EVIDENCE_S)
        assert job.root_cause()["rank"] == 2


class TestComingBack:
    """After a failure, a rank calls init() again in the same process."""

    def test_a_job_of_ringrun_does_not_start_again(self):
        job = Job(2, seats_of(2))
        job.run_on_one_host()
        job.leave(1, "uncaught ValueError: boom", ok=False)
        job.join_seat(10, 0)
        (answer,) = job.told[10]
        assert answer["type"] == "refused"
        assert "init() cannot start it again" in answer["reason"] and "--restarts N" in answer["reason"]
        assert "ValueError: boom" in answer["reason"]

# ---- the next generation ---------------------------------------------------------------------


@pytest.mark.parametrize("seats", [(), (3,)])
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_fast_rejoiner_waits_until_the_others_have_left(seats, order):
    job = Job(3, seats_of(*seats))
    job.run_on_one_host()
    for count, rank in enumerate(order):
        job.leave(rank)
        job.hang_up(rank)
        if seats:
            job.join_seat(10 + rank, rank)
        else:
            job.join(10 + rank, rank=rank)
        assert bool(job.told[10 + rank]) == (count == 2), "told before the others had left, or never"
    assert {connection: rank for connection, rank in job.ranks().items() if connection >= 10} == {
        10: 0, 11: 1, 12: 2,
    }  # fmt: skip
    assert job.told[10][0]["generation"] == 1
    job.link_all([10, 11, 12])
    assert not job.aborts()


class TestSilence:
    """While links are built, and when only one rank is left, the rendezvous pings."""

    def joined(self):
        job = Job(3)
        for rank in range(3):
            job.join(rank, rank=rank, pid=100 + rank, dead_after=6.0)
        return job

    def answer(self, job, *connections):
        for connection in connections:
            job.take(job.state.handle(connection, {"type": "pong", "heard": [], "silent": []}, job.now_s))

    def test_the_one_that_does_not_answer_is_the_cause(self):
        job = self.joined()
        for _ in range(5):
            job.pass_time(1.0)
            self.answer(job, 0, 2)
            assert not job.aborts()
        job.pass_time(1.5)
        cause = job.aborts()[0]
        assert (cause["kind"], cause["rank"]) == ("stalled", 1)
        assert "has been silent for 6 s while links were being built" in cause["text"]

    def test_a_running_job_is_not_pinged_until_one_rank_is_left(self):
        job = self.joined()
        job.link_all(range(3))
        before = job.kinds(2).count("ping")
        job.pass_time(100.0)
        assert job.kinds(2).count("ping") <= before + 1 and not job.aborts()
        job.leave(0)
        job.leave(1)
        job.pass_time(5.5)
        assert not job.aborts()
        job.pass_time(1.0)
        assert "while others have left already" in job.aborts()[2]["text"]

# ---- a rank that lacks something ---------------------------------------------------------------


def test_all_ranks_get_the_text_of_one_that_lacks_something():
    """While they wait for others, connect, or run; also one that has not joined, and one that comes later."""
    text = "Rank 1 on host1 cannot connect to the others: no descriptors."
    for joined in (1, 2, 3):
        job = Job(3)
        for connection in range(joined):
            job.join(connection)
        job.say(7, {"type": "short", "text": text})
        assert all(job.told[connection][-1]["type"] == "abort" for connection in range(joined))
        assert all(job.told[connection][-1]["text"] == text for connection in range(joined))
        assert isinstance(error_from(job.told[0][-1]), StartupError)
        job.say(8, {"type": "short", "text": "another"})
        job.join(9)
        assert job.told[9][-1]["text"].endswith(text) and job.state.abort_message["text"] == text


def test_reports_of_all_ranks_have_each_rank_asked_once():
    size = 40
    job = Job(size, seats_of(size))
    for rank in range(size):
        job.join_seat(rank, rank)
    job.link_all(range(size))
    pings = 0
    for rank in range(1, size):
        pings += sum(isinstance(item, Send) for item in job.lost(rank, 0))
    assert pings == size
    pong = {"type": "pong", "heard": [], "silent": []}
    job.state.handle(5, pong, job.now_s)
    assert [item.connection for item in job.lost(1, 0) if isinstance(item, Send)] == [5]

# ---- what the launcher reports, in any order with the ranks' own events ------------------------


def test_a_goodbye_after_the_launchers_report_says_more():
    job = Job(3, seats_of(3))
    job.run_on_one_host()
    job.exit(0, "exit code 0", ok=True)
    job.leave(0, "uncaught ValueError: x", ok=False)
    assert "uncaught ValueError: x" in job.root_cause()["text"]


def test_an_exit_that_was_reported_before_the_rank_joined_is_its_cause():
    job = Job(3, seats_of(3))
    job.exit(1, "killed by SIGSEGV")
    for rank in (1, 0, 2):
        job.join_seat(rank, rank)
    job.hang_up(1)
    assert "rank 1 was lost: killed by SIGSEGV" in job.root_cause()["text"].replace(" (host0)", "")
