"""From the events of a job's end to its cause: a table of events, and what is the cause by them."""

from __future__ import annotations

from typing import Any, Optional, Sequence, Set

import pytest

from ringrun.diagnosis.first_failure import Complaint, Exit, FirstFailure

LEFT = "exit code 0, while others still needed it"
FROZEN = "still running, ended by ringrun with SIGKILL"
LINK = "rank 0 (a) and rank 1 (b) are running, but do not receive each other's messages"


def failure(*events: Any) -> FirstFailure:
    """Return what is known after these events; a number is a lost host, a list the ranks' own accounts."""
    found = FirstFailure()
    for event in events:
        if isinstance(event, Exit):
            found.exited(event)
        elif isinstance(event, Complaint):
            found.complained(event)
        elif isinstance(event, list):
            found.explained(event)
        else:
            found.host_lost(event, f"host {event} vanished")
    return found


@pytest.mark.parametrize(
    ("events", "rank", "how", "code", "secondary"),
    [
        # Without reports the first to fail; a signal counts as in a shell; what ringrun ended has not failed.
        ([Exit(2, 0, None), Exit(1, 3, None), Exit(0, 4, None)], 1, "exit code 3", 3, set()),
        ([Exit(1, None, 9)], 1, "killed by SIGKILL", 137, set()),
        ([Exit(0, None, 15, sent=15), Exit(1, 3, None)], 1, "exit code 3", 3, set()),
        # The culprit in a report counts, even if its end arrives last, it has no code, or was ended.
        ([Exit(0, 1, None), Complaint(None, 1, "lost"), Exit(2, 1, None), Exit(1, None, 11)],
         1, "killed by SIGSEGV", 139, {0, 2}),
        ([Exit(1, 0, None), Complaint(None, 1, "has finished"), Exit(0, 5, None)], 1, LEFT, 255, {0}),
        ([Complaint(None, 1, "silent"), Exit(0, 1, None), Exit(1, None, 9, sent=9)], 1, FROZEN, 255, {0}),
        ([Complaint(None, 1, "never came"), Exit(0, None, 15, sent=15)], 1, "still running", 255, {0}),
        # Reports of single ranks form a chain.
        ([Complaint(0, 1, "0 lost 1"), Complaint(1, 2, "1 lost 2"), Exit(0, 1, None), Exit(1, 1, None),
          Exit(2, 7, None)], 2, "exit code 7", 7, {0, 1}),
        # Where there are none, ranks are believed about their own ends.
        ([Exit(0, 1, None), Exit(1, 3, None), Exit(2, 1, None), [Complaint(0, 1, ""), Complaint(2, 1, "")]],
         1, "exit code 3", 3, {0, 2}),
        ([Exit(0, 1, None), Exit(1, 0, None), [Complaint(0, 1, "has finished")]], 1, LEFT, 255, {0}),
        ([Exit(1, 1, None), Exit(0, 1, None), [Complaint(0, 1, ""), Complaint(1, 0, "")]],
         1, "exit code 1", 1, {0, 1}),
        ([Complaint(None, 2, "lost"), Exit(2, 1, None), Exit(0, 1, None), [Complaint(2, 0, "")]],
         2, "exit code 1", 1, {0}),
        # A report without a culprit; a lost host before what follows from it; a link is no rank's fault.
        ([Complaint(None, None, "the calls differ"), Exit(1, 1, None), Exit(0, 1, None)],
         1, "exit code 1", 1, set()),
        ([Complaint(0, None, "odd")], 0, "reported a failure", 255, set()),
        ([1, Complaint(None, 2, "lost with its host"), Exit(0, 1, None)], None, "host 1 vanished", 255, {0}),
        ([Exit(0, 1, None), Exit(1, 1, None), Complaint(None, None, LINK, link=True)], None, LINK, 1, {0, 1}),
    ],
)  # fmt: skip
def test_the_cause(
    events: Sequence[Any], rank: Optional[int], how: str, code: int, secondary: Set[int]
) -> None:
    found = failure(*events)
    cause = found.cause()
    assert cause is not None
    assert (cause.rank, cause.how, found.exit_code(), found.secondary()) == (rank, how, code, secondary)


@pytest.mark.parametrize(
    "events",
    [[Exit(0, 0, None), Exit(1, 0, None)], [Exit(0, None, 15, sent=15)],
     [Exit(0, 0, None), [Complaint(1, 0, "")]]],
)  # fmt: skip
def test_nothing_failed(events: Sequence[Any]) -> None:
    found = failure(*events)
    assert not found.failed and found.cause() is None and found.exit_code() == 0
