"""Every collective of ringcomm.mlx against NumPy, on trees, dtypes, empty arrays and process sets."""

from __future__ import annotations

from typing import Any, Callable, List

import ml_dtypes  # noqa: F401 - gives NumPy the name bfloat16
import mlx.core as mx
import numpy as np

import ringcomm as rc
import ringcomm.mlx as hvd
from ringcomm.mlx.arrays import from_host, to_host
from tests.adapters.jobs import close, everybodys, numbers, same_everywhere
from tests.adapters.signatures import functions_of
from tests.support.errors import raises
from tests.support.options import compare_forms

DTYPES = ("float32", "bfloat16", "float16", "float64", "int32", "int64", "int8", "uint8", "bool", "complex64")


def ranks(value: Callable[[int], Any]) -> List[Any]:
    return [np.asarray(value(rank)) for rank in range(rc.size())]


def numpy_name(array: mx.array) -> str:
    return to_host(array).dtype.name


def check_allreduce_of_every_dtype() -> None:
    cases = [(hvd.Average, dtype) for dtype in DTYPES[:-2]]
    cases += [(op, "float32") for op in (hvd.Sum, hvd.Max, hvd.Min)]
    with mx.stream(mx.cpu):  # the one that has float64
        for op, dtype in cases:
            whole = everybodys((3, 5), dtype)
            expected = {hvd.Sum: whole.sum, hvd.Max: whole.max, hvd.Min: whole.min}.get(op, whole.mean)(0)
            mine = from_host(numbers(hvd.rank(), (3, 5), dtype))
            found = hvd.allreduce(mine, op)
            assert found.dtype == mine.dtype and numpy_name(found) == dtype
            close(to_host(found), expected)
            same_everywhere(to_host(found))


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


def check_no_input_is_changed() -> None:
    own = mx.full((5000,), hvd.rank() + 1.0)
    double = own + own
    total = float(sum(range(rc.size() + 1)))
    for found, value in (
        (hvd.allreduce(own, hvd.Sum), total), (hvd.allreduce([own, own], hvd.Sum)[1], total),
        (hvd.broadcast(own), 1.0), (own, hvd.rank() + 1.0), (double, 2 * (hvd.rank() + 1.0)),
    ):  # fmt: skip
        assert mx.all(found == value).item()


def check_gradients_and_transformations() -> None:
    """The gradient of a sum is the sum of all gradients. An error says that MLX compiles no collective."""
    x, size = mx.arange(3.0) + hvd.rank(), rc.size()
    slope = mx.grad(lambda x: (hvd.allreduce({"x": x}, hvd.Sum)["x"] * (hvd.rank() + 1.0)).sum())(x)
    assert slope.tolist() == [size * (size + 1) / 2] * 3
    assert mx.grad(lambda x: hvd.allreduce(x, compression="bf16").sum())(x).tolist() == [1.0] * 3
    for changed in (mx.compile(hvd.allreduce), mx.vmap(hvd.allreduce), mx.compile(hvd.allgather)):
        raises(rc.NotOfferedError, lambda changed=changed: changed(mx.ones((3, 2))), "outside")
    raises(ValueError, lambda: hvd.allreduce(mx.ones((2, 3)) @ mx.ones((2, 3))))


def check_every_codec() -> None:
    own = [np.random.default_rng(rank).standard_normal((70, 80), np.float32) for rank in range(rc.size())]
    total, mine = np.sum(own, axis=0), mx.array(own[rc.rank()])
    codecs = (("bf16", 0.05), (hvd.Compression.int8, 0.15), ("int4", 2.5))
    for compression, most in codecs:
        found = to_host(hvd.allreduce(mine, hvd.Sum, compression=compression))
        same_everywhere(found)
        assert np.abs(found - total).max() < most, compression
        assert rc.size() == 1 or (found != total).any(), compression


def check_rows() -> None:
    rank, size = hvd.rank(), rc.size()
    for dtype in DTYPES[:2] + DTYPES[4:]:
        given = [np.full((source + 1, 2), source).astype(dtype) for source in range(size)]
        gathered = hvd.allgather([from_host(given[rank])])[0]
        assert numpy_name(gathered) == dtype and np.array_equal(to_host(gathered), np.concatenate(given))
        same = from_host(given[rank][:1])
        assert np.array_equal(to_host(hvd.broadcast(same, size - 1)), given[-1][:1])
    splits = [(rank + place) % 3 for place in range(size)]
    rows, received = hvd.alltoall(mx.full((sum(splits), 2), rank), splits)
    counts = [(source + rank) % 3 for source in range(size)]
    assert received.tolist() == counts and received.dtype == mx.int32
    assert np.array_equal(rows, np.concatenate([np.full((n, 2), source) for source, n in enumerate(counts)]))
    for length in (size, size + 1, 1):
        whole = ranks(lambda source, length=length: np.arange(2.0 * length).reshape(length, 2) + source)
        found = hvd.reducescatter(mx.array(whole[rank].astype(np.float32)), hvd.Sum)
        assert np.array_equal(found, np.array_split(sum(whole), size)[rank])
    hvd.barrier()
    raises(rc.ShapeError, lambda: hvd.allgather(mx.array(1.0)))
    raises(rc.ShapeError, lambda: hvd.reducescatter(mx.array(1.0)))
    raises(rc.ShapeError, lambda: hvd.alltoall(mx.array(1.0)))
    raises(rc.NotOfferedError, lambda: hvd.reducescatter(mx.ones(3), hvd.Adasum))
    if size > 1:
        raises(rc.ConfigError, lambda: hvd.alltoall(mx.zeros(size + 1)))


def check_every_form_with_every_option() -> None:
    names, of_all = functions_of("ringcomm.mlx"), list(range(rc.size()))
    assert compare_forms(hvd, names, of_all, rc.rank(), hvd.global_process_set, mx.array, np.asarray) > 15


def check_process_sets() -> None:
    if rc.size() < 3:
        return
    first = hvd.add_process_set([0, 2])
    if hvd.rank() in (0, 2):
        assert hvd.allreduce(mx.full((3,), hvd.rank() + 1.0), hvd.Sum, process_set=first).tolist() == [4] * 3
        assert hvd.allgather(mx.arange(2) + hvd.rank(), process_set=first).tolist() == [0, 1, 2, 3]
    else:
        raises(rc.UnknownProcessSetError, lambda: hvd.allreduce(mx.ones(3), process_set=first))
    hvd.remove_process_set(first)


def check_ranks_that_disagree_get_the_same_error_and_go_on() -> None:
    if rc.size() == 1:
        return
    text = str(raises(rc.MismatchError, lambda: hvd.allreduce(mx.ones(3 + hvd.rank())), "(3,)"))
    assert len(set(rc.allgather_object(text))) == 1
    assert hvd.allreduce(mx.ones(2)).tolist() == [1, 1]


def check_arrays_of_mlx_in_the_calls_for_numpy() -> None:
    found = rc.allreduce(mx.full((3,), float(rc.rank())), rc.Sum)
    assert isinstance(found, np.ndarray) and found.tolist() == [sum(range(rc.size()))] * 3
