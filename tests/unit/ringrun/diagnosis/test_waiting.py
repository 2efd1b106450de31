"""Which ranks are behind, and which wait for which: flight records, and the sentences about them."""

from __future__ import annotations

from typing import Any, Dict, List, Optional, Sequence, Tuple

import pytest

from ringrun.diagnosis.waiting import (
    RankReport,
    ReportedChannel,
    ReportedOperation,
    diagnose,
    read_report,
    waits_for,
)

MEMBERS = (0, 1, 2)
SETS = {0: MEMBERS, 1: (0, 2)}


def call(
    number: int, state: str = "running", label: str = "allreduce `conv3.grad`", **more: Any
) -> ReportedOperation:
    facts: Dict[str, Any] = {
        "key": (0, "", 0), "what": label, "place": "train.py:88", "moved": None, "at": 5.0,
    }
    facts.update(more)
    return ReportedOperation(number=number, label=label, state=state, **facts)


def named(name: str, state: str = "submitted", number: int = 9, process_set: int = 0) -> ReportedOperation:
    return call(number, state, f"allreduce `{name}`", key=(process_set, name, 0))


def report(
    rank: int, calls: Sequence[ReportedOperation] = (), ops: Sequence[ReportedOperation] = (), **more: Any
) -> RankReport:
    channels = (
        ReportedChannel("calls", True, MEMBERS, {}, tuple(calls)),
        ReportedChannel("engine", False, MEMBERS, SETS, tuple(ops)),
    )
    facts: Dict[str, Any] = {"reason": "asked", "blocked": True, "channels": channels}
    facts.update(more)
    return RankReport(rank, f"host{rank}", **facts)


def busy(
    rank: int, calls: Sequence[ReportedOperation] = (), ops: Sequence[ReportedOperation] = (), **more: Any
) -> RankReport:
    return report(rank, calls, ops, blocked=False, main="load (loader.py:12)", **more)


def told(*reports: RankReport) -> List[str]:
    return diagnose({item.rank: item for item in reports})


def test_the_rank_that_is_behind() -> None:
    text = told(
        report(0, [call(812)]), report(1, [call(812)]),
        busy(2, [call(811, "done", "broadcast", place="eval.py:40")]),
    )
    assert text == [
        "Ranks 0, 1 wait in allreduce `conv3.grad` (op 812, train.py:88).",
        "Rank 2 (host2) is at op 811, broadcast (eval.py:40), which is done; its main thread is in "
        "load (loader.py:12).",
        "Ranks 0, 1 wait for rank 2.",
    ]


def test_a_victim_is_not_blamed() -> None:
    """Rank 1 is behind rank 0, but only because it waits for rank 2 by name."""
    reports = (
        report(0, [call(812)]), report(1, [call(811, "done")], [named("x")]), busy(2, [call(811, "done")]),
    )
    assert waits_for({item.rank: item for item in reports}) == {0: {1, 2}, 1: {2, 0}}
    assert told(*reports)[-1] == "Ranks 0, 1 wait for rank 2."


def failed(rank: int, number: int = 812) -> RankReport:
    return report(rank, [call(number, "failed")], reason="failure", error="PeerLostError: rank 2 was lost")


NOTHING = RankReport(2, "host2", end="killed by SIGKILL")
LAST = "; its last operation was allreduce `conv3.grad` (op 811, train.py:88)"
BEFORE = f"before the operation in which others wait{LAST}"


@pytest.mark.parametrize(
    ("third", "sentence"),
    [
        (NOTHING, "Rank 2 (host2) left nothing behind: killed by SIGKILL."),
        (RankReport(2, "host2"), "Rank 2 (host2) left nothing behind: no process could ask it."),
        (RankReport(2, "host2", end="lost with its host"), "Rank 2 (host2) was lost with its host."),
        (RankReport(2, "host2", end="exit code 0"),
         "Rank 2 (host2) ended with exit code 0 and left nothing behind."),
        (report(2, [call(811, "done")], reason="ended", left="its program ended", end="exit code 0"),
         f"Rank 2 (host2) has ended with exit code 0, {BEFORE}."),
        (report(2, [call(811, "done")], reason="ended", end="killed by SIGSEGV"),
         f"Rank 2 (host2) has ended: killed by SIGSEGV, {BEFORE}."),
        (report(2, [call(811, "done")], reason="ended", left="its program ended"),
         f"Rank 2 (host2) has come to the end of its program, {BEFORE}."),
        (busy(2, [call(811, "done")], left="it called shutdown()"),
         f"Rank 2 (host2) has left: it called shutdown(), {BEFORE}; its main thread is in load "
         "(loader.py:12)."),
        (RankReport(2, "host2", "silent", state="S", end="exit code 0"),
         "Rank 2 (host2) did not answer: a C call keeps the interpreter lock and sleeps. It has ended since "
         "then: exit code 0."),
        (RankReport(2, "host2", "silent", state="T"),
         "Rank 2 (host2) did not answer: its process is stopped (SIGSTOP, Ctrl-Z, or a debugger)."),
        (RankReport(2, "host2", "silent", state="R", main="spin (spin.py:9)"),
         "Rank 2 (host2) did not answer: a C call keeps the interpreter lock and computes; its main "
         "thread is in spin (spin.py:9)."),
        (busy(2, [call(811, "done")], reason="failure", error="uncaught ValueError: bad sample\nmore"),
         "Rank 2 (host2) ended with an uncaught ValueError: bad sample; its last operation was "
         "allreduce `conv3.grad` (op 811, train.py:88)."),
        (busy(2, end="exit code 1"),
         "Rank 2 (host2) has called nothing yet; its main thread is in load (loader.py:12). "
         "It has ended since then: exit code 1."),
        (busy(2, paused="saving checkpoint"),
         'Rank 2 (host2) has called nothing yet; it has called pause(): "saving checkpoint"; its '
         "main thread is in load (loader.py:12)."),
    ],
)  # fmt: skip
def test_why_a_rank_does_not_come(third: RankReport, sentence: str) -> None:
    text = told(failed(0), failed(1), third)
    assert text[0] == "Ranks 0, 1 wait in allreduce `conv3.grad` (op 812, train.py:88)."
    assert text[1:] == [sentence, "Ranks 0, 1 wait for rank 2."]


@pytest.mark.parametrize(
    ("ops", "waits"),
    [
        (([named("a")], [named("a")], []), {0: {2}, 1: {2}}),
        (([named("a")], [named("b")], []), {0: {1, 2}, 1: {0, 2}}),
        (([named("a", "running")], [named("a", "running")], []), {0: set(), 1: set()}),
        (([named("a", "done")], [named("a", "done")], []), {}),
        (([named("a", process_set=1)], [], []), {0: {2}}),
        (([named("b", "done"), named("a")], [named("a"), named("b")], [named("a")]), {0: set(), 1: set()}),
    ],
)
def test_operations_by_name(ops: Tuple[List[ReportedOperation], ...], waits: Dict[int, Any]) -> None:
    reports = {0: report(0, (), ops[0]), 1: report(1, (), ops[1]), 2: busy(2, (), ops[2])}
    assert waits_for(reports) == waits


def test_different_calls_with_the_same_number() -> None:
    one, other = call(7), call(7, label="barrier", place="eval.py:3")
    called = "barrier (op 7, eval.py:3)", "allreduce `conv3.grad` (op 7, train.py:88)"
    assert told(report(0, [one]), report(1, [other]), report(2, [one])) == [
        f"Rank 1 makes another call than ranks 0, 2: {called[0]} instead of {called[1]}."
    ]
    group = "in the group of ranks 0-2"
    assert told(report(0, [one]), report(1, [other])) == [
        f"Ranks 0, 1 do not make the same call {group}: rank 0: {called[1]}; rank 1: {called[0]}."
    ]


def messages(
    rank: int, counts: Dict[int, Tuple[int, int]], waited: Optional[ReportedOperation] = None, **more: Any
) -> RankReport:
    """A rank of a pipeline that waits for a message, or computes."""
    operations = (call(3, "done", "message 3 from rank 0", place="8 bytes, train.py:9", peer=0, at=4.0),)
    if waited is not None:
        operations = (*operations, waited)
    channels = (ReportedChannel("messages", False, MEMBERS, {}, operations, messages=counts),)
    return report(rank, channels=channels, blocked=waited is not None, **more)


def message(number: int, peer: Optional[int], way: str = "from", state: str = "running") -> ReportedOperation:
    label = f"message {number} {way} {'any rank' if peer is None else f'rank {peer}'}"
    return call(number, state, label, place="gradients, 64 bytes, train.py:9", peer=peer)


def test_the_message_that_a_stage_waits_for() -> None:
    text = told(
        messages(0, {1: (5, 4)}, message(5, 1)),
        messages(1, {0: (4, 5), 2: (5, 4)}, main="forward (train.py:12)"),
        messages(2, {1: (4, 6)}, message(6, 1)),
    )
    assert text == [
        "Rank 0 (host0) waits for message 5 from rank 1 (gradients, 64 bytes, train.py:9), which has sent 4.",
        "Rank 2 (host2) waits for message 6 from rank 1 (gradients, 64 bytes, train.py:9), which has sent 5.",
        "Rank 1 (host1) is at message 3 from rank 0 (8 bytes, train.py:9), which is done; its main thread is "
        "in forward (train.py:12).",
        "Ranks 0, 2 wait for rank 1.",
    ]


LIBRARY = "/home/me/env/lib/python3.11/site-packages"
WAITING = [
    ["/home/me/train.py", 88, "train"], [f"{LIBRARY}/ringcomm/api.py", 150, "allreduce"],
    [f"{LIBRARY}/ringcomm/collective/runner.py", 350, "_run"],
]


def record(**changes: Any) -> Dict[str, Any]:
    content: Dict[str, Any] = {
        "type": "record", "format": 1, "reason": "asked", "rank": 1, "size": 2, "host": "jetson1",
        "error": "", "threads": [{"name": "MainThread", "main": True, "frames": WAITING}],
        "lanes": [{
            "name": "calls", "ordered": True, "members": [0, 1],
            "operations": [{
                "op": 812, "kind": "allreduce", "name": "conv3.grad", "what": "allreduce(…)", "at": 1.0,
                "site": "/home/me/train.py:88", "state": "running", "moved": 0,
            }],
        }],
    }  # fmt: skip
    content.update(changes)
    return content


def frames(*frames: List[Any]) -> Dict[str, Any]:
    return record(threads=[{"name": "x", "main": True, "frames": list(frames)}])


@pytest.mark.parametrize(
    ("stack", "where", "blocked"),
    [
        ([["/home/me/loader.py", 12, "load"]], "load (loader.py:12)", False),
        ([["/home/me/loader.py", 12, "<module>"]], "loader.py:12", False),
        ([["/home/me/loader.py", 12, "load"], ["/usr/lib/python3.11/threading.py", 3, "wait"]],
         "load (loader.py:12)", False),
        ([["/home/me/train.py", 4, "main"], [f"{LIBRARY}/torch/utils/data/dataloader.py", 9, "_next"]],
         "main (train.py:4), inside torch/utils/data/dataloader.py", False),
        (WAITING, "train (train.py:88)", True),
        ([*WAITING, ["/home/me/callback.py", 3, "called"]], "called (callback.py:3)", False),
        ([[f"{LIBRARY}/ringcomm/api.py", 5, "_leave_at_exit"]], "_leave_at_exit (api.py:5)", True),
        ([["/p/ringcomm/job/exits.py", 5, "hook"], ["/p/ringcomm/engine/stacks.py", 82, "_temporary"]],
         "", False),
        ([], "", False),
    ],
)  # fmt: skip
def test_where_the_program_is(stack: List[Any], where: str, blocked: bool) -> None:
    report = read_report(frames(*stack))
    assert (report.main, report.blocked) == (where, blocked)


def test_what_faulthandler_wrote() -> None:
    text = (
        "Thread 0x00007f11 (most recent call first):\n"
        '  File "/usr/lib/python3.11/threading.py", line 3 in wait\n'
        "\n"
        "Current thread 0x00007f12 (most recent call first):\n"
        '  File "/home/me/spin.py", line 9 in spin\n'
        '  File "/home/me/train.py", line 4 in <module>\n'
    )
    for stacks, main in ((text, "spin (spin.py:9)"), ("", "")):
        assert read_report(record(threads=[], stacks=stacks, reason="silent", state="R")).main == main
