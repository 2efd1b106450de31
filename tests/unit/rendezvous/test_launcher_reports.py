"""What the launcher reports about processes of a job of fixed size, in any order with their own events."""

from __future__ import annotations

from tests.unit.rendezvous.simulated import Job, seats_of


def join_slots(job, *ranks):
    """Ranks come without a plan, but with places, as in Spark; connection n is rank ``ranks[n]``."""
    for connection, rank in enumerate(ranks):
        job.join(connection, rank=rank, slot=(0, rank), pid=100 + rank)


def test_a_rank_that_fails_before_it_joins_drops_no_other():
    job = Job(3)
    join_slots(job, 2, 1)
    job.exit(0, "ValueError: x")
    job.pass_time(61.0)
    assert set(job.aborts()) == {0, 1}


def test_a_goodbye_after_the_launchers_report_says_more():
    job = Job(3, seats_of(3))
    job.run_on_one_host()
    job.exit(0, "exit code 0", ok=True)
    job.leave(0, "uncaught ValueError: x", ok=False)
    assert "uncaught ValueError: x" in job.root_cause()["text"]


def test_a_waiting_rank_whose_host_is_cut_off_gets_the_error_too():
    job = Job(3, seats_of(3), start_timeout_s=20.0)
    job.join_seat(0, 0)
    job.join_seat(1, 1)
    job.exit(1, "lost with its host")
    job.pass_time(20.0)
    assert set(job.aborts()) == {0, 1}


def test_an_exit_that_was_reported_before_the_rank_joined_is_its_cause():
    job = Job(3, seats_of(3))
    job.exit(1, "killed by SIGSEGV")
    for rank in (1, 0, 2):
        job.join_seat(rank, rank)
    job.hang_up(1)
    assert "rank 1 was lost: killed by SIGSEGV" in job.root_cause()["text"].replace(" (host0)", "")
