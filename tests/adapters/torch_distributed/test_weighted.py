"""DDP's hooks that average buckets of gradients, by weights or compressed, on ranks that are threads."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

import torch

from ringcomm.balance.batches import Balanced
from ringcomm.testing.cluster import run_ranks
from ringcomm.torch.distributed import WeightedAverage, weighted_average_hook
from ringcomm.torch.distributed._hooks import _Plans
from tests.adapters.torch_distributed.harness import on_ranks


def average(state, gradients, last=True):
    """The gradients after the hook."""
    future = weighted_average_hook(state, SimpleNamespace(buffer=lambda: gradients, is_last=lambda: last))
    assert future.wait() is gradients
    return gradients.tolist()


@pytest.mark.parametrize("weights", [(1e39, 1.0), (1e-46, 1.0), (3e38, 3e38)])
def test_a_weight_that_the_type_of_the_gradients_does_not_represent_fails_everywhere(weights):
    def run(group):
        with pytest.raises(RuntimeError, match="Misuse: DDP: the weight of a rank"):
            average(WeightedAverage(weights[group.rank()], group), torch.ones(2))

    on_ranks(run, 2)


def test_balanced_batches_give_the_weights_of_each_step():
    def run(context):
        batches = Balanced(10, 4, speeds=[3.0, 1.0], context=lambda: context)
        state = WeightedAverage(batches)
        found = []
        for mine in batches:
            found.append((len(mine), state.now()))
            state.reduced()
        return found

    zero, one = run_ranks(2, run)
    assert [weight for _, weight in zero] == [count for count, _ in zero]
    assert [mine[1] + other[1] for mine, other in zip(zero, one)] == [4, 4, 2] and zero[0][1] == 3


@pytest.mark.parametrize("kind", ["int8", "bf16"])
def test_compressed_gradients_may_be_complex(kind):
    """A bucket has both parts of a complex gradient side by side."""

    def run(group):
        parameters = [torch.zeros(2, dtype=torch.complex64), torch.zeros(3)]
        buffer = torch.arange(7.0) * (group.rank() + 1)
        group.allreduce_packed(buffer, _Plans(kind).of(parameters)).wait()
        return buffer.tolist()

    assert on_ranks(run, 2) == [(torch.arange(7.0) * 1.5).tolist()] * 2
