"""The real rendezvous and real joiners over the loopback: start, refusals, garbage, leaks."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import psutil
import pytest

from ringcomm.certificate import make_certificate
from ringcomm.config import Membership, Settings, Slot
from ringcomm.context import Context
from ringcomm.errors import (
    AuthenticationError,
    PeerLostError,
    RefusedError,
    StartTimeoutError,
    StartupError,
)
from ringcomm.rendezvous import client, control, links, message_server
from ringcomm.rendezvous.embedded import EmbeddedRendezvous
from ringcomm.rendezvous.state import Phase
from ringcomm.transport.accept import MOST_HALF_OPEN, REFUSALS_AT_ONCE, REFUSALS_PER_S
from ringcomm.transport.connect import listen
from ringcomm.wire.messages import MessageReader, body_of, encode, framed
from tests.contract.fake_rendezvous import ABORT, GO, LINK, PROBE, FakeRendezvous
from tests.contract.service import eventually, free_port, opened, remains, together

GARBAGE = Path(__file__).with_name("garbage.py")


@pytest.fixture
def rank_ports(monkeypatch):
    """The ports on which ranks of this process have listened on 127.0.0.1, as they come."""
    ports = []

    def spy(address, *args, **options):
        sock = listen(address, *args, **options)
        if address == "127.0.0.1":
            ports.append(sock.getsockname()[1])
        return sock

    monkeypatch.setattr(links, "listen", spy)
    return ports


def sum_of_ranks(context):
    return float(context.allreduce(np.full(1000, float(context.rank)), op=1)[0])


def refuses(port):
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) != 0


# ---- start -----------------------------------------------------------------------------------


def test_three_ranks_start_work_and_end(service, rank_ports):
    job = service(3)
    with ExitStack() as stack:
        contexts = job.start_all(stack)
        assert [(context.rank, context.size, context.host) for context in contexts] == [
            (0, 3, "here"),
            (1, 3, "here"),
            (2, 3, "here"),
        ]
        assert together(contexts, sum_of_ranks) == [3.0] * 3
        assert len(rank_ports) == 3
        assert all(refuses(port) for port in rank_ports), "a rank still listens after the start"
    assert eventually(lambda: job.texts("ended") != [])
    kinds = [notice.kind for notice in job.notices]
    assert kinds == ["joined"] * 3 + ["started"] + ["usage"] * 3 + ["ended"]


def test_groups_without_an_engine_are_not_pinged_while_they_run(service):
    """No thread of theirs would answer, and the last rank would count as silent when the others have left."""
    job = service(2)
    with ThreadPoolExecutor(2) as pool:
        with_engine = pool.submit(client.join, job.membership(0), job.settings, listens=True)
        without = pool.submit(client.join, job.membership(1), job.settings)
        both = [with_engine.result(30.0), without.result(30.0)]
    members = job.server._state.members.values()
    assert {member.rank: member.listens for member in members} == {0: True, 1: False}
    for joined in both:
        joined.control.leave("it is done", True)
        joined.channels.close()


def test_ranks_without_a_plan(service):
    job = service(3, planned=False)
    with ExitStack() as stack, ThreadPoolExecutor(3) as pool:
        contexts = list(pool.map(job.start, [None, 0, None]))
        for context in contexts:
            stack.callback(context.close)
        assert contexts[1].rank == 0
        assert sorted(context.rank for context in contexts) == [0, 1, 2]
        assert together(contexts, sum_of_ranks) == [3.0] * 3


# ---- peers that do not belong -----------------------------------------------------------------


@pytest.mark.parametrize(
    "change, error, words",
    [
        ({"key": b"x" * 32}, AuthenticationError, "does not hold this job's key"),
        ({"job": "another"}, AuthenticationError, "belongs to another job"),
        ({"slot": None}, RefusedError, "was not started by this job's launcher"),
        ({"slot": Slot(0, 9)}, RefusedError, "was not planned"),
        ({"slot": Slot(0, 0)}, RefusedError, "place 0 on here is already taken by process"),
    ],
)
def test_a_refusal_disturbs_no_rank(service, change, error, words):
    job = service(2)
    with ExitStack() as stack, ThreadPoolExecutor(2) as pool:
        first = pool.submit(job.start, 0)
        assert eventually(lambda: len(job.texts("joined")) == 1)
        with pytest.raises(error, match=words):
            job.start(1, **change)
        contexts = [job.start(1), first.result()]
        for context in contexts:
            stack.callback(context.close)
        if error is RefusedError:
            assert eventually(lambda: any(words in text for text in job.texts("refused")))
        else:
            assert eventually(lambda: any("refused" in text for text in job.texts("log")))
        assert together(contexts, sum_of_ranks) == [1.0] * 2


def test_another_version_is_refused(service, monkeypatch):
    job = service(2)
    monkeypatch.setattr(client, "__version__", "0.0.1")
    with pytest.raises(RefusedError, match=r"has ringcomm 0\.0\.1, but this job runs .* Install the same"):
        job.start(0)
    assert eventually(lambda: any("0.0.1" in text for text in job.texts("refused")))


def test_latecomer_is_refused(service):
    job = service(2, planned=False)
    with ExitStack() as stack, ThreadPoolExecutor(2) as pool:
        for context in pool.map(job.start, [None, None]):
            stack.callback(context.close)
        with pytest.raises(RefusedError, match="came too late"):
            job.start(None)


def test_missing_ranks_are_named(service):
    job = service(3, start_timeout_s=0.5)
    with ThreadPoolExecutor(2) as pool:
        starts = [pool.submit(job.start, rank) for rank in (0, 2)]
        for start in starts:
            with pytest.raises(StartTimeoutError, match=r"Only 2 of 3 ranks .*Missing: rank 1 \(here\)"):
                start.result()
    assert eventually(lambda: job.texts("failed") != [])
    assert "Missing: rank 1 (here)" in job.texts("failed")[0]


def test_a_rank_that_ended_too_early_is_named(service):
    job = service(2)
    with ThreadPoolExecutor(1) as pool:
        start = pool.submit(job.start, 0)
        assert eventually(lambda: len(job.texts("joined")) == 1)
        job.server.process_exited(Slot(0, 1), "exit code 3", False)
        with pytest.raises(StartupError, match=r"rank 1 \(here\) ended \(exit code 3\) before it called"):
            start.result()


def test_no_process_serves(no_leaks):
    membership = Membership(2, (("127.0.0.1", free_port()),), b"k" * 32, slot=Slot(0, 0))
    with pytest.raises(
        StartTimeoutError, match="(?s)No answer from the rendezvous.*connection refused"
    ) as caught:
        Context.start(membership, Settings(start_timeout_s=0.3))
    assert "firewall" in str(caught.value)


@pytest.mark.full
def test_where_a_launcher_should_serve_no_rank_waits_long(no_leaks):
    membership = Membership(2, (("127.0.0.1", free_port()),), b"k" * 32, slot=Slot(0, 0))
    started_s = time.monotonic()
    with pytest.raises(StartTimeoutError, match=r"connection refused(?s:.*)--iface !docker\* \(RINGCOMM"):
        Context.start(membership, Settings(start_timeout_s=60.0, iface="!docker*"))
    assert 2.0 < time.monotonic() - started_s < 10.0


def test_a_name_that_does_not_exist(no_leaks):
    membership = Membership(2, (("no-such-host.invalid", 5000),), b"k" * 32, slot=Slot(0, 0))
    with pytest.raises(StartTimeoutError, match="no-such-host.invalid"):
        Context.start(membership, Settings(start_timeout_s=0.3))


def test_endless_timeouts_are_allowed(service):
    job = service(2)
    job.settings = Settings(start_timeout_s=float("inf"), timeout_s=float("inf"), spin_us=0.0)
    with ExitStack() as stack:
        assert together(job.start_all(stack), sum_of_ranks) == [1.0] * 2


# ---- a rendezvous that misbehaves ------------------------------------------------------------


@pytest.fixture
def fake(no_leaks):
    fake = FakeRendezvous()
    yield fake
    fake.close()


def start_with(fake, pool):
    start = pool.submit(Context.start, fake.membership, Settings(start_timeout_s=5.0))
    fake.accept()
    fake.read("join")
    return start


def test_an_abort_right_behind_the_go_is_not_lost(fake):
    with ThreadPoolExecutor(1) as pool:
        start = start_with(fake, pool)
        fake.send(PROBE, LINK, GO, ABORT)
        with pytest.raises(PeerLostError, match="rank 1 died young") as caught:
            start.result()
    assert (caught.value.rank, caught.value.host) == (1, "there")


@pytest.mark.parametrize(
    "spoken",
    [
        lambda session: b"\xff\xff\xff\xff",
        lambda session: framed(body_of({"type": "abort", "kind": "lost", "text": "x"})[:-1] + b"!", session),
        lambda session: encode({"type": "leaving", "reason": "", "ok": True}, session),
        lambda session: encode({**PROBE, "members": [{}]}, session),
        lambda session: encode(ABORT),
        lambda session: b"",
    ],
    ids=["too long", "not JSON", "not its to say", "incomplete", "without a tag", "nothing"],
)
def test_a_rendezvous_that_talks_nonsense_or_leaves(fake, spoken):
    with ThreadPoolExecutor(1) as pool:
        start = start_with(fake, pool)
        fake.sock.sendall(spoken(fake.session))
        fake.sock.close()
        with pytest.raises(StartupError, match="The rendezvous ended while the job was starting"):
            start.result()


def test_an_abort_in_the_middle_of_linking_leaves_nothing_behind(fake):
    """A peer that accepts but never answers is being dialled when the job ends."""
    silent = listen("127.0.0.1")
    offer = {"address": "127.0.0.1", "port": silent.getsockname()[1], "iface": "lo", "kind": "loopback"}
    with ThreadPoolExecutor(1) as pool:
        start = start_with(fake, pool)
        route = {"peer": 1, "dial": True, "addresses": [offer], "iface": "lo"}
        fake.send(PROBE, {"type": "link", "routes": [route]})
        assert eventually(lambda: _connects(silent))
        fake.send(ABORT)
        with pytest.raises(PeerLostError):
            start.result()
    silent.close()


def _connects(listener):
    try:
        listener.accept()[0].close()
    except BlockingIOError:
        return False
    return True


# ---- the control channel while the job runs --------------------------------------------------


@pytest.fixture
def channel(no_leaks, monkeypatch, request):
    """Of a rank without any host name, or of rank 1 among these hosts."""
    monkeypatch.setattr(control, "ROOT_CAUSE_S", 0.2)
    inside, outside = socket.socketpair()
    inside.setblocking(False)
    place = (1, request.param) if hasattr(request, "param") else ()
    channel = control.ControlChannel(inside, MessageReader(100_000), *place)
    yield channel, outside
    channel.leave("the test is over", True)
    outside.close()


def test_the_root_cause_of_the_rendezvous_counts(channel):
    channel, outside = channel
    outside.sendall(encode(ABORT))
    error = channel.report_lost(3, "allreduce", "connection reset")
    assert (str(error), error.rank, error.host) == ("rank 1 died young", 1, "there")
    again = channel.report_lost(3, "allreduce", "connection reset")
    assert again is not error
    assert str(again) == str(error)


def test_all_threads_that_wait_for_the_rendezvous_wake_at_the_end(channel):
    """One of them reads the message; for the others the connection reads as ended."""
    channel, outside = channel
    assert select.select([channel], [], [], 0.0)[0] == []
    outside.sendall(encode(ABORT))
    with pytest.raises(PeerLostError):
        channel.check()
    assert select.select([channel], [], [], 0.0)[0] == [channel]


@pytest.mark.parametrize("channel", [("desk", "jetson1")], indirect=True)
def test_the_own_view_names_hosts(channel):
    channel, outside = channel
    error = channel.report_lost(0, "barrier()", "connection reset")
    assert "rank 0 (desk) was lost while rank 1 (jetson1) was in barrier(): connection reset" in str(error)
    assert (error.rank, error.host) == (0, "desk")


def test_a_silent_rendezvous_leaves_the_own_view(channel):
    channel, outside = channel
    error = channel.report_lost(3, "allreduce(4 x int8)", "connection reset")
    assert isinstance(error, PeerLostError)
    assert error.rank == 3
    assert "rank 3 was lost while this rank was in allreduce(4 x int8): connection reset" in str(error)
    assert channel.open
    with pytest.raises(PeerLostError, match="rank 3 was lost"):
        channel.check()
    assert not channel._sock.getblocking(), "the channel was left in blocking mode"


@pytest.mark.parametrize("last_words", [b"", b"\0\0\0\1x", encode({"type": "echo", "rank": 1})[:-1] + b"?"])
def test_a_rendezvous_that_is_gone_or_mad_is_named(channel, last_words):
    channel, outside = channel
    channel.check()
    outside.sendall(last_words)
    outside.close()
    with pytest.raises(PeerLostError, match="The rendezvous of this job is gone"):
        for _ in range(100):
            channel.check()
    assert channel.fileno() == -1
    assert "The rendezvous of this job is gone" in str(channel.report_lost(1, "allreduce", "reset"))


# ---- garbage ---------------------------------------------------------------------------------


def throw_garbage(seed, ports, count):
    """So many unauthenticated peers, 1,000 a second; returns when 500 have come."""
    print(f"seed {seed}")
    command = [sys.executable, str(GARBAGE), str(seed), str(count), "1000", *map(str, ports)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "it has begun\n"
    return process


def thrown(process):
    """How many connections there were, in all."""
    output, problems = process.communicate(timeout=60)
    assert process.returncode == 0, problems
    return int(output.split()[0])  # the rest of the line says how many were refused


@pytest.mark.parametrize("encrypt", [False, True])
def test_garbage_during_the_start(service, rank_ports, encrypt):
    """Unauthenticated peers at the rendezvous and at the ports of two ranks that wait for a third."""
    job = service(3, encrypt=encrypt)
    started_s = time.monotonic()
    with ExitStack() as stack, ThreadPoolExecutor(3) as pool:
        starts = [pool.submit(job.start, rank) for rank in (0, 1)]
        assert eventually(lambda: len(job.texts("joined")) == 2 and len(rank_ports) == 2)
        garbage = throw_garbage(1, [job.endpoints[0][1], *rank_ports], count=40_000)
        stack.callback(thrown_out, garbage)
        # The third joins, all link up and compute while the others keep coming.
        contexts = [job.start(2)] + [start.result() for start in starts]
        for context in contexts:
            stack.callback(context.close)
        assert together(contexts, sum_of_ranks) == [3.0] * 3
        assert garbage.poll() is None, "it was over before the job had started: the test shows nothing"
        assert_only_log_lines(job, started_s)


@pytest.mark.parametrize("encrypt", [False, True])
@pytest.mark.full
def test_garbage_during_a_run(service, encrypt):
    """5,000 unauthenticated peers at the rendezvous while three ranks compute."""
    job = service(3, encrypt=encrypt)
    with ExitStack() as stack:
        contexts = job.start_all(stack)
        before = opened()
        started_s = time.monotonic()
        garbage = throw_garbage(2, [job.endpoints[0][1]], count=5_000)
        rounds = 0
        while garbage.poll() is None:
            assert together(contexts, sum_of_ranks) == [3.0] * 3
            rounds += 1
        assert rounds > 3
        assert thrown(garbage) > 500
        assert_only_log_lines(job, started_s)
        assert job.server.phase is Phase.RUNNING
        assert eventually(lambda: opened() == before), "connections of unauthenticated peers remain"


@pytest.mark.parametrize("encrypt", [False, True])
def test_a_rank_joins_past_more_unauthenticated_peers_than_are_accepted(service, encrypt):
    """They come for longer than the start may take."""
    job = service(2, encrypt=encrypt)
    with ExitStack() as stack, ThreadPoolExecutor(1) as pool:
        first = pool.submit(job.start, 0)
        assert eventually(lambda: len(job.texts("joined")) == 1)
        garbage = throw_garbage(4, [job.endpoints[0][1]], count=40_000)
        stack.callback(thrown_out, garbage)
        assert eventually(lambda: any("may have to wait" in text for text in job.texts("log")), 10.0)
        began_s = time.monotonic()
        contexts = [job.start(1), first.result()]
        print(f"the second rank was in after {time.monotonic() - began_s:.1f} s")
        for context in contexts:
            stack.callback(context.close)
        assert garbage.poll() is None
        assert together(contexts, sum_of_ranks) == [1.0] * 2


def thrown_out(process):
    process.kill()
    process.communicate()


@pytest.mark.full
def test_work_for_unauthenticated_peers_per_second_has_a_limit(service):
    job = service(1)
    began_s = time.monotonic()
    assert thrown(throw_garbage(5, [job.endpoints[0][1]], count=5_000)) < 5_000
    assert eventually(lambda: not job.server._acceptor._half_open)
    assert eventually(lambda: not job.server._refused)
    limit = REFUSALS_AT_ONCE + REFUSALS_PER_S * (time.monotonic() - began_s)
    counts = [int(text.split()[1]) for text in job.texts("log")]
    assert REFUSALS_AT_ONCE < sum(counts) < limit + MOST_HALF_OPEN, counts


def assert_only_log_lines(job, since_s):
    assert {notice.kind for notice in job.notices} <= {"joined", "started", "log"}
    assert eventually(lambda: job.texts("log") != [])
    assert len(job.texts("log")) <= 2 + time.monotonic() - since_s
    assert all(text.startswith("refused") for text in job.texts("log"))


@pytest.mark.full
def test_honest_ranks_get_in_past_a_crowd_that_says_nothing(service):
    """More silent connections than may be half open do not keep a rank out."""
    job = service(2)
    with ExitStack() as stack:
        crowd = [socket.create_connection(job.endpoints[0]) for _ in range(300)]
        for sock in crowd:
            stack.callback(sock.close)
        assert together(job.start_all(stack), sum_of_ranks) == [1.0] * 2


# ---- again and again -------------------------------------------------------------------------


def test_a_hundred_generations_of_one_rank(no_leaks):
    for _ in range(100):
        with Context.start(Membership(), Settings()) as context:
            assert context.allreduce(np.ones(3)).tolist() == [1.0] * 3


@pytest.mark.full
def test_a_hundred_generations_of_two_ranks_leak_nothing(service):
    job = service(2)

    def generations(rank, count=100):
        grown = []
        for number in range(count):
            with job.start(rank) as context:
                assert context.generation == number
                assert context.allreduce(np.full(100_000, 1.0), op=1)[0] == 2.0
            if number % 10 == 9:
                grown.append((psutil.Process().num_fds(), psutil.Process().memory_info().rss))
        return grown

    with ThreadPoolExecutor(2) as pool:
        series = list(pool.map(generations, range(2)))
    for samples in series:
        descriptors = [count for count, _ in samples]
        memory = [rss for _, rss in samples]
        # The other rank may be anywhere in its own start or end; one leaked per generation would be 50 here.
        assert min(descriptors[5:]) <= min(descriptors[:5]) + 5, descriptors
        # One 800 kB array kept per generation would be 70 MB here.
        assert memory[-1] - memory[2] < 20e6, [rss // 1_000_000 for rss in memory]


def test_a_failed_start_leaks_nothing(service):
    job = service(2, start_timeout_s=0.2)
    before = opened()
    for _ in range(11):  # the first waits; later ones get the same at once
        with pytest.raises(StartTimeoutError, match="Only 1 of 2 ranks"):
            job.start(0)
    assert eventually(lambda: not remains(before)), remains(before)


# ---- without a launcher ----------------------------------------------------------------------


def test_one_of_the_ranks_serves(no_leaks):
    where = ("127.0.0.1", free_port())
    membership = Membership(3, (where,), b"k" * 32)
    settings = Settings(start_timeout_s=20.0, spin_us=0.0)

    def work(_):
        with Context.start(membership, settings) as context:
            return context.rank, sum_of_ranks(context)

    for _ in range(2):  # the port is free again afterwards
        with ThreadPoolExecutor(3) as pool:
            assert sorted(pool.map(work, range(3))) == [(0, 3.0), (1, 3.0), (2, 3.0)]
        assert refuses(where[1])


def test_a_rank_serves_although_its_port_was_taken_for_a_while(no_leaks, monkeypatch):
    """A connection of another program may have that very port when the ranks try to bind it."""
    refused = threading.Semaphore(0)

    def counted(*given, **options):
        try:
            return listen(*given, **options)
        except OSError:
            refused.release()
            raise

    monkeypatch.setattr(message_server, "listen", counted)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        membership = Membership(2, (other.getsockname(),), b"k" * 32)
        settings = Settings(start_timeout_s=60.0, spin_us=0.0)

        def work(_):
            with Context.start(membership, settings) as context:
                return sum_of_ranks(context)

        with ThreadPoolExecutor(2) as pool:
            ranks = [pool.submit(work, number) for number in range(2)]
            try:
                assert all(refused.acquire(timeout=60.0) for _ in ranks)
            finally:
                other.close()
            assert [rank.result() for rank in ranks] == [1.0, 1.0]


@pytest.mark.parametrize("encrypt", [False, True])
def test_a_job_of_its_own_on_free_ports(encrypt):
    """As groups of torch.distributed do: one rank serves, and sends the others its address in its own way."""
    key, settings = os.urandom(32), Settings(start_timeout_s=20.0, encrypt=encrypt)
    certificate = make_certificate() if encrypt else ""
    embedded, endpoints = EmbeddedRendezvous.serve(key, certificate, "group", 2, settings)
    assert endpoints[0][0] == "127.0.0.1", "others on this machine need no interface that may go away"

    def rank(number):
        membership = Membership(2, tuple(endpoints), key, "group", rank=number, certificate=certificate)
        with Context.start(membership, settings) as context:
            assert context.rank == number
            return sum_of_ranks(context)

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(rank, range(2))) == [1.0, 1.0]
    embedded.stop()
