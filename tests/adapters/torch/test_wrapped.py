"""Buckets and states of optimizers, and parameters and gradients that change, on ranks that are threads."""

from __future__ import annotations

import weakref
from contextlib import nullcontext, suppress

import pytest
import torch
from torch import nn

import ringcomm.torch as hvd
from ringcomm.errors import ConfigError
from ringcomm.torch.reducer import FlatBucket
from tests.support.service import eventually

SIZE = 2


class Own(hvd.Compression.fp16):
    """A compression of the program's own."""


def weights_of(count=1, length=3):
    """Parameters of zeros."""
    return [nn.Parameter(torch.zeros(length)) for _ in range(count)]


def sgd(weights, lr=1.0, **options):
    named = [(f"w{place}", weight) for place, weight in enumerate(weights)]
    return hvd.DistributedOptimizer(torch.optim.SGD(weights, lr=lr), named, **options)


def backward(context, *weights):
    """Gradients of rank + 1."""
    sum((weight * (context.rank + 1.0)).sum() for weight in weights).backward()


@pytest.mark.parametrize("compression", [hvd.Compression.none, hvd.Compression.int8])
def test_what_drops_reductions_waits_for_them(ranks_of, compression):
    """Otherwise the engine would still have their names, which the next backward pass uses."""

    def run(context):
        weight = nn.Parameter(torch.zeros(400, 500))
        optimizer = sgd([weight], compression=compression)
        for drop in (
            lambda: optimizer.load_state_dict(optimizer.state_dict()),
            lambda: optimizer.set_backward_passes_per_step(1),
        ):
            backward(context, weight)
            drop()
            optimizer.zero_grad()
            backward(context, weight)
            optimizer.step()
        return weight.grad.mean().item()

    assert ranks_of(SIZE, run) == pytest.approx([1.5] * SIZE, rel=1e-3)


class Failing(torch.autograd.Function):
    """Its backward pass fails."""

    @staticmethod
    def forward(ctx, values):
        return values.clone()

    @staticmethod
    def backward(ctx, gradients):
        raise ArithmeticError


@pytest.mark.parametrize("way", ["load", "wrap again", "next trial", "next trial, the last one is kept"])
def test_a_step_that_one_rank_leaves_in_the_backward_pass_has_ended_when_the_next_begins(ranks_of, way):
    """Rank 0 has not submitted a reduction that rank 1 has: it must not get the next step's values."""

    def run(context):
        weights = weights_of(2)
        optimizer, kept = sgd(weights, groups=2, sparse_as_dense=True), None
        first = Failing.apply(weights[0]) if context.rank == 0 else weights[0]
        with suppress(ArithmeticError):
            (first.sum() + (weights[1] * 7.0).sum()).backward()
        del first
        if way == "load":
            optimizer.load_state_dict(optimizer.state_dict())
            optimizer.zero_grad()
        elif way == "wrap again":
            kept, optimizer = optimizer, sgd(weights, groups=2)
            optimizer.zero_grad()
        else:
            kept = optimizer if "kept" in way else None
            weights = weights_of(2)
            optimizer = sgd(weights, groups=2, sparse_as_dense=True)
        backward(context, *weights)
        optimizer.step()
        del kept
        return [weight.tolist() for weight in weights]

    assert ranks_of(SIZE, run) == [[[-1.5] * 3] * 2] * SIZE


@pytest.mark.parametrize("begin", ["apart", "apart, then broadcast", "alike", "apart with Adasum"])
def test_ranks_that_train_different_models_are_warned_once(ranks_of, caplog, begin):
    options = {"op": hvd.Adasum} if "Adasum" in begin else {}

    def run(context):
        weights = [nn.Parameter(torch.full((3, 2), 1.0 + 1e-6 * context.rank)), *weights_of()]
        if "apart" in begin:
            weights[0].data += context.rank
        optimizer = sgd(weights, lr=0.1, **options)
        for step in range(8):
            backward(context, *weights)
            optimizer.step()
            if "broadcast" in begin and not step:
                hvd.broadcast_parameters({"w": weights[0].data}, 0)

    ranks_of(SIZE, run)
    assert sum("train different models" in item.message for item in caplog.records) == (
        begin in ("apart", "apart with Adasum")
    )


def test_a_parameter_that_another_optimizer_is_reducing_is_refused(ranks_of):
    def run(context):
        weights = weights_of(3)
        older, newer = sgd(weights[:2]), sgd(weights[1:])
        backward(context, *weights)
        with pytest.raises(ConfigError, match="w1 belongs to two DistributedOptimizers"):
            older.step()
        newer.step()
        older.step()
        return weights[1].tolist()

    assert ranks_of(SIZE, run) == [[-3.0] * 3] * SIZE


class TestSparseGradients:
    @staticmethod
    def train(context, used, **options):
        """The first row of a table after each of three steps with momentum, in which ranks use it or not."""
        table, weight = nn.Embedding(6, 2, sparse=True), nn.Parameter(torch.zeros(2))
        nn.init.zeros_(table.weight)
        plain = torch.optim.SGD([table.weight, weight], lr=1.0, momentum=0.5)
        optimizer = hvd.DistributedOptimizer(plain, [("table", table.weight), ("weight", weight)], **options)
        found = []
        for step in range(3):
            optimizer.zero_grad()
            loss = weight.sum()
            if used(context.rank, step):
                loss = loss + 2 * table(torch.tensor([0])).sum()
            loss.backward()
            optimizer.step()
            found.append(table.weight[0, 0].item())
        return found

    def test_a_rank_without_one_gets_a_dense_one_as_the_others(self, ranks_of):
        """If they are reduced as dense ones; the optimizer's state is dense or sparse for good."""

        def run(context):
            return self.train(context, lambda rank, step: rank == 0 or step == 0, sparse_as_dense=True)

        assert ranks_of(SIZE, run) == [[-2.0, -4.0, -6.0]] * SIZE

    def test_without_one_on_any_rank_the_optimizer_leaves_the_parameter_as_it_is(self, ranks_of):
        """Also its momentum, which applies where only one rank has none."""

        def run(context):
            return self.train(context, lambda rank, step: step == 0 or step == 2 and rank == 0)

        assert ranks_of(SIZE, run) == [[-2.0, -2.0, -4.0]] * SIZE

    @pytest.mark.parametrize("options", [{}, {"groups": 1}, {"compression": Own}, {"op": hvd.Sum}])
    def test_a_rank_without_one_in_its_first_step_counts_zeros(self, ranks_of, options):
        """A table that no rank uses at first, and that rank 0 uses before the others."""

        def run(context):
            return [
                self.train(context, lambda rank, step: rank == 0 or step > 0, **options),
                self.train(context, lambda rank, step: step > 0 and (rank == 0 or step > 1), **options),
            ]

        size = SIZE if "op" in options else 1
        wanted = [[-1.0 * size, -3.5 * size, -6.75 * size], [0.0, -1.0 * size, -3.5 * size]]
        assert ranks_of(SIZE, run) == [wanted] * SIZE

    def test_one_that_no_rank_had_in_the_first_steps_is_sparse_as_with_one_process(self, ranks_of):
        def run(context):
            table, weight = nn.Embedding(6, 2, sparse=True), nn.Parameter(torch.zeros(2))
            optimizer, found = sgd([weight, table.weight]), []
            for step in range(4):
                optimizer.zero_grad()
                loss = weight.sum()
                if step == 3 or step == 2 and context.rank:
                    loss = loss + table(torch.tensor([context.rank, 2])).sum()
                loss.backward()
                optimizer.step()
                gradient = table.weight.grad
                found.append(
                    gradient if gradient is None else (gradient.is_sparse, gradient.to_dense()[:, 0].tolist())
                )
            return found

        later = [(True, [0.0, 0.5, 0.5, 0.0, 0.0, 0.0]), (True, [0.5, 0.5, 1.0, 0.0, 0.0, 0.0])]
        assert ranks_of(SIZE, run) == [[None, None, *later]] * SIZE

    @pytest.mark.parametrize("first", [0, 1])
    def test_one_that_is_dense_on_some_ranks_has_one_layout_on_all(self, ranks_of, first):
        def run(context):
            table = nn.Embedding(6, 2, sparse=True)
            optimizer = sgd([table.weight])
            for step in range(2):
                optimizer.zero_grad()
                loss = table(torch.tensor([context.rank, 2])).sum()
                if context.rank and step >= first:
                    loss = loss + table.weight.sum()
                loss.backward()
                optimizer.step()
            return table.weight.grad.layout, table.weight.grad.to_dense()[:, 0].tolist()

        (layout, values), *others = ranks_of(SIZE, run)
        assert values == [1.0, 1.0, 1.5, 0.5, 0.5, 0.5] and others == [(layout, values)] * (SIZE - 1)


@pytest.mark.parametrize("options", [{}, {"compression": Own}], ids=["in one tensor", "separately"])
def test_a_reduced_gradient_has_one_layout_and_type_on_all_ranks(ranks_of, options):
    """That of its parameter, whatever the ranks' own gradients have: optimizers round by them."""

    def run(context):
        weight = nn.Parameter(torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last))
        plain, half = nn.Parameter(torch.zeros(4, 3)), nn.Parameter(torch.zeros(3))
        if hasattr(half, "grad_dtype"):
            half.grad_dtype = None
        optimizer = sgd([weight, plain, half], **options)
        found = []
        for step in range(2):
            if context.rank == 0:
                weight.grad, plain.grad = torch.ones(2, 3, 4, 4), torch.ones(3, 4).t()
                half.grad = torch.ones(3, dtype=torch.float64 if hasattr(half, "grad_dtype") else None)
            elif step:
                weight.grad, plain.grad, half.grad = torch.ones(4, 4, 3, 2).permute(3, 2, 0, 1), None, None
            optimizer.synchronize()
            found += [(item.grad.stride(), item.grad.dtype) for item in (weight, plain, half)]
        return found

    kinds = [((48, 1, 12, 3), torch.float32), ((3, 1), torch.float32), ((1,), torch.float32)]
    assert ranks_of(SIZE, run) == [kinds * 2] * SIZE


def test_a_sparse_state_is_broadcast(ranks_of):
    def run(context):
        table = nn.Embedding(6, 2, sparse=True)
        optimizer = torch.optim.SGD(table.parameters(), lr=1.0, momentum=0.5)
        if context.rank == 0:
            table(torch.tensor([3])).sum().backward()
            optimizer.step()
        hvd.broadcast_optimizer_state(optimizer, 0)
        state = optimizer.state[table.weight]["momentum_buffer"]
        return state.is_sparse, state.to_dense()[:, 0].tolist()

    assert ranks_of(SIZE, run) == [(True, [0.0, 0.0, 0.0, 1.0, 0.0, 0.0])] * SIZE


def matrix(rank, seed=0):
    generator = torch.Generator().manual_seed(10 * seed)
    left, right = torch.randn(80, generator=generator), torch.randn(70, generator=generator)
    return torch.outer(left, right) * (rank + 1.0)


def test_gradients_that_cannot_be_one_tensor_are_reduced_separately(ranks_of):
    """Of a compression of the program's own; and of several types, with codes for some: as they are."""

    def run(context):
        found = []
        for compression in (Own, hvd.Compression.int8):
            types = (torch.float32, torch.float64)
            weights = [nn.Parameter(torch.zeros(80, 70, dtype=dtype)) for dtype in types]
            optimizer = sgd(weights, compression=compression, groups=[weights])
            sum((weight * (context.rank + 1.0)).sum() for weight in weights).backward()
            optimizer.step()
            (bucket,) = optimizer._reducer.buckets
            assert not isinstance(bucket, FlatBucket)
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
            optimizer = sgd([weight], compression=hvd.Compression.int8)
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
            return sgd([table.weight, weight]), table, weight

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
            optimizer = sgd([weight])
            gone = weakref.ref(optimizer._reducer)
            del optimizer
            assert eventually(lambda: gone() is None)  # another rank may look at all reducers just now
            (weight * (context.rank + 1.0)).sum().backward()
            return weight.grad.tolist()

        assert ranks_of(SIZE, run) == [[1.0] * 3, [2.0] * 3]
