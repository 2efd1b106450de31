"""Iterations over balanced batches on one rank: positions, weights, and samples without enough memory."""

from __future__ import annotations

from itertools import islice

import pytest

from ringcomm.balance.batches import PLACEHOLDERS, Balanced, BalancedBatches
from ringcomm.errors import ConfigError
from tests.unit.balance.job import Job


def batches(count=10, global_batch=4, **options):
    return Balanced(count, global_batch, options.pop("seed", 1), context=Job(), **options)


class TestEpochs:
    def test_every_sample_is_dealt_once_and_epochs_follow_each_other(self):
        data, epochs = batches(), []
        assert len(data) == 3 and data.global_batch == 4 and data.shares == (4,)
        for epoch in range(2):
            seen, weights = [], []
            for mine in data:
                assert data.epoch == epoch
                weights.append(data.weight)
                assert len(mine) == data.weight and mine.dtype.name == "int64"
                seen += mine.tolist()
            assert sorted(seen) == list(range(10)) and weights == [4, 4, 2]
            epochs.append(seen)
        assert epochs[0] != epochs[1], "shuffled anew"


class TestPositions:
    def test_another_object_continues_where_one_was(self):
        data, whole = batches(), [mine.tolist() for mine in batches()]
        list(islice(data, 2))
        position = data.state_dict()
        assert position == {"epoch": 0, "step": 1, "seed": 1, "global_batch": 4, "count": 10}
        other = batches()
        other.load_state_dict(position)
        assert other.state_dict() == position
        other.set_epoch(0)  # as training loops do, and the position stays
        assert [mine.tolist() for mine in other] == whole[1:]
        assert other.state_dict()["epoch"] == 1 and other.state_dict()["step"] == 0

    @pytest.mark.parametrize("name", ["seed", "global_batch", "count"])
    def test_the_position_in_other_data_is_refused(self, name):
        data = batches()
        with pytest.raises(ConfigError, match=f"one of {name}=99, not "):
            data.load_state_dict({**data.state_dict(), name: 99})


class TestBatchSampler:
    def test_a_rank_without_samples_gets_some_of_weight_0(self):
        job = Job(rank=1, size=2)
        batches = BalancedBatches(10, 4, speeds=[1, 0], shuffle=False, context=job)
        assert list(islice(batches, 1)) == [[0, 1]] and batches.weight == 0
        assert PLACEHOLDERS == 2
        job.rank = 0
        assert list(islice(batches, 1)) == [[0, 1, 2, 3]] and batches.weight == 4

    @pytest.mark.parametrize(
        "problem",
        [
            MemoryError(),
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"),
            RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate"),
            type("OutOfMemoryError", (RuntimeError,), {})("CUDA out of memory"),
        ],
        ids=["python", "cpu", "windows", "gpu"],
    )
    def test_a_share_that_does_not_fit_into_memory_has_weight_0(self, problem):
        batches = BalancedBatches(20, 10, context=Job())
        weights = []
        for number, _ in enumerate(batches):
            with batches.within_memory():
                if number == 0:
                    raise problem
            weights.append(batches.weight)
        assert weights == [0, 10] and batches.pace._most == 9
