"""Collectives and messages of real ranks: interrupts, kills, deadlocks, new starts, and what calls cost."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.proc.test_ringrun_support import Launched, ringrun, run_plain

PROGRAM = """
import threading
import numpy as np
import ringcomm as rc

rc.init()
rank, size = rc.rank(), rc.size()
if rank == 0:
    rc.send(np.arange(5.0), dest=2)
    rc.send(np.arange(300_000, dtype=np.int64), dest=2)
    read_only = np.arange(3, dtype=np.float32)
    read_only.flags.writeable = False
    rc.send(read_only, dest=2, tag=7)
elif rank == 2:
    small, large = np.zeros(5), np.zeros((2, 150_000), np.int64).reshape(-1)
    other = threading.Thread(target=lambda: tagged.append(rc.recv(np.zeros(3, np.float32), source=0, tag=7)))
    tagged = []
    other.start()
    assert rc.recv(small, source=0) is small
    rc.recv(large, source=0)
    other.join()
    assert small.tolist() == [0, 1, 2, 3, 4] and (large == np.arange(300_000)).all()
    assert tagged[0].tolist() == [0, 1, 2]
assert rc.allreduce(np.ones(3), rc.Sum)[0] == size

if rank == 0:
    for wrong in (0, size, -1):
        try:
            rc.send(np.ones(10), wrong)
        except rc.ConfigError as error:
            assert "rank 0 can exchange messages" in str(error).lower()
        else:
            raise AssertionError(wrong)
if rank < 2:
    try:
        if rank == 0:
            rc.send(np.ones(3), dest=1)
        else:
            rc.recv(np.ones(4), source=0)
    except rc.MismatchError as error:
        assert "[3]" in str(error) or "(3,)" in str(error), error
    else:
        raise AssertionError("not noticed")
rc.barrier()
print("passed")
"""


def test_messages() -> None:
    for code, output in run_plain(PROGRAM, 3):
        assert code == 0 and "passed" in output, output


ASYNC = """
import numpy as np
import ringcomm as rc

rc.init()
rank, size = rc.rank(), rc.size()
own, ends = rc.global_process_set, rc.add_process_set([0, 2])

# All to all, in both directions at once, without threads; the sent arrays may change at once.
parts = [np.full(3, 10.0 * rank + peer) for peer in range(size)]
others = [peer for peer in range(size) if peer != rank]
sends = [rc.send_async(parts[peer], peer, tag=1) for peer in others]
for part in parts:
    part[:] = -1
places = [np.empty(3) for _ in others]
receives = [rc.recv_async(place, peer, tag=1) for place, peer in zip(places, reversed(others))]
for place, peer, handle in zip(places, reversed(others), receives):
    assert handle.wait() is place and (place == 10.0 * peer + rank).all()
for handle in sends:
    handle.wait()

# The same two ranks and tag, in and outside of a set and with a name: none is taken for another one.
if rank == 0:
    handles = [
        rc.send_async([1.0], 2), rc.send_async([2.0], 2, process_set=ends),
        rc.send_async([3.0], 2, name="third"),
    ]
    for handle in handles:
        rc.synchronize(handle)
elif rank == 2:
    assert rc.recv(np.empty(1), 0, name="third")[0] == 3.0
    assert rc.recv(np.empty(1), 0, process_set=ends)[0] == 2.0
    assert rc.recv(np.empty(1), 0, process_set=own)[0] == 1.0

def refused(kind, call):
    try:
        call()
    except kind as error:
        return str(error)
    raise AssertionError(kind)

if rank == 0:
    text = refused(rc.ConfigError, lambda: rc.send([1.0], 1, process_set=ends))
    assert "other ranks 0, 2 of process set 1, not with rank 1" in text, text
    refused(rc.Misuse, lambda: rc.recv_async([1.0], 2))
    first = rc.send_async([1.0], 2, tag=5)
    rest = [rc.send_async([float(number)], 2, tag=5) for number in range(2, 6)]
    for handle in reversed([first, *rest]):
        handle.wait()
elif rank == 1:
    refused(rc.UnknownProcessSetError, lambda: rc.send([1.0], 0, process_set=ends))
else:
    places = [np.empty(1) for _ in range(5)]
    for handle in [rc.recv_async(place, 0, tag=5) for place in places]:
        handle.wait()
    assert [place[0] for place in places] == [1.0, 2.0, 3.0, 4.0, 5.0]
rc.barrier()
print("passed")
"""


def test_messages_in_the_background_in_sets_and_with_names() -> None:
    for code, output in run_plain(ASYNC, 3):
        assert code == 0 and "passed" in output, output


CROSSED = """
import numpy as np
import ringcomm as rc

rc.init()
try:
    rc.recv(np.zeros(1), source=1 - rc.rank())
except rc.RingcommError as error:
    print("caught", error)
"""


def test_two_ranks_that_wait_for_each_other_learn_it() -> None:
    for code, output in run_plain(CROSSED, 2):
        assert code == 0 and "caught" in output and "message from rank" in output, output
        assert "message(shape (1,), float64)" in output and "process set" not in output, output


DIRECT = """
import os, signal, sys, threading, time, traceback
import numpy as np
import ringcomm as rc

def interrupt_when(busy):
    def look():
        while not busy():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)
    threading.Thread(target=look, daemon=True).start()

def fails(call):
    try:
        call()
    except rc.PeerLostError as error:
        print("TOLD", type(error).__name__, error.rank, error)
    else:
        print("went on")

rc.init()
context = rc.api.context()
call = lambda: rc.allreduce(np.ones(100_000), name="gradient")
if rc.rank() == 1:
    interrupt_when(lambda: context._runner.progress().doing)
    try:
        call()
    except KeyboardInterrupt:
        time.sleep(2.5)  # it continues with other work, and all other ranks must have failed by then
    fails(lambda: rc.barrier())
else:
    if rc.rank() == 0:
        time.sleep(1.0)  # so that rank 1 is interrupted while it waits
    fails(call)
"""


def test_an_interrupted_direct_call_ends_the_job_and_names_the_rank() -> None:
    for code, output in run_plain(DIRECT, 3, RINGCOMM_DEAD_AFTER="2"):
        assert code == 0, output
        (line,) = [line for line in output.splitlines() if line.startswith("TOLD")]
        assert line.startswith("TOLD PeerLostError 1 rank 1"), output
        assert "was interrupted (KeyboardInterrupt) in allreduce(shape (100000,)" in line
        assert "do not receive each other's messages" not in line


REVOKED_PROGRAM = """
import os, signal, sys, threading, time
import numpy as np
import ringcomm as rc

def until(condition):
    while not condition():
        time.sleep(0.005)

def call(data):
    if sys.argv[1] == "broadcast":
        rc.broadcast_(data, 0)
    else:
        rc.allreduce_(data, rc.Sum)

rc.init()
data = (rc.empty if sys.argv[2] == "shared" else np.empty)(2_000_000, np.float32)
data.fill(1.0)
if rc.rank() == 0:
    # The other rank comes when this one has been interrupted, so this one has lent its buffer and waits.
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        call(data)
    except BaseException as error:
        data.fill(1000.0)
        open("interrupted." + type(error).__name__, "w").close()
    until(lambda: os.path.exists("done"))
    os._exit(3)
until(lambda: os.path.exists("interrupted.KeyboardInterrupt"))
wrong = 0
threading.Timer(1.5, lambda: open("done", "w").close()).start()
try:
    call(data)
    wrong = int((data != (1.0 if sys.argv[1] == "broadcast" else 2.0)).sum())
except rc.RingcommError as error:
    print("error", type(error).__name__, flush=True)
print("wrong", wrong, flush=True)
"""


@pytest.mark.cases(2)
@pytest.mark.parametrize("transport", ["auto", "shm"])
@pytest.mark.parametrize("kind", ["broadcast", "allreduce"])
@pytest.mark.parametrize("memory", ["ordinary", "shared"])
def test_what_an_interrupted_rank_overwrites_is_no_result(
    tmp_path: Path, memory: str, kind: str, transport: str
) -> None:
    (tmp_path / "interrupted.py").write_text(REVOKED_PROGRAM)
    launched = Launched("-np", "2", "--transport", transport, "interrupted.py", kind, memory, cwd=tmp_path)
    launched.finish()
    assert "wrong 0" in launched.out and "error" in launched.out, launched.out + launched.err


SHARED_ARRAYS_PROGRAM = """
import os, signal
import numpy as np
import ringcomm as rc
from ringcomm.transport import arena

rc.init()
data = rc.empty(4_000_000)
data.fill(1.0)
rc.allreduce_(data, rc.Sum)
assert (data == 2.0).all() and data in arena.own()
if rc.rank() == 1:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    while True:
        rc.allreduce_(data, rc.Sum)
except rc.PeerLostError as error:
    print("lost", error)
rc.shutdown()
data.fill(5.0)
print("kept", data.sum() / data.size)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="this system has no such memory")
@pytest.mark.parametrize("transport", ["auto", pytest.param("shm", marks=pytest.mark.release)])
def test_a_killed_rank_leaves_nothing(transport: str) -> None:
    before = set(Path("/dev/shm").iterdir())
    ends = sorted(run_plain(SHARED_ARRAYS_PROGRAM, 2, RINGCOMM_TRANSPORT=transport))
    assert [code for code, _ in ends] == [-9, 0], ends
    assert "lost" in ends[1][1] and "kept 5.0" in ends[1][1]
    assert not set(Path("/dev/shm").iterdir()) - before


AGAIN_PROGRAM = """
import numpy as np
import ringcomm as rc
for generation in range(4):
    rc.init()
    assert rc.allreduce(np.full(3, 1.0), rc.Sum)[0] == 3
    if generation % 2 == 0:
        rc.shutdown()  # The rank that serves the rendezvous may be the first here, or the last.
        continue
    try:
        rc.allreduce(np.ones(3 + rc.rank()), name="differs")
    except rc.MismatchError as error:
        first = error
    try:
        rc.allreduce(np.ones(3))
    except rc.Misuse as error:
        assert "shutdown() and init() on every rank do" in str(error), error
    rc.shutdown()
rc.init()
assert rc.allreduce(np.full(3, 1.0), rc.Sum)[0] == 3
print(first)
"""


def test_after_a_shutdown_and_after_a_failure() -> None:
    """What the error advises works, whichever rank is the first to come back."""
    for code, output in run_plain(AGAIN_PROGRAM, 3):
        assert code == 0, output
        assert "The ranks do not make the same call" in output


HEAD = """
import time
import numpy as np
import ringcomm as rc

rc.init()
rank, x = rc.rank(), np.ones(4, np.float32)
pair = rc.add_process_set([0, 1])
others = rc.add_process_set([1, 2])

def by_name(name, **more):
    return rc.allreduce_async(x, name=name, op=rc.Sum, **more).wait()[0]

rc.allreduce(x)
"""

DEADLOCKS = {
    "one rank calls by name": "by_name('a') if rank == 1 else rc.allreduce(x)",
    "a rank computes meanwhile": """
if rank == 2:
    time.sleep(30)
elif rank == 0:
    by_name("a", process_set=pair)
rc.allreduce(x)
""",
}


@pytest.mark.full
@pytest.mark.cases(2)
@pytest.mark.parametrize("kind", list(DEADLOCKS))
def test_a_deadlock_ends_the_job_and_names_both_calls(tmp_path: Path, kind: str) -> None:
    (tmp_path / "train.py").write_text(f"{HEAD}{DEADLOCKS[kind]}\nprint('done')\n")
    done = ringrun("-np", "3", "--dead-after", "6", "--threads", "none", "train.py", cwd=tmp_path)
    assert done.process.returncode == 1, done.err
    assert "│ Mismatched calls: " in done.err and "'a' at " in done.err, done.err
    assert "which returns the result itself" in done.err and "done" not in done.out, done.err


WAYS_PROGRAM = """
import sys
import numpy as np
import ringcomm as rc

seen, count = set(), 0

def called(frame, event, argument):
    code = frame.f_code
    # Bodies of modules and classes are not optimized: they run at the import.
    if event == "call" and code.co_flags & 1 and "/ringcomm/" in code.co_filename:
        seen.add(code.co_filename.rpartition("/ringcomm/")[2])
        global count
        count += 1

rc.init()
x = np.ones(1 << 20, np.float32)
for _ in range(2):
    rc.allreduce_(x)
rc.barrier()
sys.setprofile(called)
rc.allreduce_(x)
sys.setprofile(None)
if rc.rank() == 0:
    open("files", "w").write("\\n".join(sorted(seen)))

short, fewest = x[:2], 1000
for _ in range(200):
    rc.barrier()
    count = 0
    sys.setprofile(called)
    rc.allreduce_(short)
    sys.setprofile(None)
    fewest = min(fewest, count)  # of calls in which the other rank was not late
if rc.rank() == 0:
    open("calls", "w").write(str(fewest))
"""

WAYS_DIRECT = {
    "arrays/operands.py", "calls/collectives.py", "calls/direct.py", "collective/execute.py",
    "collective/observe.py", "collective/reduce.py", "collective/runner.py", "job/context.py",
    "transport/tcp.py", "wire/frames.py",
}  # fmt: skip
NOW_AND_THEN = {
    "clock.py", "group/failures.py", "rendezvous/control.py", "transport/base.py", "transport/pace.py",
}  # fmt: skip
"""Of a call that waits, in which the connections are watched and the pace of a link is adjusted."""


def test_a_direct_all_reduce(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(WAYS_PROGRAM)
    done = ringrun("-np", "2", "--transport", "tcp", "train.py", cwd=tmp_path)
    assert done.process.returncode == 0, done.err
    found = set((tmp_path / "files").read_text().split())
    assert WAYS_DIRECT <= found <= WAYS_DIRECT | NOW_AND_THEN
    assert int((tmp_path / "calls").read_text()) <= 36


IDLE_PROGRAM = """
import sys, time
import numpy as np
import ringcomm as rc

rc.init()
rc.allreduce_async(np.ones(1000), name="x").wait()  # the engine has had something to do
rc.allreduce(np.ones(1000))
time.sleep(0.5)
began_s, used_s = time.perf_counter(), time.process_time()
time.sleep(4.0)
print(f"USED {(time.process_time() - used_s) / (time.perf_counter() - began_s):.5f}")
"""


@pytest.mark.parametrize("links", [pytest.param("tcp", marks=pytest.mark.release), "auto"])
@pytest.mark.full
def test_an_idle_rank_uses_less_than_a_hundredth_of_a_core(tmp_path: Path, links: str) -> None:
    (tmp_path / "idle.py").write_text(IDLE_PROGRAM)
    done = ringrun("-np", "3", "--transport", links, "--dead-after", "3", "idle.py", cwd=tmp_path)
    used = [float(share) for share in re.findall(r"USED (\S+)", done.out)]
    assert done.process.returncode == 0 and len(used) == 3, done.err
    assert max(used) < 0.01, used


BALANCED = """
import sys
import numpy as np
import ringcomm as rc

rc.init()
matrix, data = np.ones((60, 60)), rc.balanced(960, global_batch=24)
for _ in range(int(sys.argv[1])):
    for mine in data:
        for _ in range(20 * len(mine) * (5 if rc.rank() == 1 else 1)):
            matrix = matrix @ matrix
            matrix /= matrix.max()
        rc.allreduce(np.ones(20000), weight=len(mine))
print("trained", data.state_dict()["epoch"], data.shares, flush=True)
"""


def test_shares_follow_the_speeds_in_a_running_job(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(BALANCED)
    done = ringrun("-np", "2", "train.py", "2", cwd=tmp_path)
    assert done.process.returncode == 0, done.err
    assert "localhost:1 is the slowest at step 5: batches 12/12 -> " in done.err
    shares = re.findall(r"trained 2 \((\d+), (\d+)\)", done.out)
    assert len(shares) == 2 and shares[0] == shares[1]
    assert int(shares[0][0]) > int(shares[0][1])


@pytest.mark.release
def test_advice_instead_of_training(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(BALANCED)
    done = ringrun("-np", "2", "--advise", "train.py", "9", cwd=tmp_path)
    assert done.process.returncode == 0, done.err
    assert "trained" not in done.out
    assert re.search(r"^ringrun: (use|one machine alone is fastest:) localhost:0", done.err, re.MULTILINE)
    rows = re.findall(r"^ringrun: +[\d.]+ s +[\d.]+ +(float32|bf16|int8|any) ", done.err, re.MULTILINE)
    assert sorted(rows) == ["any", "any", "bf16", "float32", "int8"]
