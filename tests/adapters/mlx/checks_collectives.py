"""Every collective of ringcomm.mlx against NumPy, on trees, dtypes, empty arrays and process sets."""

from __future__ import annotations

from typing import Any

import ml_dtypes  # noqa: F401 - gives NumPy the name bfloat16
import mlx.core as mx
import numpy as np

import ringcomm as rc
import ringcomm.mlx as hvd
from ringcomm.mlx.collectives import from_host, to_host
from tests.adapters import contract
from tests.support.errors import raises

TYPES = ("float32", "bfloat16", "float16", "int32", "int64", "int8", "uint8", "bool", "complex64")


def called(function: Any, arrays: Any) -> Any:
    return [to_host(found) for found in function(*map(from_host, arrays))]


def check_results() -> None:
    contract.check_collectives(hvd, called, TYPES)
    contract.check_a_mismatch(hvd, called, rc.MismatchError)
    contract.check_every_form(hvd, "ringcomm.mlx", mx.array, np.asarray)
    with mx.stream(mx.cpu):  # the one that has float64
        contract.check_every_type(hvd, called, ["float64"])


def check_trees_scalars_and_nothing() -> None:
    rank, total = hvd.rank(), sum(range(rc.size()))
    tree = {
        "a": mx.full((2, 3), rank + 1.0), "b": [mx.array(rank, mx.bfloat16), None], "c": (mx.zeros((0, 4)),),
        "d": mx.full((2, 3), rank + 1.0).T,
    }  # fmt: skip
    found = hvd.allreduce(tree, hvd.Sum)
    assert found["a"].tolist() == [[total + rc.size()] * 3] * 2 and found["d"].shape == (3, 2)
    assert found["b"] == [total, None] and found["b"][0].dtype == mx.bfloat16 and found["b"][0].shape == ()
    assert isinstance(found["c"], tuple) and found["c"][0].shape == (0, 4)
    assert hvd.allreduce({}) == {} and hvd.broadcast([]) == [] and hvd.allgather(None) is None
    assert hvd.allreduce(rank, hvd.Sum).item() == total
    assert hvd.allreduce(np.full(2, float(rank)), hvd.Sum).tolist() == [total] * 2
    raises(rc.ConfigError, lambda: hvd.allreduce({"a": "text"}), "not on a str")


def check_gradients_and_transformations() -> None:
    """The gradient of a sum is the sum of all gradients. An error says that MLX compiles no collective."""
    x, size = mx.arange(3.0) + hvd.rank(), rc.size()
    slope = mx.grad(lambda x: (hvd.allreduce({"x": x}, hvd.Sum)["x"] * (hvd.rank() + 1.0)).sum())(x)
    assert slope.tolist() == [size * (size + 1) / 2] * 3
    assert mx.grad(lambda x: hvd.allreduce(x, compression="bf16").sum())(x).tolist() == [1.0] * 3
    for changed in (mx.compile(hvd.allreduce), mx.vmap(hvd.allreduce), mx.compile(hvd.allgather)):
        raises(rc.NotOfferedError, lambda changed=changed: changed(mx.ones((3, 2))), "outside")
    raises(ValueError, lambda: hvd.allreduce(mx.ones((2, 3)) @ mx.ones((2, 3))))


def check_what_is_refused() -> None:
    for call in (hvd.allgather, hvd.reducescatter, hvd.alltoall):
        raises(rc.ShapeError, lambda call=call: call(mx.array(1.0)))
    raises(rc.NotOfferedError, lambda: hvd.reducescatter(mx.ones(3), hvd.Adasum))
    if rc.size() > 1:
        raises(rc.ConfigError, lambda: hvd.alltoall(mx.zeros(rc.size() + 1)))


def check_arrays_of_mlx_in_the_calls_for_numpy() -> None:
    found = rc.allreduce(mx.full((3,), float(rc.rank())), rc.Sum)
    assert isinstance(found, np.ndarray) and found.tolist() == [sum(range(rc.size()))] * 3
