from __future__ import annotations

from ringrun.diagnosis.first_failure import Complaint, Exit, FirstFailure, signal_name


def failure(*events: object) -> FirstFailure:
    found = FirstFailure()
    for event in events:
        if isinstance(event, Exit):
            found.exited(event)
        elif isinstance(event, Complaint):
            found.complained(event)
        elif isinstance(event, int):
            found.host_lost(event, f"host {event} vanished")
    return found


def test_nothing_failed() -> None:
    found = failure(Exit(0, 0, None), Exit(1, 0, None))
    assert not found.failed and found.cause() is None and found.exit_code() == 0


def test_without_complaints_the_first_to_fail_counts() -> None:
    found = failure(Exit(2, 0, None), Exit(1, 3, None), Exit(0, 4, None))
    cause = found.cause()
    assert cause is not None and (cause.rank, cause.how, found.exit_code()) == (1, "exit code 3", 3)


def test_a_signal_counts_as_in_a_shell() -> None:
    found = failure(Exit(1, None, 9))
    cause = found.cause()
    assert cause is not None and (cause.how, found.exit_code()) == ("killed by SIGKILL", 137)


def test_ranks_that_ringrun_ended_did_not_fail() -> None:
    assert failure(Exit(0, None, 15, sent=15)).cause() is None
    cause = failure(Exit(0, None, 15, sent=15), Exit(1, 3, None)).cause()
    assert cause is not None and cause.rank == 1


def test_the_culprit_counts_even_if_its_end_arrives_last() -> None:
    found = failure(
        Exit(0, 1, None), Complaint(None, 1, "rank 1 was lost"), Exit(2, 1, None), Exit(1, None, 11)
    )
    cause = found.cause()
    assert cause is not None
    assert (cause.rank, cause.how, cause.detail) == (1, "killed by SIGSEGV", "rank 1 was lost")
    assert found.secondary() == {0, 2}
    assert found.exit_code() == 139


def test_without_complaints_ranks_are_believed_about_their_own_end() -> None:
    found = failure(Exit(0, 1, None), Exit(1, 3, None), Exit(2, 1, None))
    found.explained([Complaint(0, 1, "it was lost"), Complaint(2, 1, "it was lost")])
    cause = found.cause()
    assert cause is not None and (cause.rank, cause.how, found.exit_code()) == (1, "exit code 3", 3)
    assert found.secondary() == {0, 2}
    left = failure(Exit(0, 1, None), Exit(1, 0, None))
    left.explained([Complaint(0, 1, "rank 1 has finished")])
    cause = left.cause()
    assert cause is not None and (cause.rank, left.exit_code()) == (1, 255)
    assert cause.how == "exit code 0, while others still needed it" and cause.detail == "rank 1 has finished"
    each_other = failure(Exit(1, 1, None), Exit(0, 1, None))
    each_other.explained([Complaint(0, 1, ""), Complaint(1, 0, "")])
    cause = each_other.cause()
    assert cause is not None and cause.rank == 1


def test_what_ranks_say_of_their_end_is_no_failure_and_less_than_a_complaint() -> None:
    found = failure(Exit(0, 0, None))
    found.explained([Complaint(1, 0, "")])
    assert not found.failed
    found = failure(Complaint(None, 2, "rank 2 was lost"), Exit(2, 1, None), Exit(0, 1, None))
    found.explained([Complaint(2, 0, "")])
    cause = found.cause()
    assert cause is not None and cause.rank == 2


def test_complaints_of_single_ranks_form_a_chain() -> None:
    found = failure(
        Complaint(0, 1, "0 lost 1"),
        Complaint(1, 2, "1 lost 2"),
        Exit(0, 1, None),
        Exit(1, 1, None),
        Exit(2, 7, None),
    )
    cause = found.cause()
    assert cause is not None and (cause.rank, cause.detail, found.exit_code()) == (2, "1 lost 2", 7)


def test_a_rank_that_left_early_is_the_cause_and_has_no_code() -> None:
    found = failure(Exit(1, 0, None), Complaint(None, 1, "rank 1 has finished"), Exit(0, 5, None))
    cause = found.cause()
    assert cause is not None
    assert (cause.rank, cause.how) == (1, "exit code 0, while others still needed it")
    assert found.exit_code() == 255


def test_a_frozen_rank_is_the_cause_although_we_ended_it() -> None:
    found = failure(Complaint(None, 1, "rank 1 is silent"), Exit(0, 1, None), Exit(1, None, 9, sent=9))
    cause = found.cause()
    assert cause is not None and "ended by ringrun with SIGKILL" in cause.how
    assert found.exit_code() == 255


def test_no_rank_exited_badly() -> None:
    found = failure(Complaint(None, 1, "rank 1 never came"), Exit(0, None, 15, sent=15))
    cause = found.cause()
    assert cause is not None and (cause.rank, cause.how, found.exit_code()) == (1, "still running", 255)


def test_a_complaint_without_a_culprit() -> None:
    found = failure(Complaint(None, None, "the calls differ"), Exit(1, 1, None), Exit(0, 1, None))
    cause = found.cause()
    assert cause is not None and cause.rank == 1
    assert failure(Complaint(0, None, "odd")).exit_code() == 255


def test_a_lost_host_comes_before_what_follows_from_it() -> None:
    found = failure(1, Complaint(None, 2, "rank 2 was lost with its host"), Exit(0, 1, None))
    cause = found.cause()
    assert cause is not None and (cause.rank, cause.host_index, cause.how) == (None, 1, "host 1 vanished")
    assert found.exit_code() == 255


def test_signal_names() -> None:
    assert signal_name(15) == "SIGTERM"
    assert signal_name(0) == "signal 0"
    assert signal_name(12345) == "signal 12345"


def test_a_broken_link_is_nobodys_fault() -> None:
    text = "rank 0 (a) and rank 1 (b) are running, but do not receive each other's messages"
    exits = [Exit(rank, 1, None) for rank in range(3)]
    found = failure(*exits, Complaint(None, None, text, link=True))
    cause = found.cause()
    assert cause is not None
    assert (cause.rank, cause.host_index, cause.how, found.exit_code()) == (None, None, text, 1)
    assert found.secondary() == {0, 1, 2}
