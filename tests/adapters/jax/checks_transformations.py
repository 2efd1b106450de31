"""Differentiation and vectorization of collectives, and collectives in scan, while, cond and checkpoint."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

import ringcomm as rc
import ringcomm.jax as hvd
from tests.adapters.jax.forms import FORMS, ranks, same
from tests.support.errors import raises


def own() -> jax.Array:
    return jnp.arange(4.0) + hvd.rank()


def total() -> np.ndarray:
    return sum(ranks(lambda rank: np.arange(4.0) + rank))


def check_vmap() -> None:
    for form in FORMS:
        pair = jnp.stack([own(), own() + 1], 1)
        right = np.stack([total(), total() + rc.size()], 1)
        same(form(jax.vmap(hvd.psum, in_axes=1, out_axes=1))(pair), right)
        same(form(jax.vmap(hvd.psum))(pair), right)
        mixed = jax.vmap(lambda x, y: hvd.psum((x, y)), in_axes=(1, None), out_axes=(1, None))
        same(form(mixed)(pair, own()), (right, total()))
        gathered = form(jax.vmap(hvd.allgather, in_axes=1, out_axes=1))(pair)
        of_ranks = ranks(lambda rank: np.stack([np.arange(4.0) + rank, np.arange(1.0, 5) + rank], 1))
        same(gathered, np.concatenate(of_ranks))
        part = form(jax.vmap(lambda x: hvd.reducescatter(x, hvd.Sum), in_axes=1, out_axes=1))(pair)
        same(part, np.array_split(right, rc.size())[hvd.rank()])
    raises(rc.NotOfferedError, lambda: jax.vmap(lambda x: hvd.allreduce(x, hvd.Adasum))(jnp.ones((2, 3))))


def check_derivatives_of_allreduce() -> None:
    size, ones = rc.size(), jnp.ones(4)
    for form in FORMS:
        same(form(jax.grad(lambda x: hvd.psum(x * x).sum()))(own()), 2 * np.asarray(own()) * size)
        same(form(jax.grad(lambda x: hvd.pmean(x * x).sum()))(own()), 2 * np.asarray(own()))
        same(form(lambda x: jax.jvp(hvd.psum, (x,), (ones,)))(own()), (total(), np.full(4, size)))
        same(form(lambda x: jax.vjp(hvd.psum, x)[1](ones)[0])(own()), np.full(4, size))
        once = form(lambda x: jax.linear_transpose(hvd.psum, x)(x)[0])
        same(once(own()), total())

        def twice(x: jax.Array) -> jax.Array:
            return jax.linear_transpose(lambda y: jax.linear_transpose(hvd.psum, x)(y)[0], x)(x)[0]

        same(form(twice)(own()), total())
        same(form(jax.grad(lambda x: hvd.psum(hvd.psum(x) * x).sum()))(own()), 2 * size * total())
        value, gradient = form(jax.value_and_grad(lambda x: (hvd.psum(x) ** 2).sum()))(own())
        same((value, gradient), ((total() ** 2).sum(), 2 * total() * size))
    raises(rc.NotOfferedError, lambda: jax.grad(lambda x: hvd.allreduce(x, hvd.Max).sum())(own()))


def check_integers_have_no_derivative() -> None:
    for form in FORMS:

        def mixed(x: jax.Array) -> jax.Array:
            counts, values = hvd.psum((jnp.arange(4), x))
            return (values * counts).sum()

        same(form(jax.grad(mixed))(own()), np.arange(4.0) * rc.size() ** 2)


def check_derivatives_of_the_others() -> None:
    rank, size = hvd.rank(), rc.size()
    for form in FORMS:
        weigh = lambda x: (hvd.allgather(x) * jnp.arange(4.0 * size)).sum()  # noqa: E731
        same(form(jax.grad(weigh))(own()), np.arange(4) + 4 * rank)
        root = size - 1
        found = form(jax.grad(lambda x, root=root: (hvd.broadcast(x, root) * (hvd.rank() + 1)).sum()))(own())
        same(found, np.full(4, (size + 1) / 2 if rank == root else 0.0))
        squares = form(jax.grad(lambda x: (hvd.reducescatter(x) ** 2).sum()))(own())
        same(squares, 2 * total() / size)
        same(form(jax.grad(lambda x: hvd.reducescatter(x, hvd.Sum).sum()))(own()), np.full(4, size))
        rows = jnp.arange(2.0 * size)
        scaled = form(jax.grad(lambda x: (hvd.alltoall(x) * (hvd.rank() + 1)).sum()))(rows)
        same(scaled, np.repeat(np.arange(1.0, size + 1), 2))


def check_scan_while_and_cond() -> None:
    size = rc.size()
    for form in FORMS:

        def repeated(x: jax.Array) -> jax.Array:
            return jax.lax.scan(lambda carry, _: (hvd.pmean(carry * 1.5), None), x, None, length=3)[0]

        same(form(repeated)(own()), 1.5**3 * total() / size)
        same(form(jax.grad(lambda x: repeated(x).sum()))(own()), np.full(4, 1.5**3))

        def grow(x: jax.Array) -> jax.Array:
            bounded = lambda c: hvd.psum(c).max() < 100.0 * size  # noqa: E731  it has a collective, too
            return jax.lax.while_loop(bounded, lambda c: hvd.pmean(c) + 7, x)

        same(form(grow)(own() * 0), np.full(4, 105.0))

        def chosen(x: jax.Array, how: jax.Array) -> jax.Array:
            return jax.lax.cond(how > 0, lambda x: hvd.psum(x), lambda x: hvd.pmean(hvd.psum(x) * 2), x)

        for how, factor in ((1, 1), (0, 2)):
            same(form(chosen)(own(), how), factor * total())
            same(form(jax.grad(lambda x, how: chosen(x, how).sum()))(own(), how), np.full(4, factor * size))
        mapped = form(lambda x: jax.lax.map(hvd.psum, jnp.stack([x, x + 1])))(own())
        same(mapped, np.stack([total(), total() + size]))


def check_checkpoint() -> None:
    def layer(x: jax.Array) -> jax.Array:
        return jnp.sin(hvd.pmean(jnp.sin(x)))

    for form in FORMS:
        same(form(jax.checkpoint(layer))(own()), form(layer)(own()))
        once = form(jax.grad(lambda x: layer(layer(x)).sum()))(own())
        again = form(jax.grad(lambda x: jax.checkpoint(layer)(jax.checkpoint(layer)(x)).sum()))(own())
        same(again, once)


def check_nothing_is_dropped_or_repeated() -> None:
    """A collective without a used result is executed, and one that is written once is executed once."""
    for form in FORMS:

        def unused(x: jax.Array) -> jax.Array:
            hvd.psum(x)
            return x + 1

        same(form(unused)(own()), np.asarray(own()) + 1)
        same(form(lambda x: hvd.psum(x) + hvd.psum(x))(own()), 2 * total())
    same(hvd.psum(1), rc.size())  # the ranks would not agree after a call more or less


def check_uneven_rows() -> None:
    """The last rank gets all rows but one of each other rank, also in compiled programs and gradients."""
    size, rank = hvd.size(), hvd.rank()
    splits = [1] * (size - 1) + [5 - size]
    for form in FORMS:
        scattered = form(lambda x: hvd.reducescatter(x, hvd.Sum, splits=splits))
        same(scattered(own()), np.split(total(), np.cumsum(splits)[:-1])[rank])
        gradient = form(jax.grad(lambda x: (hvd.reducescatter(x, splits=splits) * (1.0 + rank)).sum()))(own())
        same(gradient, np.repeat(np.arange(1.0, size + 1), splits))
        weighted = form(lambda x: hvd.reducescatter(x, splits=splits, weight=1.0))
        same(weighted(own()), np.split(total() / size, np.cumsum(splits)[:-1])[rank])
