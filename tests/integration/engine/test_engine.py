"""The engine between real ranks: disagreement, late ranks, failures, its end; numbers in any order."""

from __future__ import annotations

import ctypes
import gc
import logging
import random
import socket
import threading
import time

import numpy as np
import psutil
import pytest

from ringcomm.collective.observe import Progress
from ringcomm.collective.options import Options
from ringcomm.engine import coordinator, request
from ringcomm.engine.peer_channels import HeartbeatThread, SilenceLimits
from ringcomm.engine.process_sets import UnknownProcessSetError
from ringcomm.errors import (
    BrokenInvariantError,
    ConfigError,
    DuplicateNameError,
    MismatchError,
    Misuse,
    NotInitializedError,
    PeerLostError,
    RingcommError,
    ShapeError,
    UnsupportedDtypeError,
)
from ringcomm.group.failures import Reporter
from ringcomm.ops import Adasum, Average, Max, Sum
from ringcomm.testing.cluster import RankFailed, run_ranks
from ringcomm.transport.tcp import SocketFabric, SocketLink
from tests.integration.engine.engines import LIMIT_S, PLAIN, plain
from tests.support.service import eventually


class TestTrouble:
    def test_disagreement_is_an_error_on_all_and_the_next_one_works(self, on_ranks):
        def work(context):
            texts = []
            for n, length in enumerate((3, 3 + context.rank % 2)):
                array = np.ones(length)
                handle = context.engine.allreduce([array], Sum, "loss" if n else "")
                if n:
                    with pytest.raises(MismatchError) as caught:
                        handle.wait(LIMIT_S)
                    texts.append(str(caught.value))
                else:
                    handle.wait(LIMIT_S)
            again = np.ones(2)
            context.engine.allreduce([again], Sum, "loss").wait(LIMIT_S)
            return texts, again.tolist()

        results = on_ranks(3, work)
        assert len({text for (text,), _ in results}) == 1
        text = results[0][0][0]
        assert "Mismatched allreduce tensor shapes" in text and "test_engine.py" in text
        assert [again for _, again in results] == [[3.0, 3.0]] * 3

    def test_what_makes_no_sense_is_refused_here(self):
        def work(context):
            engine = context.engine
            with pytest.raises(UnsupportedDtypeError):
                engine.allreduce([np.ones(2, bool)], Average)
            with pytest.raises(UnsupportedDtypeError):
                engine.allreduce([np.ones(2, int)], Adasum)
            with pytest.raises(UnsupportedDtypeError):
                engine.reducescatter([np.ones(2)], [(2,)], Options(Adasum))
            with pytest.raises(UnsupportedDtypeError):
                engine.broadcast([np.array(["x"])], 0)
            with pytest.raises(Misuse, match="zero-dimensional"):
                engine.allgather([np.ones(1)], [()])
            with pytest.raises(ConfigError, match="root_rank=7: this job has the ranks 0, 1"):
                engine.broadcast([np.ones(1)], 7)
            with pytest.raises(Misuse, match="have sum 2, the tensor 3 rows"):
                engine.alltoall(np.ones(3), (3,), [1, 1])
            with pytest.raises(UnknownProcessSetError, match="does not exist"):
                engine.allreduce([np.ones(1)], Sum, process_set=4)
            if context.rank == 0:
                hold = engine.allreduce([np.ones(1)], Sum, "x")
                with pytest.raises(DuplicateNameError, match="same name"):
                    engine.allreduce([np.ones(1)], Sum, "x")
                context.barrier()
                hold.wait(LIMIT_S)
            else:
                context.barrier()
                engine.allreduce([np.ones(1)], Sum, "x").wait(LIMIT_S)
            return True

        assert all(run_ranks(2, work))

    @pytest.mark.parametrize("leaver", [0, 1, 2])
    def test_a_rank_that_leaves_while_others_wait_is_named(self, leaver):
        def work(context):
            context.engine.barrier().wait(LIMIT_S)
            if context.rank == leaver:
                return None
            for _ in range(2):
                with pytest.raises((PeerLostError, Misuse)) as caught:
                    context.engine.allreduce([np.ones(1)], Sum, "x").wait(LIMIT_S)
            assert f"rank {leaver}" in str(caught.value)
            return True

        with_rendezvous = run_ranks(3, work, "tcp")
        assert with_rendezvous == [None if rank == leaver else True for rank in range(3)]

    def test_close_with_something_on_its_way(self, on_ranks):
        failed = threading.Event()

        def work(context):
            if context.rank:
                context.barrier()
                return failed.wait(LIMIT_S)  # it leaves later
            handle = context.engine.allreduce([np.ones(1)], Sum, "x")
            context.barrier()
            context.close()
            with pytest.raises(NotInitializedError, match="shut down"):
                handle.wait(LIMIT_S)
            with pytest.raises(NotInitializedError, match="shut down"):
                context.engine.allreduce([np.ones(1)], Sum, "y")
            failed.set()
            return True

        assert all(on_ranks(2, work))


def test_one_rank_needs_no_thread():
    before = threading.active_count()

    def work(context):
        assert threading.active_count() == before + 1  # the rank itself
        array = np.arange(3)
        handle = context.engine.allreduce([array], Average, postscale_factor=2.0)
        assert handle.done()
        handle.wait()
        assert context.engine.join().wait() == 0
        return array.tolist()

    assert run_ranks(1, work) == [[0, 2, 4]]


class TestLate:
    """A rank that does not enter an operation is late: asked where it is, given up at last, or excused."""

    def test_a_pause_is_waited_for(self, caplog):
        def work(context):
            if context.rank == 1:
                with context.engine.pause("saving checkpoint"):
                    time.sleep(0.8)
            context.engine.allreduce([np.ones(1)], Sum, "grad").wait(LIMIT_S)
            return True

        settings = plain(late_after_s=0.4)
        assert run_ranks(2, work, settings=settings) == [True, True]
        assert not [record for record in caplog.records if "waited for" in record.getMessage()]


# ---- what operations give, in whatever order ranks and threads submit them -----------------------


def test_more_rows_than_an_array_can_have_fail_that_operation_alone():
    """Also without elements: the engine goes on, and so do calls in order."""

    def work(context):
        many = np.empty((2**62, 0), np.int8)
        few, other = np.ones((2, 3)), np.ones((1, 2))
        handles = [
            context.engine.allgather([item.reshape(-1)], [item.shape], name)
            for item, name in ((few, "few"), (many, "many"), (other, "other"))
        ]
        with pytest.raises(ShapeError, match="9223372036854775808 rows together"):
            handles[1].wait(LIMIT_S)
        with pytest.raises(ShapeError, match="rows together"):
            context.allgather(many)
        return [handles[place].wait(LIMIT_S)[0].shape for place in (0, 2)], context.allgather(few).shape

    assert run_ranks(2, work) == [([(4, 3), (2, 2)], (4, 3))] * 2


def values(rank: int, seed: int, *shape: int, dtype=np.float64):
    return np.random.default_rng((rank, seed)).integers(-40, 40, shape).astype(dtype)


class TestNumbers:
    def test_small_ones_that_all_wait_for_need_no_collective(self, on_ranks, size):
        def work(context):
            engine, rank, runs = context.engine, context.rank, []
            run = engine.buckets.run
            engine.buckets.run = lambda bucket, *more: runs.append(bucket) or run(bucket, *more)
            results = []
            for step in range(4):
                mean, last = values(rank, step, 5), values(rank, step + 50, 3)
                engine.allreduce([mean], Average, "mean", urgent=True).wait(LIMIT_S)
                engine.broadcast([last], size - 1, "last", urgent=True).wait(LIMIT_S)
                engine.barrier("end").wait(LIMIT_S)
                results.append((mean, last))
            return results, len(runs)

        for results, runs in on_ranks(size, work):
            assert runs == (3 if size > 1 else 12)
            for step, (mean, last) in enumerate(results):
                np.testing.assert_allclose(mean, sum(values(r, step, 5) for r in range(size)) / size)
                np.testing.assert_array_equal(last, values(size - 1, step + 50, 3))

    @pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
    def test_adasum(self, size):
        def pairwise(vectors):
            """The definition, on all vectors at once."""
            power = 1 << (len(vectors).bit_length() - 1)
            vectors = list(vectors)
            for extra in range(power, len(vectors)):
                vectors[extra - power] = mixed(vectors[extra - power], vectors[extra])
            vectors = vectors[:power]
            while len(vectors) > 1:
                vectors = [mixed(a, b) for a, b in zip(vectors[::2], vectors[1::2])]
            return vectors[0]

        def mixed(a, b):
            return a * (1 - a @ b / (2 * (a @ a))) + b * (1 - a @ b / (2 * (b @ b)))

        def work(context):
            array = np.random.default_rng(context.rank).normal(size=50)
            context.engine.allreduce([array], Adasum, "g").wait(LIMIT_S)
            return array, context.allreduce(np.random.default_rng(context.rank).normal(size=50), Adasum)

        results = run_ranks(size, work)
        expected = pairwise([np.random.default_rng(rank).normal(size=50) for rank in range(size)])
        for by_name, in_order in results:
            np.testing.assert_allclose(by_name, expected)
            assert by_name.tobytes() == in_order.tobytes() == results[0][0].tobytes()


class TestOrder:
    def test_each_rank_has_an_order_of_its_own(self, on_ranks, monkeypatch):
        """Names hit and miss the cache, shapes change, sets and groups are mixed in."""
        rounds, names = 4, 40
        for module in (coordinator, request):
            monkeypatch.setattr(module, "MAX_NUMBERS", 25)

        def work(context):
            engine, rank, size = context.engine, context.rank, context.size
            chance = random.Random(rank)
            number = engine.add_process_set([0, 2])
            for turn in range(rounds):
                order = list(range(names))
                chance.shuffle(order)
                started = []
                for n in order:
                    members = (0, 2) if n % 5 == 0 else tuple(range(size))
                    if rank not in members:
                        continue
                    length = 3 + (n + turn * (n % 3)) % 7
                    array = np.full(length, rank + n, np.float64)
                    process_set = number if n % 5 == 0 else 0
                    handle = engine.allreduce([array], Sum, f"t{n}", process_set=process_set)
                    started.append((handle, array, length, sum(members) + n * len(members)))
                    if chance.random() < 0.1:
                        time.sleep(chance.random() * 0.003)
                chance.shuffle(started)
                for handle, array, length, expected in started:
                    handle.wait(LIMIT_S)
                    np.testing.assert_array_equal(array, np.full(length, expected))
            assert engine.remove_process_set(number)
            return engine.pending()

        assert on_ranks(3, work, settings=plain(fusion_bytes=100)) == [[], [], []]

    def test_join_with_uneven_data(self, on_ranks, size):
        def work(context):
            sums = []
            for _ in range(context.rank * 2):
                array = np.ones(4)
                context.engine.allreduce([array], Average).wait(LIMIT_S)
                sums.append(float(array[0]))
            last = context.engine.join().wait(LIMIT_S)
            after = np.ones(2)
            context.engine.allreduce([after], Sum).wait(LIMIT_S)
            return sums, last, after.tolist()

        results = on_ranks(size, work)
        for rank, (sums, last, after) in enumerate(results):
            assert sums == [(size - 1 - turn // 2) / size for turn in range(rank * 2)]
            assert last == size - 1 and after == [size, size]


# ---- pauses, interrupts, its end, and no leaks ---------------------------------------------------


@pytest.mark.parametrize("fails", [True, False], ids=["the block fails", "the block succeeds"])
def test_a_pause_during_which_the_job_fails(fails):
    """Its end does not hide why the block has failed; otherwise the program learns of the loss there."""
    lost, problem = PeerLostError("rank 7 was lost", rank=7), OSError("no space left on device")

    def work(context):
        expected = OSError if fails else PeerLostError
        with pytest.raises(expected) as caught, context.engine.pause("saving checkpoint"):
            context.engine._thread._state.broken = lost
            if fails:
                raise problem
        assert caught.value is problem if fails else str(caught.value) == str(lost)
        return context.engine.history.paused

    assert run_ranks(2, work, settings=PLAIN) == ["", ""]


def lost_by_rank_0(work):
    """Rank 1 works, and ends regularly; rank 0 waits, and has lost it: the error of rank 0."""

    def each(context):
        context.engine.barrier("all are here").wait(LIMIT_S)
        return work(context) if context.rank else context.engine.barrier("never").wait(LIMIT_S)

    with pytest.raises(RankFailed) as caught:
        run_ranks(2, each, "tcp", PLAIN)
    error, nothing = caught.value.errors
    assert nothing is None and isinstance(error, PeerLostError) and error.rank == 1
    return error


class TestInterrupts:
    def test_a_wait_that_is_interrupted_ends_the_job_and_names_the_rank(self):
        """An exception from outside, as Ctrl-C is one in the main thread."""

        def work(context):
            ident = threading.get_ident()
            handle = context.engine.allreduce([np.ones(3)], Sum, "x")
            errors = []

            def other():
                with pytest.raises(RingcommError) as caught:
                    handle.wait()
                errors.append(caught.value)

            thread = threading.Thread(target=other)
            thread.start()
            state = context.engine._thread._state

            def interrupt():
                if eventually(lambda: len(state.waiters.waits) == 2):
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), ctypes.py_object(Stop))

            threading.Thread(target=interrupt).start()
            with pytest.raises(Stop):
                handle.wait()
            thread.join(LIMIT_S)
            assert "was interrupted (Stop) in allreduce(shape (3,), float64, op=Sum) 'x'" in str(errors[0])
            with pytest.raises(RingcommError):
                context.engine.barrier("again")
            return "interrupted"

        class Stop(BaseException):
            pass

        assert "interrupted (Stop)" in str(lost_by_rank_0(work))

    def test_between_the_parts_of_a_call(self):
        """No other rank could find out that the rest does not come."""

        def work(context):
            with pytest.raises(KeyError), context.engine.in_parts():
                raise KeyError("learning_rate")
            assert eventually(lambda: context.engine._thread._state.broken is not None)
            return True

        assert "KeyError: 'learning_rate'" in str(lost_by_rank_0(work))


def test_a_bug_in_the_engine_fails_what_is_on_its_way_and_the_job(caplog):
    def work(context):
        handle = context.engine.allreduce([np.ones(3)], Sum, "x")
        assert context.engine._thread._guarded(lambda: 1 // 0) is False
        with pytest.raises(BrokenInvariantError, match="engine of rank 1 failed: ZeroDivisionError"):
            handle.wait(LIMIT_S)
        with pytest.raises(Misuse, match="has failed before.*ZeroDivisionError"):
            context.engine.barrier("again")
        return True

    lost_by_rank_0(work)
    assert "the engine of rank 1 failed" in caplog.text


def opened():
    process = psutil.Process()
    return process.num_fds(), threading.active_count()


@pytest.mark.release
@pytest.mark.timeout(300)
def test_a_hundred_thousand_small_operations_leak_nothing():
    steady = {}

    def work(context):
        array = np.ones(2)
        for n in range(50_000):
            context.engine.allreduce([array], Max, "same" if n % 2 else "").wait(2 * LIMIT_S)
            if n == 5_000 and context.rank == 0:
                gc.collect()
                steady["before"] = (psutil.Process().memory_info().rss, *opened())
        if context.rank == 0:
            gc.collect()
            steady["after"] = (psutil.Process().memory_info().rss, *opened())
        context.barrier()

    run_ranks(2, work, "memory", timeout_s=280.0)
    before, after = steady["before"], steady["after"]
    assert after[1:] == before[1:]
    assert after[0] - before[0] < 3_000_000


# ---- the heartbeat thread of ranks without an engine ---------------------------------------------


HOSTS = ["desk", "jetson1"]
LONG = SilenceLimits(30.0, 0.0, 0.0)
WAITS = Progress(2, 0, "allreduce(shape (8,), float32, op=Sum)", (1,))


class Reports(Reporter):
    """Remembers what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.closed: list = []

    def note_closed(self, peer: int, why: str) -> None:
        self.closed.append(peer)


class Side:
    """One rank: its link, and its heartbeat thread once :meth:`begin` was called."""

    def __init__(self, rank: int, sock: socket.socket) -> None:
        self.sock = sock
        self.fabric = SocketFabric(rank, {1 - rank: SocketLink(1 - rank, sock)})
        self.reporter = Reports()
        self.failure = None
        self.failed = threading.Event()
        self.on_failure = lambda: None

    def begin(
        self,
        limits: SilenceLimits,
        progress: Progress = Progress(),  # noqa: B008
        elsewhere: str = "",
    ) -> HeartbeatThread:
        self.heartbeat = HeartbeatThread(
            self.fabric, HOSTS, limits, self.reporter, lambda: progress, self._fail, "process group 7",
            lambda: elsewhere,
        )  # fmt: skip
        return self.heartbeat

    def _fail(self, error) -> None:
        self.failure = error
        self.on_failure()
        self.failed.set()

    def end(self) -> None:
        if hasattr(self, "heartbeat"):
            self.heartbeat.stop()
        self.fabric.close()


@pytest.fixture
def sides(no_leaks):
    made = [Side(rank, sock) for rank, sock in enumerate(socket.socketpair())]
    yield made
    for side in made:
        side.end()


def test_a_rank_that_hangs_up_without_a_word_is_reported(sides):
    sides[0].begin(LONG)
    sides[1].fabric.close()
    assert eventually(lambda: sides[0].reporter.closed == [1])


def test_a_late_rank_is_named_with_its_stack(sides, caplog):
    with caplog.at_level(logging.WARNING, "ringcomm.engine"):
        sides[1].begin(SilenceLimits(30.0, 0.2, 0.0))
        sides[0].begin(SilenceLimits(30.0, 0.2, 0.0), WAITS)
        assert eventually(lambda: "for which others wait, is here" in caplog.text)
    first = next(record.getMessage() for record in caplog.records)
    assert first.startswith(f"Process group 7: {WAITS.doing}, call number 1, has waited")
    assert "on rank 0 (desk) for rank 1 (jetson1)" in first
    assert "Rank 1 (jetson1), for which others wait, is here" in caplog.text
    assert "test_a_late_rank_is_named" in caplog.text  # its main thread is this one


def test_a_bug_in_it_ends_the_group(sides, caplog):
    """Otherwise nothing would ever be found out again."""

    class Broken(Reports):
        def check(self) -> None:
            raise ZeroDivisionError("a bug")

    sides[0].reporter = Broken()
    sides[0].begin(LONG)
    assert sides[0].failed.wait(10)
    assert isinstance(sides[0].failure, BrokenInvariantError)
    assert str(sides[0].failure) == "watch over process group 7: ZeroDivisionError: a bug"
    assert "the watch over process group 7 failed on rank 0" in caplog.text
    sides[0].heartbeat.settle(LIMIT_S)  # there is nothing to wait for
