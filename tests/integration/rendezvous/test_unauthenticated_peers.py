"""Peers without the job's key at the rendezvous and at ranks: they disturb no start and no run."""

from __future__ import annotations

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from ringcomm.transport.connect import MAX_HALF_OPEN, PLACE_S
from tests.support.service import eventually, sum_of_ranks, together

GARBAGE = Path(__file__).parents[2] / "support" / "garbage.py"


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


def test_garbage_during_the_start(service, rank_ports):
    """Unauthenticated peers at the rendezvous and at the ports of two ranks that wait for a third."""
    job = service(3)
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


def test_a_rank_joins_past_more_unauthenticated_peers_than_are_accepted(service):
    """They come for longer than the start may take, to a job that encrypts."""
    job = service(2, encrypt=True)
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
    limit = MAX_HALF_OPEN * (1 + (time.monotonic() - began_s) / PLACE_S)
    counts = [int(text.split()[1]) for text in job.texts("log")]
    assert MAX_HALF_OPEN < sum(counts) < limit + MAX_HALF_OPEN, counts


def assert_only_log_lines(job, since_s):
    assert {notice.kind for notice in job.notices} <= {"joined", "started", "log"}
    assert eventually(lambda: job.texts("log") != [])
    assert len(job.texts("log")) <= 2 + time.monotonic() - since_s
    assert all(text.startswith("refused") for text in job.texts("log"))
