"""Every collective against NumPy, on trees, dtypes, empty arrays and process sets."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import ringcomm as rc
import ringcomm.jax as hvd
from tests.adapters import contract
from tests.adapters.jax.forms import FORMS, JIT, mode_of, same
from tests.adapters.jobs import same_everywhere
from tests.support.errors import raises

TYPES = ("float32", "bfloat16", "float16", "int32", "int8", "uint8", "bool", "complex64")


def check_results_in_both_forms() -> None:
    for place, form in enumerate(FORMS):
        # In compiled programs shapes are equal on all ranks.
        contract.check_collectives(hvd, mode_of(form), TYPES, ragged=place == 0)
    contract.check_every_form(hvd, "ringcomm.jax", jnp.asarray, np.asarray)


def check_trees_scalars_and_nothing() -> None:
    rank, total = hvd.rank(), sum(range(rc.size()))
    for form in FORMS:
        tree = {"a": jnp.full((2, 3), rank + 1.0), "b": [jnp.float32(rank), None], "c": (jnp.zeros((0, 4)),)}
        expected = {
            "a": np.full((2, 3), total + rc.size()), "b": [np.float32(total), None], "c": (np.zeros((0, 4)),)
        }  # fmt: skip
        same(form(hvd.psum)(tree), expected)
        same(form(hvd.pmean)(jnp.float32(rank)), np.float32(total / rc.size()))
        assert form(hvd.psum)({}) == {}
    same(hvd.allreduce(rank, hvd.Sum), total)
    assert hvd.allreduce(float(rank)).dtype == jnp.float32
    counts = hvd.allreduce({"n": jnp.arange(4)}, hvd.Sum, compression="int4")["n"]
    assert counts.tolist() == [rc.size() * number for number in range(4)], "integers are not sent as codes"


def check_rows_of_every_number() -> None:
    size = rc.size()
    for form in FORMS:
        for rows in (size + 1, 1):
            whole = [np.arange(2.0 * rows).reshape(rows, 2) + rank for rank in range(size)]
            mine = jnp.asarray(whole[hvd.rank()], jnp.float32)
            found = form(lambda x: hvd.reducescatter(x, hvd.Sum))(mine)
            same(found, np.array_split(sum(whole), size)[hvd.rank()])
        form(hvd.barrier)()
    raises(rc.ShapeError, lambda: hvd.allgather(jnp.float32(1)))
    raises(rc.ShapeError, lambda: jax.jit(hvd.reducescatter)(jnp.float32(1)))
    raises(rc.NotOfferedError, lambda: jax.jit(lambda x: hvd.alltoall(x, [1] * size)[0])(jnp.zeros(size)))
    if size > 1:
        raises(rc.ConfigError, lambda: jax.jit(hvd.alltoall)(jnp.zeros(size + 1)))


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
    step = JIT(lambda x: hvd.pmean(jnp.tanh(hvd.pmean(x @ x))))
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
