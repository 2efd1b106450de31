"""Messages between two ranks: by tag, in order, large and small, and errors that both ranks raise."""

from __future__ import annotations

from tests.proc.plain_jobs import run_plain

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

# A ring, with messages in both directions under way at once.
data, left, right = np.full(10, float(rank)), (rank - 1) % size, (rank + 1) % size
received = np.empty(10)
sender = threading.Thread(target=rc.send, args=(data, right))
sender.start()
rc.recv(received, left)
sender.join()
assert (received == left).all()

if rank == 0:
    for wrong in (0, size, -1):
        try:
            rc.send(data, wrong)
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
