"""Buckets, and the state of elastic training, on ranks that are threads."""

from __future__ import annotations

import weakref
from contextlib import nullcontext

import pytest
import torch
from torch import nn

import ringcomm.torch as hvd
from ringcomm.errors import ConfigError
from ringcomm.torch.buckets import EachBucket
from tests.support.service import eventually

SIZE = 2


def matrix(rank, seed=0):
    generator = torch.Generator().manual_seed(10 * seed)
    left, right = torch.randn(80, generator=generator), torch.randn(70, generator=generator)
    return torch.outer(left, right) * (rank + 1.0)


def optimizer_of(weights, **options):
    named = [(f"w{place}", weight) for place, weight in enumerate(weights)]
    return hvd.DistributedOptimizer(torch.optim.SGD(weights, lr=0.0), named, **options)


def test_gradients_that_cannot_be_one_tensor_are_reduced_separately(ranks_of):
    """Of a compression of the program's own; and of several types, with codes for some: as they are."""

    class Own(hvd.Compression.fp16):
        pass

    def run(context):
        found = []
        for compression in (Own, hvd.Compression.int8):
            types = (torch.float32, torch.float64)
            weights = [nn.Parameter(torch.zeros(80, 70, dtype=dtype)) for dtype in types]
            optimizer = optimizer_of(weights, compression=compression, groups=[weights])
            sum((weight * (context.rank + 1.0)).sum() for weight in weights).backward()
            optimizer.step()
            (bucket,) = optimizer._reducer.buckets
            assert isinstance(bucket, EachBucket)
            found += [weight.grad.unique().tolist() for weight in weights]
        return found

    assert ranks_of(SIZE, run) == [[[1.5]] * 4] * SIZE


class TestStateOfAnOptimizer:
    @pytest.mark.parametrize(
        ("here", "there", "kind", "words"),
        [
            ([2, 1], [1, 2], ConfigError, "parameter groups of other sizes"),
            ([1, 1, 1], [3], ValueError, "different number of parameter groups"),  # PyTorch's own
        ],
    )
    def test_other_parameter_groups_are_refused(self, ranks_of, here, there, kind, words):
        def run(context):
            sizes = there if context.rank else here
            groups = [{"params": [nn.Parameter(torch.ones(2)) for _ in range(size)]} for size in sizes]
            optimizer = torch.optim.SGD(groups, lr=0.1)
            refused = pytest.raises(kind, match=words)
            with refused if context.rank else nullcontext():
                hvd.broadcast_optimizer_state(optimizer, 0)

        ranks_of(SIZE, run)


class TestBuckets:
    def test_what_was_lost_before_a_dropped_reduction_is_dropped_too(self, ranks_of):
        """Codes with errors that are fed back: the next step has none of the error of what was dropped."""

        def run(context):
            weight = nn.Parameter(torch.zeros(80, 70))
            optimizer = optimizer_of([weight], compression=hvd.Compression.int8)
            (weight * matrix(context.rank, 1) * 1e4).sum().backward()
            optimizer.load_state_dict(optimizer.state_dict())
            hvd.barrier()  # by name: behind what is in progress
            optimizer.zero_grad()
            (weight * (context.rank + 1.0)).sum().backward()
            optimizer.step()
            return weight.grad.clone()

        for mean in ranks_of(SIZE, run):
            torch.testing.assert_close(mean, torch.full((80, 70), 1.5), rtol=1e-3, atol=1e-3)

    def test_layouts_are_agreed_upon_again_with_ranks_that_have_joined(self, ranks_of):
        """The rank that stays has found its table sparse; the new one does not use it in its first step."""

        def made():
            table, weight = nn.Embedding(3, 2, sparse=True), nn.Parameter(torch.zeros(2))
            return optimizer_of([table.weight, weight]), table, weight

        stays = []

        def run(context):
            if context.rank == 0 and not stays:
                stays.extend(made())
            optimizer, table, weight = stays if context.rank == 0 else made()
            found = []
            for user in range(SIZE):
                optimizer.zero_grad()
                loss = (weight * (context.rank + 1.0)).sum()
                if context.rank == user:
                    loss = loss + table(torch.tensor([user])).sum()
                loss.backward()
                optimizer.step()
                found += [table.weight.grad.to_dense()[:, 0].tolist(), weight.grad.tolist()]
            return found

        expected = [[0.5, 0.0, 0.0], [1.5, 1.5], [0.0, 0.5, 0.0], [1.5, 1.5]]
        for _ in range(2):  # jobs one after the other
            assert ranks_of(SIZE, run) == [expected] * SIZE

    def test_gradients_are_the_programs_own_when_the_optimizer_is_gone(self, ranks_of):
        def run(context):
            weight = nn.Parameter(torch.zeros(3))
            optimizer = optimizer_of([weight])
            gone = weakref.ref(optimizer._reducer)
            del optimizer
            assert eventually(lambda: gone() is None)  # another rank may look at all reducers just now
            (weight * (context.rank + 1.0)).sum().backward()
            return weight.grad.tolist()

        assert ranks_of(SIZE, run) == [[1.0] * 3, [2.0] * 3]
