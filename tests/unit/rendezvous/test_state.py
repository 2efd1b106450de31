"""The rendezvous' life, as lists of events and what they lead to: joining, and any order of events."""

from __future__ import annotations

import itertools
import random

import pytest

from ringcomm.errors import ProtocolError
from ringcomm.rendezvous import server
from ringcomm.rendezvous.epoch import Phase
from ringcomm.rendezvous.membership import Notice, Send
from ringcomm.rendezvous.routing import MAX_ROWS, ranges_of
from ringcomm.rendezvous.server import Board
from ringcomm.wire.messages import MAX_MESSAGE_BYTES, encode
from tests.unit.rendezvous.simulated import Job, attempt, join_message, seats_of, speed

# ---- joining ---------------------------------------------------------------------------------


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_any_order_of_joining_gives_the_same_ranks(order):
    planned, free = Job(4, seats_of(2, 2)), Job(4)
    for connection in order:
        planned.join_seat(connection, connection)
        free.join(connection, hostname="ab"[connection // 2], pid=connection)
    assert planned.ranks() == free.ranks() == {0: 0, 1: 1, 2: 2, 3: 3}


@pytest.mark.parametrize("phase", ["probing", "running"])
def test_latecomer(phase):
    job = Job(2)
    job.join(0, pid=0)
    job.join(1, pid=1)
    if phase == "running":
        job.link_all([0, 1])
    before = {connection: list(messages) for connection, messages in job.told.items()}
    job.join(2, hostname="late", pid=2)
    assert "the job's 2 ranks are complete; late came too late" in job.told[2][0]["reason"]
    assert job.dropped == [2]
    assert {0: job.told[0], 1: job.told[1]} == before

# ---- missing ranks ---------------------------------------------------------------------------


def test_start_timeout_names_the_missing():
    job = Job(3, seats_of(1, 2), start_timeout_s=30.0)
    job.join_seat(5, 1)
    job.pass_time(29.9)
    assert not job.aborts()
    job.pass_time(0.1)
    assert set(job.aborts()) == {5}
    assert (job.root_cause()["kind"], job.root_cause()["rank"]) == ("timeout", 0)
    assert "Only 1 of 3 ranks have joined within 30 s" in job.root_cause()["text"]
    assert "Missing: rank 0 (host0), rank 2 (host1)" in job.root_cause()["text"]
    assert job.notice("failed").culprit == 0


def test_process_that_ends_before_init_is_named_at_once():
    job = Job(3, seats_of(1, 2))
    job.join_seat(0, 0)
    job.exit(2, "exit code 0", ok=True)
    assert (job.root_cause()["kind"], job.root_cause()["rank"]) == ("startup", 2)
    assert (
        "rank 2 (host1) ended (exit code 0) before it called ringcomm.init(), while 1 of 3 ranks were "
        "waiting for it" in job.root_cause()["text"]
    )

# ---- any order of events ---------------------------------------------------------------------


class Storm:
    """Random events, at random moments, from connections that behave as the server lets them."""

    def __init__(self, seed):
        self.rng = random.Random(seed)
        self.size = self.rng.randrange(1, 5)
        seats = seats_of(*[1] * self.size) if self.rng.random() < 0.5 else ()
        self.job = Job(self.size, seats, start_timeout_s=self.rng.choice([2.0, 60.0]))
        self.open = set()
        self.fresh = itertools.count()
        self.said_goodbye = set()
        self.ended = set()  # their processes have, and receive nothing

    def step(self):
        rng, job = self.rng, self.job
        connection = rng.choice(sorted(self.open)) if self.open and rng.random() < 0.7 else None
        event = rng.choice(
            ["join"] * 4
            + ["linked", "probed", "measured"] * 4
            + ["lost", "mismatch", "leave", "hang_up", "exit", "unlinked"]
        )
        rank = rng.randrange(self.size)
        if event == "exit":
            if job.seats:
                members = job.state.epoch.members.values()
                self.ended |= {item.connection for item in members if item.number == rank}
                job.exit(rank, rng.choice(["exit code 0", "killed by SIGKILL"]), rng.random() < 0.5)
        elif event == "join":
            self.join(rank)
        elif connection is None:
            job.pass_time(rng.choice([0.0, 0.1, 0.5, 5.0]))
        elif connection in self.said_goodbye or event == "hang_up":
            self.hang_up(connection)
        elif event == "leave":
            self.said_goodbye.add(connection)
            job.leave(connection, "bye", ok=rng.random() < 0.7)
        elif event == "probed":
            job.probed(
                connection,
                *[
                    attempt(0, t, f"10.{net}.0.{t}", rng.choice(["", "", "", "refused"]), local_iface=iface)
                    for t in range(self.size)
                    for net, iface in ((0, "eth0"), (1, "eth1"))[: rng.choice([1, 1, 2])]
                ],
            )
        elif event == "measured":
            job.measured(
                connection,
                *[speed(t, f"10.{rng.randrange(2)}.0.{t}", rng.random(), "eth0") for t in range(self.size)],
            )
        elif event == "linked":
            job.linked(connection)
        elif event == "unlinked":
            job.unlinked(connection)
        elif event == "lost":
            job.lost(connection, rng.randrange(-1, self.size + 1), rng.choice(["lost", "stalled"]))
        else:
            job.mismatch(connection, rank, "different")
        for dropped in job.dropped:
            if dropped in self.open:
                self.hang_up(dropped)

    def join(self, rank):
        connection = next(self.fresh)
        self.open.add(connection)
        if self.job.seats:
            self.job.join_seat(connection, rank)
        else:
            self.job.join(connection, pid=connection, rank=self.rng.choice([None, rank]))

    def hang_up(self, connection):
        self.open.discard(connection)
        self.job.hang_up(connection)


def test_whatever_happens_all_ranks_are_aborted_exactly_once():
    """Any sequence of events is handled; after an abort, every connected rank has got it."""
    phases, root_causes = set(), set()
    for seed in range(300):
        storm = Storm(seed)
        job = storm.job
        for _ in range(60):
            storm.step()
            phases.add(job.state.phase)
        job.pass_time(100.0)
        told = job.aborts()  # which checks that no rank gets two, and all the same
        root_causes |= {message["kind"] for message in told.values()}
        failures = [item for item in job.notices if item.kind == "failed"]
        assert len(failures) == (1 if job.state.phase is Phase.ABORTED else 0), f"seed {seed}"
        if job.state.phase is Phase.ABORTED:
            for connection in storm.open - storm.ended:
                informed = connection in told or "refused" in job.kinds(connection)
                assert informed, f"seed {seed}: connection {connection} never learned that the job is over"
    # The property is worth something: the events lead everywhere.
    assert phases == set(Phase)
    assert root_causes == {"lost", "stalled", "mismatch", "timeout", "no_route", "startup"}


def test_of_each_topic_the_first_warning_is_shown():
    job = Job(2)
    job.run_on_one_host()
    before = len(job.notices)
    for rank, topic, text in ((1, "lines", "first"), (0, "lines", "second"), (0, "program", "third")):
        job.take(job.state.handle(rank, {"type": "warning", "topic": topic, "text": text}, job.now_s))
    job.take(job.state.handle(99, {"type": "warning", "topic": "other", "text": "from elsewhere"}, job.now_s))
    assert job.notices[before:] == [
        Notice("warning", text, detail={"topic": topic})
        for topic, text in (("lines", "first"), ("program", "third"))
    ]
    for number in range(100):
        job.take(job.state.handle(0, {"type": "warning", "topic": str(number), "text": "flood"}, job.now_s))
    assert len(job.notices) < before + 20


def test_what_ranks_are_told_of_links_grows_with_the_ranks_only():
    """With all pairs of ranks in every rank's message, 340 ranks were told more than a message may have."""
    size = 400
    job = Job(size)
    for rank in range(size):
        job.state.handle(rank, join_message(rank=rank, pid=100 + rank), job.now_s)
    for rank in range(size):
        peers = ranges_of(peer for peer in range(size) if peer != rank)
        links = [{"iface": "eth0", "local": "10.0.0.1", "peers": peers}]
        actions = job.state.handle(rank, {"type": "linked", "links": links}, job.now_s)
    sent = {action.connection: len(encode(action.message)) for action in actions if isinstance(action, Send)}
    assert len(sent) == size
    assert max(sent.values()) < MAX_MESSAGE_BYTES / 16
    assert sum(sent.values()) - max(sent.values()) < 100 * size
    (started,) = [action for action in actions if isinstance(action, Notice)]
    assert len(started.detail["links"]) == MAX_ROWS
    assert f"and {size * (size - 1) // 2 - 500} more" in started.text

# ---- entries that ranks post for each other ----------------------------------------------------


def entry(name, text):
    return {"type": "post", "entry": name, "text": text}


def wish(name):
    return {"type": "await", "entry": name}


def answer(connection, name, text):
    return Send(connection, {"type": "entry", "entry": name, "text": text})


def test_waiting_readers_get_it_when_it_is_posted_and_later_ones_at_once():
    here = Board()
    assert here.awaited(1, wish("a")) == here.awaited(2, wish("b")) == here.awaited(3, wish("a")) == []
    assert here.posted(0, entry("a", "x")) == [answer(0, "a", "x"), answer(1, "a", "x"), answer(3, "a", "x")]
    assert here.awaited(4, wish("a")) == [answer(4, "a", "x")]
    assert here.posted(0, entry("a", "y")) == [answer(0, "a", "y")]
    assert here.awaited(4, wish("a")) == [answer(4, "a", "y")]


def change(how, entry, text="", before=""):
    return {"type": "change", "how": how, "entry": entry, "text": text, "before": before}


def test_entries_change_as_in_a_store_of_pytorch():
    here = Board()
    here.awaited(2, wish("n"))
    assert here.changed(1, change("add", "n", "5")) == [answer(1, "n", "5"), answer(2, "n", "5")]
    assert here.changed(1, change("add", "n", "-7")) == [answer(1, "n", "-2")]
    assert here.changed(1, change("compare", "n", "x", "y")) == [answer(1, "n", "-2")]
    assert here.changed(1, change("compare", "n", "x", "-2")) == [answer(1, "n", "x")]
    assert here.changed(1, change("compare", "new", "x", "y")) == [answer(1, "new", "y")]
    assert here.changed(1, change("compare", "new", "x")) == [answer(1, "new", "x")]
    assert here.changed(1, change("count", "n")) == [answer(1, "n", "2")]
    for text in ("1", ""):
        assert here.changed(1, change("check", "n")) == [answer(1, "n", text)]
        assert here.changed(1, change("delete", "n")) == [answer(1, "n", text)]
    for odd in (change("add", "new", "1"), change("add", "m", "9" * 30), change("grow", "m")):
        with pytest.raises(ProtocolError):
            here.changed(1, odd)


def test_there_are_limits(monkeypatch):
    here = Board()
    with pytest.raises(ProtocolError, match="too long"):
        here.posted(0, entry("a", "x" * server.MAX_ENTRY_BYTES))
    monkeypatch.setattr(server, "MAX_ENTRIES", 2)
    for name in "ab":
        here.posted(0, entry(name, ""))
        here.awaited(0, wish(name + name))
    with pytest.raises(ProtocolError, match="one too many"):
        here.posted(0, entry("c", ""))
    with pytest.raises(ProtocolError, match="too many entries"):
        here.awaited(0, wish("c"))
