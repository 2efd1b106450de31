"""Every collective against NumPy, on trees, dtypes, empty arrays and process sets."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import ringcomm as rc
import ringcomm.jax as hvd
from tests.adapters.jax.forms import FORMS, ranks, same
from tests.adapters.jobs import everybodys, numbers, same_everywhere
from tests.adapters.signatures import functions_of
from tests.support.errors import raises
from tests.support.options import compare_forms

DTYPES = ("float32", "bfloat16", "float16", "int32", "int8", "uint8", "bool", "complex64")


def check_allreduce_of_every_dtype() -> None:
    cases = [(hvd.Average, dtype) for dtype in DTYPES[:-2]]
    cases += [(op, "float32") for op in (hvd.Sum, hvd.Max, hvd.Min)]
    for form in FORMS:
        for op, dtype in cases:
            whole = everybodys((3, 5), dtype)
            expected = {hvd.Sum: whole.sum, hvd.Max: whole.max, hvd.Min: whole.min}.get(op, whole.mean)(0)
            mine = jnp.asarray(numbers(hvd.rank(), (3, 5), dtype))
            found = form(lambda x, op=op: hvd.allreduce(x, op))(mine)
            assert found.dtype == dtype
            close = 0.05 if dtype in ("bfloat16", "float16") else 1e-6
            same(found, np.trunc(expected) if dtype[0] in "iu" else expected, close)
            same_everywhere(found.astype(jnp.float32))


def check_trees_scalars_and_nothing() -> None:
    rank = hvd.rank()
    for form in FORMS:
        tree = {"a": jnp.full((2, 3), rank + 1.0), "b": [jnp.float32(rank), None], "c": (jnp.zeros((0, 4)),)}
        total = sum(range(rc.size()))
        expected = {
            "a": np.full((2, 3), total + rc.size()), "b": [np.float32(total), None], "c": (np.zeros((0, 4)),)
        }  # fmt: skip
        same(form(hvd.psum)(tree), expected)
        same(form(hvd.pmean)(jnp.float32(rank)), np.float32(total / rc.size()))
        assert form(hvd.psum)({}) == {}
    same(hvd.allreduce(rank, hvd.Sum), total)
    assert hvd.allreduce(float(rank)).dtype == jnp.float32


def check_every_codec_and_its_gradient() -> None:
    """A single reduction has no error feedback; its gradient is the same reduction of the gradients."""
    own = [np.random.default_rng(rank).standard_normal((70, 80), np.float32) for rank in range(rc.size())]
    total, mine = np.sum(own, axis=0), jnp.asarray(own[rc.rank()])
    codecs = (("bf16", 0.05), (hvd.Compression.int8, 0.15), ("int4", 2.5))
    for compression, close in codecs:
        for form in FORMS:

            def of_sum(x: Any, compression: Any = compression) -> Any:
                return hvd.allreduce(x, hvd.Sum, compression=compression)

            found = np.asarray(form(of_sum)(mine))
            same_everywhere(found)
            assert np.abs(found - total).max() < close, compression
            assert rc.size() == 1 or (found != total).any(), compression
            slope = form(jax.grad(lambda x, of_sum=of_sum: of_sum(x).sum()))(mine)
            assert np.allclose(slope, rc.size(), rtol=0.02), compression
        counts = hvd.allreduce({"n": jnp.arange(4)}, hvd.Sum, compression=compression)["n"]
        assert counts.tolist() == [rc.size() * number for number in range(4)]


def check_scales_compression_and_names() -> None:
    for form in FORMS:
        found = form(
            lambda x: hvd.allreduce(
                x,
                hvd.Sum,
                "a name",
                prescale_factor=0.5,
                postscale_factor=3.0,
                compression=hvd.Compression.bf16,
            )
        )(jnp.full(4, 2.0 + hvd.rank()))
        assert found.dtype == jnp.float32
        same(found, np.full(4, 1.5 * sum(2.0 + rank for rank in range(rc.size()))))
    reduced = jax.jit(lambda x: hvd.allreduce(x, hvd.Adasum))(jnp.ones(8))
    same(reduced, np.ones(8))


def check_allgather_and_broadcast() -> None:
    def of(rank: int, dtype: str) -> Any:
        return np.abs(numbers(rank, (2, 3), "int8")).astype(dtype)

    for form in FORMS:
        for dtype in DTYPES:
            gathered = form(hvd.allgather)([jnp.asarray(of(hvd.rank(), dtype))])[0]
            assert gathered.dtype == dtype
            right = np.concatenate(ranks(lambda rank, dtype=dtype: of(rank, dtype)))
            assert np.array_equal(np.asarray(gathered), right), (gathered, right)
            root = rc.size() - 1
            sent = form(lambda x, root=root: hvd.broadcast(x, root))(jnp.asarray(of(hvd.rank(), dtype)))
            assert np.array_equal(np.asarray(sent), of(root, dtype))


def check_rows_that_differ_outside_of_programs() -> None:
    own = jnp.full((hvd.rank() + 1, 2), hvd.rank())
    same(hvd.allgather(own), np.concatenate(ranks(lambda rank: np.full((rank + 1, 2), rank))))
    splits = [(hvd.rank() + place) % 3 for place in range(rc.size())]
    rows, received = hvd.alltoall(jnp.full((sum(splits), 2), hvd.rank()), splits)
    counts = [(source + hvd.rank()) % 3 for source in range(rc.size())]
    assert received.tolist() == counts
    same(rows, np.concatenate([np.full((count, 2), rank) for rank, count in enumerate(counts)]))
    raises(rc.NotOfferedError, lambda: jax.jit(lambda x: hvd.alltoall(x, splits)[0])(jnp.zeros(sum(splits))))


def check_reducescatter_and_alltoall() -> None:
    size = rc.size()
    for form in FORMS:
        for rows in (size, size + 1, 1):
            whole = ranks(lambda rank, rows=rows: np.arange(2.0 * rows).reshape(rows, 2) + rank)
            mine = np.array_split(sum(whole), size)[hvd.rank()]
            same(
                form(lambda x: hvd.reducescatter(x, hvd.Sum))(jnp.asarray(whole[hvd.rank()], jnp.float32)),
                mine,
            )
        own = jnp.arange(2 * size) + 100 * hvd.rank()
        right = [np.arange(2 * hvd.rank(), 2 * hvd.rank() + 2) + 100 * rank for rank in range(size)]
        same(form(hvd.alltoall)(own), np.concatenate(right))
        form(hvd.barrier)()
    raises(rc.ShapeError, lambda: hvd.allgather(jnp.float32(1)))
    raises(rc.ShapeError, lambda: jax.jit(hvd.reducescatter)(jnp.float32(1)))
    raises(
        rc.ConfigError, lambda: jax.jit(hvd.alltoall)(jnp.zeros(size + 1)) if size > 1 else _config_error()
    )


def _config_error() -> None:
    raise rc.ConfigError("one rank divides every number of rows")


def check_every_form_with_every_option() -> None:
    names, ranks = functions_of("ringcomm.jax"), list(range(rc.size()))
    assert compare_forms(hvd, names, ranks, rc.rank(), hvd.global_process_set, jnp.asarray, np.asarray) > 15


def check_process_sets() -> None:
    if rc.size() < 3:
        return
    first = hvd.add_process_set([0, 2])
    if hvd.rank() in (0, 2):
        for form in FORMS:
            found = form(lambda x: hvd.psum(x, process_set=first))(jnp.full(3, hvd.rank() + 1.0))
            same(found, np.full(3, 4.0))
            gathered = form(lambda x: hvd.allgather(x, process_set=first))(jnp.arange(2) + hvd.rank())
            same(gathered, np.arange(4))
    else:
        raises(rc.UnknownProcessSetError, lambda: hvd.psum(jnp.ones(3), process_set=first))
    hvd.remove_process_set(first)


def check_state_is_broadcast() -> None:
    rank, root = hvd.rank(), rc.size() - 1
    state = {
        "w": jnp.full(3, rank), "n": np.full(2, rank), "step": rank, "note": str(rank), "nothing": None,
        "key": jax.random.key(rank), "old key": jax.random.PRNGKey(rank),
    }  # fmt: skip
    found = hvd.broadcast_parameters(state, root)
    assert (found["step"], found["note"], found["nothing"]) == (root, str(root), None)
    assert isinstance(found["n"], np.ndarray) and isinstance(found["w"], jax.Array)
    same([found["w"], found["n"]], [np.full(3, root), np.full(2, root)])
    for name, right in (("key", jax.random.key(root)), ("old key", jax.random.PRNGKey(root))):
        assert jax.random.bits(found[name]) == jax.random.bits(right), name
    assert hvd.broadcast_object({"of": rank}, root) == {"of": root}
    assert hvd.allgather_object(rank) == list(range(rc.size()))


def check_no_input_is_changed() -> None:
    for form in FORMS:
        own = jnp.full(5000, hvd.rank() + 1.0)
        results = form(lambda x: [hvd.psum(x), hvd.psum((x, x)), hvd.broadcast(x, 0), x])(own)
        total = float(sum(range(rc.size() + 1)))
        expected: Any = [total, (total, total), 1.0, hvd.rank() + 1.0]
        same(results, jax.tree_util.tree_map(lambda value: np.full(5000, value), expected))
        same(own, np.full(5000, hvd.rank() + 1.0))


def check_direct_calls_beside_programs() -> None:
    """A program runs asynchronously while the same thread makes other calls."""
    step = jax.jit(lambda x: hvd.pmean(jnp.tanh(hvd.pmean(x @ x))))
    slow = jax.jit(lambda x: jax.lax.fori_loop(0, 5, lambda _, y: jnp.tanh(y @ x), x))
    x = jnp.eye(300) + hvd.rank()
    for turn in range(10):
        y = step(slow(x))
        same(hvd.psum(jnp.float32(turn)), np.float32(turn * rc.size()))
        assert rc.allreduce(np.ones(3)).sum() == 3
        assert hvd.broadcast_object(turn) == turn
        z = step(x + 1)
    same_everywhere(y)
    same_everywhere(z)
