"""Where the processes of an elastic job run: hosts, slots, exclusions, and the decisions."""

from __future__ import annotations

from typing import List

import pytest

from ringrun.elastic.job import HostLimits, failed_text, timeout_text
from ringrun.elastic.membership import (
    NEVER,
    CloseHost,
    Cooldown,
    Exclude,
    Fail,
    Finish,
    OpenHost,
    ReportExit,
    StartProcess,
    StopProcess,
)
from ringrun.plan.hosts import HostSpec, parse_hosts
from tests.unit.ringrun.elastic.simulated import Simulated, kinds, texts

# ---- starting ---------------------------------------------------------------------------------


def test_all_slots_start_together_when_every_host_is_ready() -> None:
    job = Simulated("", HostLimits(2, 2), ready=False)
    opened = job.list("a:2,b:1")
    assert [(item.agent, item.spec.name, item.slots) for item in opened] == [(0, "a", 2), (1, "b", 1)]
    assert job.take(job.membership.host_ready(0, 1.0)) == []
    assert job.take(job.membership.host_ready(1, 2.0)) == [
        StartProcess(0, 0, 0), StartProcess(1, 0, 1), StartProcess(2, 1, 0),
    ]  # fmt: skip
    assert job.publish() == []


def test_without_enough_slots_the_start_fails_and_with_a_script_it_waits() -> None:
    job = Simulated("", HostLimits(3, 2), ready=False)
    job.list("a:2,b")
    assert kinds(job.take(job.membership.host_failed(1, "b: no route", 2.0)), Fail) == [Fail("")]
    limits = HostLimits(3, 2, script="./hosts", timeout_s=20.0)
    job = Simulated("a:2", limits)
    assert kinds(job.done, StartProcess, Fail) == []
    assert kinds(job.after(19.0), StartProcess, Fail) == []
    assert kinds(job.after(1.0), Fail) == [Fail(timeout_text(limits, 3))]
    job = Simulated("a:2", limits)
    job.after(19.0)
    assert [action.member for action in kinds(job.list("a:2,b"), StartProcess)] == [0, 1, 2]
    assert kinds(job.after(100.0), Fail) == []

# ---- losses -------------------------------------------------------------------------------------


def test_a_failed_slot_is_started_again_and_the_lines_say_what_happened() -> None:
    job = Simulated("pc:2,jetson2", HostLimits(2, 2))
    job.publish()
    job.now_s = 75.0
    assert job.exit(2) == [StartProcess(3, 1, 0)]
    assert texts(job.publish(lost=(2,), pause_s=0.72, join=False)) == [
        "rank 2 (jetson2) lost: killed by SIGKILL; going on with 2 ranks after 0.7 s"
    ]
    assert texts(job.publish()) == ["jetson2 joined again: 3 ranks"]
    assert job.membership.log.lines == [
        (75.0, "rank 2 (jetson2) lost: killed by SIGKILL; going on with 2 ranks after 0.7 s"),
        (75.0, "jetson2 joined again: 3 ranks"),
    ]


def test_pauses_grow_while_a_slot_fails_again_and_again_before_it_joins() -> None:
    job = Simulated("a:2", HostLimits(2, 1))
    job.publish()
    assert kinds(job.exit(1), StartProcess) == [StartProcess(2, 0, 1)]
    job.publish(lost=(1,), join=False)
    assert texts(job.exit(2, 1, "exit code 1", error="KeyError: 'x'")) == [
        "slot 1 of a is excluded for 1 s: exit code 1: KeyError: 'x'"
    ]
    assert kinds(job.after(0.9), StartProcess) == []
    assert kinds(job.after(0.2), StartProcess) == [StartProcess(3, 0, 1)]
    assert texts(job.exit(3)) == ["slot 1 of a is excluded for 2 s: killed by SIGKILL"]
    assert kinds(job.after(2.0), StartProcess) == [StartProcess(4, 0, 1)]
    assert "slot 1 of a is excluded for the rest of the job" in texts(job.exit(4))[0]
    assert [text for _, text in job.membership.log.lines if "slot 1 of a is excluded" in text] == [
        "slot 1 of a is excluded: exit code 1: KeyError: 'x'",
        "slot 1 of a is excluded: killed by SIGKILL",
    ]
    assert job.membership.log.excluded == ["slot 1 of a"] * 2
    assert kinds(job.after(1000.0), StartProcess) == []


def test_a_member_that_is_declared_lost_is_killed_and_started_again() -> None:
    job = Simulated("a:2", HostLimits(2, 1))
    job.publish()
    cause = "rank 1 (a) is silent: rank 0 (a) reports: no heartbeat for 5 s: its process is stopped"
    assert job.take(job.membership.lost(1, cause, 0.0)) == [StopProcess(1, is_lost=True)]
    assert job.take(job.membership.lost(1, cause, 0.0)) == []
    line = "rank 1 (a) lost: no heartbeat for 5 s; going on with 1 rank after 5.5 s"
    assert texts(job.publish(lost=(1,), pause_s=5.5)) == [line]
    actions = job.exit(1, ended=True)
    assert kinds(actions, StartProcess) == [StartProcess(2, 0, 1)]
    assert job.take(job.membership.lost(None, "the link", 0.0)) == []


def test_a_lost_host_is_opened_again_under_a_new_number() -> None:
    job = Simulated("a,b:2", HostLimits(3, 1))
    job.publish()
    actions = job.take(job.membership.host_failed(1, "b: connection lost", 0.0))
    assert kinds(actions, ReportExit) == [ReportExit(1), ReportExit(2)]
    assert "b: connection lost" in texts(actions)
    assert kinds(actions, OpenHost) == []
    actions = job.after(1.0)
    assert [(item.agent, item.spec.name) for item in kinds(actions, OpenHost)] == [(2, "b")]
    assert kinds(actions, StartProcess) == [StartProcess(3, 2, 0), StartProcess(4, 2, 1)]
    assert job.take(job.membership.host_failed(1, "again", 0.0)) == []


def test_the_job_fails_when_no_rank_is_left() -> None:
    limits = HostLimits(2, 1, horovod=True)
    job = Simulated("a:2", limits)
    job.publish()
    assert kinds(job.exit(0, 3), StartProcess) != []
    assert kinds(job.exit(1, 4), Fail) == [Fail(failed_text(limits, "a", 0, 3))]
    assert job.after(1000.0) == []

# ---- adding and removing ------------------------------------------------------------------------


def test_a_host_that_the_script_no_longer_names_leaves_at_the_next_step() -> None:
    job = Simulated("a:2,b:2", HostLimits(2, 2))
    job.publish()
    actions = job.list("a:2")
    assert [action.member for action in kinds(actions, Exclude)] == [2, 3]
    assert job.list("a:2") == []
    job.exit(2, 0, "exit code 0")
    assert job.exit(3, 0, "exit code 0") == [CloseHost(1)]
    assert not job.membership.finishing
    assert texts(job.publish(lost=(2,), left=(3,))) == ["b (2 ranks) left: 2 ranks"]
    actions = job.list("a:2,b:1")
    assert kinds(actions, StartProcess) == [StartProcess(4, 2, 0)]
    assert texts(job.publish()) == ["b joined again: 3 ranks"]


def test_a_removal_waits_for_other_hosts_if_too_few_ranks_would_be_left() -> None:
    job = Simulated("a:2", HostLimits(2, 2))
    job.publish()
    actions = job.list("b:2")
    assert kinds(actions, Exclude) == []
    actions = job.publish()
    assert [action.member for action in kinds(actions, Exclude)] == [0, 1]


def test_dropped_hosts_stay_away_until_they_are_added() -> None:
    job = Simulated("a,b", HostLimits(2, 1, script="./hosts"))
    job.publish()
    assert job.membership.drop_host("c", 0.0) is None
    assert [action.member for action in kinds(job.take(job.membership.drop_host("B", 0.0)), Exclude)] == [1]
    job.exit(1, 0)
    job.publish(left=(1,))
    assert job.list("a,b") == []
    actions = job.take(job.membership.add_host(parse_hosts("b")[0], 0.0))
    assert kinds(actions, StartProcess) == [StartProcess(2, 2, 0)]


def test_a_host_that_is_added_again_gets_the_interpreter_that_is_named_then() -> None:
    job = Simulated("a,b", HostLimits(1, 1))
    job.publish()
    job.publish(lost=(1,), join=False)
    for member in (1, 2, 3, 4):
        job.exit(member, 1, "exit code 1")
        job.after(5.0)
    actions = job.take(job.membership.add_host(HostSpec("b", python="/p"), job.now_s))
    assert kinds(actions, CloseHost) == [CloseHost(1)]
    assert kinds(actions, OpenHost) == [OpenHost(2, HostSpec("b", python="/p"), 1)]


def test_why_an_added_host_does_not_start_is_told_once_and_at_the_end() -> None:
    job = Simulated("a", HostLimits(1, 1))
    job.publish()
    job.ready = False
    job.take(job.membership.add_host(HostSpec("b"), 0.0))
    found = []
    for agent in (1, 2, 3):
        found += texts(job.take(job.membership.host_failed(agent, "b: there is no script", job.now_s)))
        assert len(kinds(job.after(40.0), OpenHost)) == 1
    assert found.count("b: there is no script") == 1
    assert [text for _, text in job.membership.log.lines] == ["b is excluded: there is no script"]

# ---- the end ------------------------------------------------------------------------------------


def test_the_first_rank_that_ends_well_ends_the_job_for_newcomers() -> None:
    job = Simulated("a:2", HostLimits(2, 1))
    job.publish()
    job.exit(1)
    job.publish(lost=(1,), join=False)
    assert [action.member for action in kinds(job.exit(0, 0), StopProcess)] == [2]
    assert job.exit(2, 143) == [Finish()]
    assert job.list("a:2,b:2") == []


def test_a_rank_that_fails_after_another_has_finished_is_a_failure() -> None:
    limits = HostLimits(2, 1)
    job = Simulated("a:2", limits)
    job.publish()
    assert job.exit(0, 0) == []
    assert kinds(job.exit(1, 9), Fail) == [Fail(failed_text(limits, "a", 1, 9))]


@pytest.mark.parametrize(
    ("cooldown", "was_member", "lengths"),
    [
        (Cooldown(1.0), True, [1, 1, 2]),
        (Cooldown(), True, [0, 1, 2, 4, 8, 16, 30, 30]),
        (Cooldown(quick_failures=3), True, [0, 1, 2, 4]),
        (Cooldown(quick_failures=3), False, [0, 1, NEVER]),
    ],
)
def test_exclusions_grow_and_a_slot_whose_processes_never_join_is_given_up(
    cooldown: Cooldown, was_member: bool, lengths: List[float]
) -> None:
    for _ in range(2):
        now_s, found = 100.0, []
        for _ in lengths:
            cooldown.fail(now_s, was_member)
            found.append(cooldown.until_s - now_s)
            now_s = cooldown.until_s
        assert found == lengths
        cooldown.forgive()
    assert not cooldown.excludes(0.0)
