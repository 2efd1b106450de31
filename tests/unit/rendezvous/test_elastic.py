"""Views of an elastic job, without sockets: which processes are in the next one, and when it is published."""

from __future__ import annotations

from collections import defaultdict

import pytest

from ringcomm.config import Slot
from ringcomm.errors import ProtocolError
from ringcomm.rendezvous.actions import Drop, Notice, Send, Timer
from ringcomm.rendezvous.elastic import ADDED, REMOVED, ElasticRendezvous
from ringcomm.rendezvous.link_table import ranges_of
from ringcomm.rendezvous.next_view import Limits
from ringcomm.rendezvous.server import HANDLERS
from ringcomm.rendezvous.state import Rendezvous
from ringcomm.wire.messages import encode, validate
from tests.unit.rendezvous.simulated import VERSION, join_message


class Job:
    """Feeds one :class:`ElasticRendezvous`. The process of connection ``n`` is member ``n`` at first."""

    def __init__(self, launched=False, **limits):
        self.state = ElasticRendezvous(Limits(**limits), VERSION, launched)
        self.launched = launched
        self.now_s = 1000.0
        self.sent = defaultdict(list)
        self.dropped = []
        self.notices = []
        self.timers = []

    def take(self, actions):
        for action in actions:
            if isinstance(action, Send):
                encode(validate(action.message))
                self.sent[action.connection].append(action.message)
            elif isinstance(action, Drop):
                self.dropped.append(action.connection)
            elif isinstance(action, Timer):
                self.timers.append(self.now_s + action.delay_s)
            else:
                assert isinstance(action, Notice)
                self.notices.append(action)

    def expect(self, *numbers, host="pc"):
        for number in numbers:
            self.take(self.state.expect(number, Slot(0, number), host))

    def join(self, connection, member=None, position=0, **more):
        number = connection if member is None else member
        if self.launched or more.pop("named", False):
            more["member"] = number
        message = join_message(pid=100 + number, position=position, dead_after=6.0, **more)
        self.take(self.state.joined(connection, message, self.now_s))

    def again(self, *connections, position=1):
        """These members ask for the next view."""
        for connection in connections:
            process = self.state._processes.at(connection)
            self.join(connection, process.number, position)

    def link(self, *connections):
        for connection in connections:
            self.relay(connection, {"type": "linked", "links": []})

    def relay(self, connection, message):
        handler = HANDLERS[message["type"]]
        self.take(self.state.relay(handler, connection, validate(message), self.now_s))

    def start(self, size):
        """The first view, of so many processes."""
        if self.launched:
            self.expect(*range(size))
        for connection in range(size):
            self.join(connection)
        self.link(*range(size))
        return self

    def hang_up(self, connection):
        self.take(self.state.disconnected(connection, self.now_s))

    def leave(self, connection, ok=True):
        message = {"type": "leaving", "reason": "its program ended", "ok": ok}
        self.take(self.state.leaving(connection, message, self.now_s))

    def exit(self, number, how="killed by SIGKILL", ok=False):
        self.take(self.state.process_exited(number, how, ok, self.now_s))

    def pass_time(self, delay_s, answering=()):
        """Let time pass; these connections answer pings."""
        until_s = self.now_s + delay_s
        while self.timers and min(self.timers) <= until_s:
            self.now_s = max(self.now_s, min(self.timers))
            self.timers.remove(min(self.timers))
            self.take(self.state.tick(self.now_s))
            for connection in answering:
                if any(item["type"] == "ping" for item in self.sent[connection]):
                    self.sent[connection] = [x for x in self.sent[connection] if x["type"] != "ping"]
                    pong = {"type": "pong", "heard": [], "silent": []}
                    self.take(self.state.answered(connection, pong, self.now_s))
        self.now_s = until_s

    def kinds(self, connection):
        return [item["type"] for item in self.sent[connection] if item["type"] not in ("ping", "waiting")]

    def last(self, connection):
        return [item for item in self.sent[connection] if item["type"] != "ping"][-1]

    def all(self, kind):
        return [item for item in self.notices if item.kind == kind]

    def members(self):
        return self.state.view.numbers


def test_the_first_view_waits_for_the_start_size():
    job = Job(min_size=1, start_size=3)
    job.join(0)
    job.join(1)
    assert job.state.view.epoch == -1
    job.join(2)
    assert job.members() == (0, 1, 2)
    job.link(0, 1, 2)
    (view,) = job.all("view")
    assert view.detail["epoch"] == 0 and view.detail["pause_s"] == 0.0
    assert [item["rank"] for item in view.detail["members"]] == [0, 1, 2]


def test_the_first_view_begins_with_fewer_after_the_start_timeout():
    job = Job(min_size=1, start_size=3, start_timeout_s=60.0)
    job.join(0)
    job.join(1)
    job.pass_time(59.0, answering=(0, 1))
    assert job.state.view.epoch == -1
    job.pass_time(2.0, answering=(0, 1))
    assert job.members() == (0, 1)


def test_the_first_view_waits_for_all_that_the_launcher_has_announced():
    job = Job(launched=True, min_size=1)
    job.expect(0, 1, 2)
    job.join(0)
    job.join(1)
    assert job.state.view.epoch == -1
    job.exit(2, "exit code 1")
    assert job.members() == (0, 1)


def test_only_announced_processes_may_join():
    job = Job(launched=True)
    job.join(7)
    assert job.last(7)["type"] == "refused" and "launcher" in job.last(7)["reason"]
    assert 7 in job.dropped


def test_survivors_of_a_failure_form_the_next_view():
    job = Job(launched=True, min_size=2).start(4)
    job.exit(1)
    (lost,) = job.all("lost")
    assert "rank 1" in lost.text and "SIGKILL" in lost.text
    assert lost.detail["member"] == 1 and lost.detail["epoch"] == 0
    assert all(job.last(item)["type"] == "abort" and job.last(item)["epoch"] == 0 for item in (0, 2, 3))
    job.now_s += 0.5
    job.again(0, 2)
    assert job.state.view.epoch == 0, "rank 3 is still missing"
    job.again(3)
    assert job.state.view.epoch == 1 and job.members() == (0, 2, 3)
    job.link(0, 2, 3)
    view = job.all("view")[-1]
    assert view.detail["lost"] == [1] and view.detail["pause_s"] == 0.5
    assert view.text == "going on with 3 ranks after 0.5 s"


def test_rank_0_is_a_survivor_with_the_newest_state():
    job = Job(launched=True).start(4)
    job.exit(3)
    job.again(0, position=5)
    job.again(1, 2, position=6)
    assert job.members() == (1, 0, 2)


def test_a_second_loss_before_all_have_asked():
    job = Job(launched=True).start(4)
    job.exit(1)
    job.again(0, 2)
    job.exit(3)
    assert job.members() == (0, 2)


def test_a_loss_while_links_are_built():
    job = Job(launched=True).start(3)
    job.exit(1)
    job.again(0, 2)
    assert job.members() == (0, 2) and job.state.view.epoch == 1
    job.exit(2)
    assert job.last(0)["type"] == "abort" and job.last(0)["epoch"] == 1
    job.again(0)
    assert job.members() == (0,) and job.state.view.epoch == 2


def test_a_new_process_joins_at_the_next_boundary():
    job = Job(launched=True).start(2)
    job.expect(2)
    job.join(2)
    assert job.last(0) == {"type": "updated", "change": ADDED} == job.last(1)
    assert job.state.view.epoch == 0
    job.again(0, 1)
    assert job.members() == (0, 1, 2) and job.state.view.epoch == 1
    assert job.last(2)["type"] == "link"


def test_above_the_largest_size_new_processes_wait_as_spares():
    job = Job(launched=True, max_size=2).start(2)
    job.expect(2)
    job.join(2)
    assert "updated" not in job.kinds(0)
    job.exit(0)
    job.again(1)
    assert job.members() == (1, 2)


def test_an_excluded_member_ends_quietly_at_the_next_boundary():
    job = Job(launched=True).start(3)
    job.take(job.state.exclude(1, "its host was removed", job.now_s))
    assert job.last(0) == {"type": "updated", "change": REMOVED}
    job.again(0, 1, 2)
    assert job.last(1) == {"type": "excluded", "reason": "its host was removed"}
    assert 1 in job.dropped
    assert job.members() == (0, 2)


def test_messages_of_an_old_epoch_are_ignored():
    job = Job(launched=True).start(3)
    job.exit(1)
    job.again(0)
    lost = {"type": "lost", "peer": 0, "doing": "", "why": "reset", "kind": "lost"}
    job.relay(0, lost)
    job.again(2)
    job.link(0, 2)
    job.pass_time(3.0, answering=(0, 2))
    assert len(job.all("lost")) == 1 and job.state.view.epoch == 1


def test_a_member_that_was_left_behind_is_refused():
    job = Job(launched=True, min_size=1).start(3)
    report = {"type": "lost", "peer": 1, "doing": "allreduce", "why": "no heartbeat", "kind": "silent"}
    job.relay(0, report)
    job.pass_time(2.0, answering=(0, 2))
    assert job.all("lost")[0].detail["member"] == 1 and 1 in job.dropped
    job.again(0, 2)
    assert job.members() == (0, 2)
    job.join(9, member=1)
    assert "the job has gone on without this process" in job.last(9)["reason"]


def test_another_process_cannot_take_a_members_number():
    job = Job(launched=True).start(2)
    message = join_message(pid=999, member=1)
    job.take(job.state.joined(8, message, job.now_s))
    assert job.last(8)["type"] == "refused" and "is process 101" in job.last(8)["reason"]
    assert job.members() == (0, 1) and not job.all("lost")


def test_asking_twice_is_an_error_of_the_protocol():
    job = Job(min_size=1, start_size=2)
    job.join(0)
    with pytest.raises(ProtocolError):
        job.join(0)


def test_below_the_least_size_the_job_waits_and_then_ends():
    job = Job(launched=True, min_size=2, elastic_timeout_s=30.0).start(2)
    job.exit(1)
    job.again(0)
    (waiting,) = job.all("waiting")
    assert waiting.detail == {"size": 1, "min_size": 2, "timeout_s": 30.0}
    job.pass_time(29.0, answering=(0,))
    assert not job.all("failed")
    job.pass_time(2.0, answering=(0,))
    (failed,) = job.all("failed")
    assert failed.detail["kind"] == "timeout" and "--elastic-timeout" in failed.text
    assert job.last(0)["type"] == "abort"


def test_after_one_has_finished_the_rest_does_not_wait():
    job = Job(launched=True, min_size=3).start(3)
    job.leave(0)
    job.exit(1)
    job.again(2)
    assert job.members() == (2,)


def test_the_job_ends_when_all_have_finished():
    job = Job(launched=True).start(2)
    job.expect(2)
    job.join(2)
    job.leave(0)
    job.leave(1)
    assert [item.kind for item in job.notices][-1] == "ended"
    assert job.last(2)["type"] == "excluded"
    job.join(3, member=3)
    assert job.last(3)["type"] == "excluded"


def test_without_a_survivor_the_state_is_lost():
    job = Job(launched=True).start(2)
    job.expect(2)
    job.join(2)
    job.exit(0)
    job.exit(1)
    (failed,) = job.all("failed")
    assert failed.detail["kind"] == "lost" and "rank 0 (pc): killed by SIGKILL" in failed.text
    assert job.last(2)["type"] == "abort"


def test_new_processes_alone_do_not_start_from_nothing():
    job = Job(launched=True).start(1)
    job.expect(1)
    job.join(1)
    job.again(0)
    assert job.members() == (0, 1)
    job.exit(0)
    job.again(1, position=0)
    assert job.all("failed")[0].text.startswith("No process that has a state is left")


def test_the_number_of_views_is_limited():
    job = Job(launched=True, reset_limit=1).start(3)
    job.exit(0)
    job.again(1, 2)
    job.link(1, 2)
    job.exit(1)
    job.again(2)
    (failed,) = job.all("failed")
    assert failed.detail["kind"] == "reset_limit" and failed.text.endswith("exceeded limit: 1")


def test_a_defect_of_the_program_ends_the_job():
    job = Job(launched=True).start(2)
    job.relay(0, {"type": "mismatch", "peer": 1, "text": "rank 0: allreduce(8)"})
    job.pass_time(1.0)
    (failed,) = job.all("failed")
    assert failed.detail["kind"] == "mismatch"
    job.join(0, 0)
    assert job.last(0)["kind"] == "mismatch"


def test_a_process_that_stops_while_it_waits_is_left_out():
    job = Job(launched=True, min_size=1).start(2)
    job.expect(2)
    job.join(2)
    job.pass_time(7.0, answering=(0, 1))
    assert 2 in job.dropped
    job.again(0, 1)
    assert job.members() == (0, 1)


def test_a_second_process_that_stops_does_not_hold_up_the_rest():
    job = Job(launched=True, min_size=1).start(3)
    job.exit(0)
    job.again(1)
    job.pass_time(7.0, answering=(1,))
    assert job.members() == (1,)


def test_a_member_that_stops_alone_is_noticed_by_the_rendezvous():
    job = Job(launched=True, min_size=1).start(1)
    job.pass_time(7.0)
    assert job.all("failed")[0].detail["kind"] == "lost"


def test_a_running_view_is_not_ended_by_silence_at_the_rendezvous():
    job = Job(launched=True, min_size=1).start(2)
    job.pass_time(30.0, answering=(0,))
    assert job.members() == (0, 1) and not job.dropped


def cut(job, first, second):
    job.relay(first, {"type": "lost", "peer": second, "doing": "", "why": "reset", "kind": "lost"})
    ranks = job.state.view.size
    for connection in (first, second):
        other = second if connection == first else first
        heard = [rank for rank in range(ranks) if rank not in (first, second)]
        pong = {"type": "pong", "heard": ranges_of(heard), "silent": ranges_of([other])}
        job.take(job.state.answered(connection, pong, job.now_s))
    job.pass_time(1.2, answering=())


def test_a_cut_that_comes_again_leaves_one_of_its_ends_out():
    job = Job(launched=True, min_size=1).start(3)
    cut(job, 1, 2)
    assert job.all("lost")[0].detail["kind"] == "cut" and not job.dropped
    job.again(0, 1, 2)
    job.link(0, 1, 2)
    assert job.members() == (0, 1, 2)
    cut(job, 1, 2)
    assert job.dropped == [2]
    job.again(0, 1)
    assert job.members() == (0, 1)


def test_a_new_process_without_a_link_is_left_out():
    job = Job(launched=True, min_size=1).start(2)
    job.expect(2)
    job.join(2)
    job.again(0, 1)
    assert job.members() == (0, 1, 2)
    job.take(job.state.relay(Rendezvous.unlinked, 0, {"peer": 2, "reason": "no answer"}, job.now_s))
    job.pass_time(1.5)
    assert job.dropped == [2], job.notices
    job.again(0, 1)
    assert job.members() == (0, 1) and job.state.view.epoch == 2


def test_the_launchers_report_after_the_end_of_the_connection_names_the_cause_at_once():
    job = Job(launched=True).start(3)
    job.hang_up(1)
    assert not job.all("lost")
    job.exit(1)
    (lost,) = job.all("lost")
    assert "killed by SIGKILL" in lost.text


def test_a_loss_while_two_others_are_still_connecting_costs_neither_of_them():
    job = Job(launched=True, min_size=1).start(3)
    job.again(0, 1, 2)
    job.take(job.state.relay(Rendezvous.unlinked, 0, {"peer": 1, "reason": "no answer yet"}, job.now_s))
    job.exit(2)
    assert not job.dropped
    job.again(0, 1)
    assert job.members() == (0, 1)


def test_a_process_with_another_version_is_refused():
    job = Job()
    job.join(0, version="9.9.9")
    assert "host0 has ringcomm 9.9.9, but this job runs 1.2.3" in job.last(0)["reason"]
    assert job.last(0)["type"] == "refused" and 0 in job.dropped


@pytest.mark.parametrize("end", ["hang_up", "leave"])
def test_a_process_that_ends_before_it_was_in_a_view_is_forgotten(end):
    job = Job(min_size=2, start_size=2)
    job.join(0)
    getattr(job, end)(0)
    job.join(1)
    assert job.state.view.epoch == -1
    job.join(2)
    assert job.members() == (1, 2)


def test_a_new_process_whose_end_its_launcher_reports_is_forgotten():
    job = Job(launched=True).start(2)
    job.expect(2)
    job.join(2)
    job.exit(2, "exit code 1")
    job.again(0, 1)
    assert job.members() == (0, 1) and not job.all("lost")


def test_reports_about_connections_and_members_that_are_not_there_change_nothing():
    job = Job(launched=True).start(2)
    before = len(job.notices)
    job.hang_up(99)
    job.leave(99)
    job.relay(99, {"type": "linked", "links": []})
    job.take(job.state.answered(99, {"type": "pong", "heard": [], "silent": []}, job.now_s))
    job.take(job.state.exclude(99, "its host was removed", job.now_s))
    assert job.members() == (0, 1) and len(job.notices) == before


def test_a_member_that_has_left_cannot_leave_again():
    job = Job(launched=True).start(2)
    job.leave(1)
    sent = len(job.sent[0])
    job.leave(1, ok=False)
    job.again(0)
    assert job.members() == (0,) and not job.all("lost") and len(job.sent[0]) > sent


def test_the_others_learn_of_a_member_that_leaves_because_of_an_error():
    job = Job(launched=True).start(3)
    job.leave(1, ok=False)
    assert [job.last(other)["type"] for other in (0, 2)] == ["abort", "abort"]
    assert job.last(0)["rank"] == 1


def test_a_new_process_that_is_excluded_ends_at_once():
    job = Job(launched=True).start(1)
    job.expect(1)
    job.join(1)
    job.take(job.state.exclude(1, "its host was removed", job.now_s))
    assert job.last(1) == {"type": "excluded", "reason": "its host was removed"} and 1 in job.dropped
    job.again(0)
    assert job.members() == (0,)


def test_a_member_that_is_excluded_after_it_has_asked_is_not_in_the_next_view():
    job = Job(launched=True).start(2)
    job.again(0)
    job.take(job.state.exclude(0, "its host was removed", job.now_s))
    job.again(1)
    assert job.last(0)["type"] == "excluded" and job.members() == (1,)


def test_a_member_may_ask_on_a_connection_of_its_own():
    """Its old one is dropped: it is the same process."""
    job = Job(launched=True).start(2)
    job.join(5, member=0, position=1)
    assert job.dropped == [0]
    job.hang_up(0)
    job.again(1)
    assert job.members() == (0, 1) and job.state.view.epoch == 1 and not job.all("lost")
    assert job.last(5)["type"] == "link"


def test_a_first_view_that_never_has_enough_says_what_is_missing():
    job = Job(launched=True, min_size=2, elastic_timeout_s=30.0)
    job.expect(0)
    job.expect(1, host="jetson1")
    job.join(0)
    job.state.refused_connections = "3 connections (mostly 10.0.0.9: no answer)"
    job.pass_time(31.0, answering=(0,))
    (failed,) = job.all("failed")
    assert failed.text == (
        "Not enough ranks within 30 s (--elastic-timeout): 1 of at least 2 ranks are ready; missing: "
        "jetson1. The rendezvous turned away 3 connections (mostly 10.0.0.9: no answer)."
    )
    told = len(job.sent[0])
    job.take(job.state.tick(job.now_s + 60.0))
    assert len(job.sent[0]) == told, "nothing happens after that"


def test_without_a_limit_a_process_may_leave_pings_unanswered_for_ever():
    job = Job(min_size=2, start_size=2, elastic_timeout_s=1000.0)
    message = join_message(dead_after=0.0, position="none")
    job.take(job.state.joined(0, message, job.now_s))
    job.pass_time(50.0)
    assert [item["type"] for item in job.sent[0]].count("ping") >= 9
    assert not job.dropped and not job.all("failed")
    job.join(1)
    assert job.members() == (0, 1)


def test_a_member_that_stops_while_links_are_built_is_left_out():
    job = Job(launched=True, min_size=1)
    job.expect(0, 1)
    job.join(0)
    job.join(1)
    assert job.members() == (0, 1)
    job.pass_time(8.0, answering=(0,))
    (lost,) = job.all("lost")
    assert lost.detail["kind"] == "stalled" and lost.detail["member"] == 1 and job.dropped == [1]
    job.again(0)
    assert job.members() == (0,)


def test_hosts_that_cannot_reach_each_other_at_the_start_end_the_job():
    job = Job(min_size=2, start_size=2)
    job.join(0, hostname="desk")
    job.join(1, hostname="jetson1")
    for connection in (0, 1):
        job.relay(connection, {"type": "probed", "attempts": []})
    (failed,) = job.all("failed")
    assert failed.detail["kind"] == "no_route" and "desk and jetson1 cannot reach each other" in failed.text
