"""Programs of ``hvd.jit``: their order among others, the options of ``jax.jit``, functions in functions."""

from __future__ import annotations

import functools
from typing import Any, List

import jax
import jax.numpy as jnp
import numpy as np

import ringcomm as rc
import ringcomm.jax as hvd
from ringcomm.jax.programs import HostCall
from tests.adapters.jax.forms import same
from tests.support.errors import raises


def check_programs_of_all_kinds_are_executed_in_the_order_of_their_start() -> None:
    """While the first one computes, the others have been started, none of which needs its result."""
    seen: List[int] = []
    prompt = HostCall.run

    def noted(self: HostCall, arrays: Any) -> Any:
        seen.append(arrays[0].size)
        return prompt(self, arrays)

    def slow(x: Any) -> Any:
        busy = jax.lax.fori_loop(0, 10, lambda _, y: jnp.tanh(y @ x), x)
        return hvd.psum(busy[0] * 0 + 1)

    def repeated(x: Any) -> Any:
        return jax.lax.scan(lambda carry, _: (hvd.pmean(carry), None), x, None, length=3)[0]

    HostCall.run = noted  # type: ignore[method-assign]
    try:
        late, quick, scanned, plain = hvd.jit(slow), hvd.jit(hvd.psum), hvd.jit(repeated), jax.jit(hvd.psum)
        x, ones = jnp.eye(400), {size: jnp.ones(size) for size in (3, 5, 7)}
        for turn in range(5):
            results = [late(x), quick(ones[3]), plain(ones[5]), scanned(ones[7]), late(x), quick(ones[5])]
            same([item[0] / rc.size() for item in results], [1.0, 1.0, 1.0, 1.0 / rc.size(), 1.0, 1.0])
            same(hvd.psum(jnp.float32(turn)), np.float32(turn * rc.size()))
    finally:
        HostCall.run = prompt  # type: ignore[method-assign]
    assert seen == [400, 3, 5, 7, 7, 7, 400, 5] * 5, seen


def check_it_takes_the_options_of_jit() -> None:
    @hvd.jit
    def plain(x: Any, *, scale: float = 1.0) -> Any:
        return {"sum": hvd.psum(x) * scale, "none": None}

    same(plain(jnp.ones(2), scale=2.0), {"sum": np.full(2, 2.0 * rc.size()), "none": None})
    assert plain.__name__ == "plain"

    @functools.partial(hvd.jit, static_argnums=1, static_argnames="also", donate_argnums=0)
    def chosen(x: Any, how: str, also: Any = None) -> Any:
        return (hvd.psum(x) if how == "sum" else hvd.pmean(x)) + len(also or ())

    given = jnp.ones(5)
    same(chosen(given, "sum"), np.full(5, float(rc.size())))
    assert given.is_deleted()
    same(chosen(jnp.ones(5), "mean", also=("a", "b")), np.full(5, 3.0))
    same(hvd.jit(static_argnums=0)(lambda count: hvd.psum(jnp.ones(count)))(4), np.full(4, float(rc.size())))
    placed = hvd.jit(hvd.pmean, out_shardings=jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    same(placed(jnp.ones(3)), np.ones(3))
    raises(TypeError, lambda: hvd.jit(hvd.psum, no_such_option=1))


def check_within_other_functions_it_is_jit() -> None:
    inner = hvd.jit(lambda x: hvd.psum(jnp.sin(x)))
    own = jnp.float32(0.5)
    expected = rc.size() * np.sin(0.5)
    same(inner(own), np.float32(expected))
    for outer in (jax.jit, hvd.jit):
        both = outer(lambda x: (inner(x), hvd.pmean(x), inner(x + 0)))
        same(both(own), tuple(np.float32(item) for item in (expected, 0.5, expected)))
    same(jax.grad(inner)(own), np.float32(rc.size() * np.cos(0.5)))
    same(jax.vmap(inner)(jnp.full(3, 0.5)), np.full(3, expected))
    with jax.disable_jit():
        same(hvd.jit(hvd.psum)(own), np.float32(0.5 * rc.size()))


def check_other_effects_are_kept() -> None:
    seen: List[float] = []

    @hvd.jit
    def shown(x: Any) -> Any:
        jax.debug.callback(lambda value: seen.append(float(value)), x)
        return hvd.psum(x)

    for turn in range(3):
        same(shown(jnp.float32(turn)), np.float32(turn * rc.size()))
    jax.effects_barrier()
    assert sorted(seen) == [0.0, 1.0, 2.0], seen


def check_random_keys_and_constants_may_be_used() -> None:
    constant = jnp.arange(4.0)
    drawn = hvd.jit(lambda key, x: hvd.pmean(jax.random.normal(key, (4,)) * 0 + constant + x))
    same(drawn(jax.random.key(1), jnp.float32(1)), np.arange(4.0) + 1)
