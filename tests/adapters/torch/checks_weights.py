"""What every rank checks about weighted averages of tensors: values, gradients, weight 0."""

from __future__ import annotations

import torch

import ringcomm as rc
import ringcomm.torch as hvd
from tests.support.errors import raises


def tensor_of(rank: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(37, generator=torch.Generator().manual_seed(rank), dtype=torch.float64).to(dtype)


def weights() -> list:
    """The last rank has nothing, unless it is alone."""
    return [3.0 + rank for rank in range(hvd.size() - 1)] + [0.0 if hvd.size() > 1 else 3.0]


def own(dtype: torch.dtype = torch.float64) -> torch.Tensor:
    if weights()[hvd.rank()]:
        return tensor_of(hvd.rank(), dtype)
    return torch.full((37,), float("nan"), dtype=dtype)


def average() -> torch.Tensor:
    parts = [weight * tensor_of(rank) for rank, weight in enumerate(weights()) if weight]
    return sum(parts) / sum(weights())  # type: ignore[return-value]


def check_every_function() -> None:
    weight = weights()[hvd.rank()]
    results = [
        hvd.allreduce(own(), weight=weight),
        hvd.allreduce_(own(), weight=weight, name="in place"),
        *hvd.grouped_allreduce([own(), own()], weight=weight),
        *hvd.grouped_allreduce_([own(), own()], weight=weight),
        hvd.synchronize(hvd.allreduce_async(own(), weight=weight, name="a")),
        hvd.synchronize(hvd.allreduce_async_(own(), weight=weight, name="b")),
        *hvd.synchronize(hvd.grouped_allreduce_async([own()], weight=weight, name="c")),
        *hvd.synchronize(hvd.grouped_allreduce_async_([own()], weight=weight, name="d")),
    ]
    for result in results:
        torch.testing.assert_close(result, average(), rtol=1e-12, atol=1e-14)
    half = hvd.allreduce(own(torch.float32), weight=weight, compression=hvd.Compression.fp16)
    torch.testing.assert_close(half.double(), average(), rtol=2e-2, atol=2e-2)


def check_gradients_flow_through_it() -> None:
    """Of the loss of all ranks together: the sum of ``c_r * allreduce(x)`` over ranks."""
    weight = weights()[hvd.rank()]
    given = tensor_of(hvd.rank()).requires_grad_()
    (hvd.allreduce(given, weight=weight) * (1.0 + hvd.rank())).sum().backward()
    share = weight / sum(weights()) * sum(1.0 + rank for rank in range(hvd.size()))
    torch.testing.assert_close(given.grad, torch.full((37,), share, dtype=torch.float64), rtol=1e-12, atol=0)


def check_disagreements() -> None:
    if hvd.size() > 1:
        weight = 1.0 if hvd.rank() else None
        text = "some with and some without weights"
        raises(rc.MismatchError, lambda: hvd.allreduce(own(), weight=weight, name="mixed"), text)
    nothing = "weights of all ranks are 0"
    raises(rc.RingcommError, lambda: hvd.allreduce(own(), weight=0.0, name="nothing"), nothing)
    raises(rc.Misuse, lambda: hvd.allreduce(own(), weight=1.0, op=hvd.Sum), "op=Sum")
