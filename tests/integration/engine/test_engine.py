"""The engine between real ranks: what it does when ranks disagree, are late or fail, and at its end."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from ringcomm.collective.options import Options
from ringcomm.engine.process_sets import UnknownProcessSetError
from ringcomm.errors import (
    ConfigError,
    DuplicateNameError,
    MismatchError,
    Misuse,
    NotInitializedError,
    PeerLostError,
    PeerStalledError,
    UnsupportedDtypeError,
)
from ringcomm.ops import Adasum, Average, Sum
from ringcomm.testing.cluster import run_ranks
from tests.integration.engine.engines import LIMIT_S, plain


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

    def test_given_up_when_a_rank_does_not_come(self):
        def work(context):
            if context.rank == 1:
                time.sleep(0.6)
                return "late"
            with pytest.raises(PeerStalledError, match="given up") as caught:
                context.engine.allreduce([np.ones(1)], Sum, "x").wait(LIMIT_S)
            assert caught.value.rank == 1
            return "told"

        assert run_ranks(2, work, settings=plain(late_after_s=0.3)) == ["told", "late"]

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
