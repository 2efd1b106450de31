"""The distributed optimizer, gradients with the reduction built in, and compression."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import ringcomm as rc
import ringcomm.jax as hvd
from tests.adapters import contract, digits
from tests.adapters.jax.forms import FORMS, JIT, ranks, same
from tests.adapters.jobs import same_everywhere
from tests.support.errors import raises


def gradients(scale: float = 1.0) -> dict:
    return {
        "w": jnp.full((3, 2), scale * (hvd.rank() + 1.0)),
        "none": None,
        "b": jnp.arange(2.0) + hvd.rank(),
    }


def mean(scale: float = 1.0) -> dict:
    middle = (rc.size() - 1) / 2
    return {"w": np.full((3, 2), scale * (middle + 1)), "none": None, "b": np.arange(2.0) + middle}


def check_updates_are_those_of_the_reduced_gradients() -> None:
    for form in FORMS:
        plain, params = optax.adam(0.1), {"w": jnp.ones((3, 2)), "none": None, "b": jnp.ones(2)}
        for options, expected in (
            ({}, mean()),
            ({"op": hvd.Sum}, jax.tree_util.tree_map(lambda leaf: leaf * rc.size(), mean())),
            ({"gradient_predivide_factor": 2.0, "compression": hvd.Compression.fp16}, mean()),
        ):
            tx = hvd.DistributedOptimizer(plain, **options)
            state = tx.init(params)
            assert jax.tree_util.tree_structure(state) == jax.tree_util.tree_structure(plain.init(params))
            found, after = form(tx.update)(gradients(), state, params)
            as_arrays = jax.tree_util.tree_map(jnp.asarray, expected)
            right, right_after = plain.update(as_arrays, plain.init(params), params)
            same(found, right)
            same(after, right_after)
    raises(rc.ConfigError, lambda: hvd.DistributedOptimizer("adam"))
    raises(rc.ConfigError, lambda: hvd.DistributedOptimizer(plain, backward_passes_per_step=0))


def weights() -> list:
    """One for each rank; the last rank's is 0, and what it passes must not count."""
    return [3.0 + rank for rank in range(hvd.size() - 1)] + [0.0 if hvd.size() > 1 else 3.0]


def check_gradients_with_weights() -> None:
    own = weights()[hvd.rank()]
    given = jax.tree_util.tree_map(lambda leaf: leaf if own else leaf * jnp.nan, gradients())
    share = sum(weight * rank for rank, weight in enumerate(weights())) / sum(weights())
    right = {"w": np.full((3, 2), -share - 1), "none": None, "b": -np.arange(2.0) - share}
    for form in FORMS:
        for compression, close in ((hvd.Compression.none, 1e-5), ("bf16", 0.05), (hvd.Compression.int8, 0.1)):
            tx = hvd.DistributedOptimizer(optax.sgd(1.0), compression=compression)
            state = tx.init(given)

            def update(given: dict, weight: jax.Array, tx=tx, state=state) -> dict:
                return tx.update(given, state, given, weight=weight)[0]

            for factor in (1.0, 5.0):  # the weight is an argument, not part of the program
                found = form(update)(given, jnp.float32(factor * own))
                same(found, right, close)
                jax.tree_util.tree_map(same_everywhere, found)
        passed = jnp.full(4, float(hvd.rank()) if own else jnp.nan)
        same(form(lambda x: hvd.allreduce(x, weight=own))(passed), np.full(4, share))
    tx = hvd.DistributedOptimizer(optax.sgd(1.0), backward_passes_per_step=2)
    raises(rc.ConfigError, lambda: tx.update(given, tx.init(given), given, weight=own))
    raises(rc.NotOfferedError, lambda: jax.grad(lambda x: hvd.allreduce(x, weight=1.0))(1.0))
    raises(rc.Misuse, lambda: hvd.allreduce(jnp.ones(2), weight=-1.0))


def check_gradients_built_in_are_those_of_all_samples() -> None:
    """Ranks with 1, 2, ... samples get the gradient of the mean over all samples."""
    samples = jnp.arange(1.0, hvd.rank() + 2.0) + hvd.rank()
    every = np.concatenate(ranks(lambda rank: np.arange(1.0, rank + 2.0) + rank))
    for form in FORMS:
        reduced = hvd.value_and_grad(lambda w, x: (w * x).mean(), weight=lambda w, x: x.size)
        value, found = form(reduced)(jnp.float32(2), samples)
        same((value, found), (2 * samples.mean(), np.mean(every)))


def check_passes_are_accumulated() -> None:
    for form in FORMS:
        for averaged in (False, True):
            tx = hvd.distributed(
                optax.chain(optax.trace(0.5), optax.sgd(1.0)), backward_passes_per_step=2,
                average_aggregated_gradients=averaged,
            )  # fmt: skip
            params = {"w": jnp.ones((3, 2)), "none": None, "b": jnp.ones(2)}
            state = tx.init(params)
            update = form(tx.update)
            for turn in range(4):
                found, state = update(gradients(), state, params)
                factor = (0, -1, 0, -1.5)[turn] * (1 if averaged else 2)
                same(found, jax.tree_util.tree_map(lambda leaf, factor=factor: factor * leaf, mean()))


def check_gradients_with_the_reduction_built_in() -> None:
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return (w * x).sum()

    x = jnp.arange(3.0) + hvd.rank()
    averaged = sum(ranks(lambda rank: np.arange(3.0) + rank)) / rc.size()
    for form in FORMS:
        value, found = form(hvd.value_and_grad(loss))(jnp.ones(3), x)
        same((value, found), (x.sum(), averaged))
        same(form(hvd.grad(loss, op=hvd.Sum))(jnp.ones(3), x), averaged * rc.size())
        auxiliary = form(hvd.grad(lambda w, x: (loss(w, x), x + 1), has_aux=True))(jnp.ones(3), x)
        same(auxiliary, (averaged, x + 1))
        both = form(hvd.grad(loss, argnums=(0, 1)))(jnp.ones(3), x)
        same(both, (averaged, np.ones(3)))


def check_large_gradients_travel_in_buckets() -> None:
    tree = [jnp.full(size, hvd.rank() + 1.0) for size in (3_000_000, 5, 400_000, 7)]
    update = jax.jit(hvd.DistributedOptimizer(optax.sgd(1.0)).update)
    found, _ = update(tree, optax.sgd(1.0).init(tree), tree)
    same(found, [np.full(leaf.shape, -(rc.size() + 1) / 2) for leaf in tree])


def check_what_codecs_lose_is_added_to_the_next_gradient() -> None:
    def make_step(compression: str) -> Any:
        tx = hvd.DistributedOptimizer(optax.sgd(1.0), compression=compression)
        state, update = tx.init(jnp.zeros((64, 96))), jax.jit(tx.update)
        return lambda gradient: -update(jnp.asarray(gradient), state)[0]

    contract.check_error_feedback(make_step, hvd.rank(), hvd.size())


def check_digits_have_the_loss_curve_of_one_process() -> None:
    def loss_of(network: list, images: jax.Array, labels: jax.Array) -> jax.Array:
        first, bias, second, bias_2 = network
        scores = jax.nn.relu(images @ first + bias) @ second + bias_2
        return optax.softmax_cross_entropy_with_integer_labels(scores, labels).mean()

    tx = hvd.DistributedOptimizer(optax.sgd(digits.LEARNING_RATE, digits.MOMENTUM))
    network = hvd.broadcast_parameters([jnp.asarray(array) for array in digits.weights(hvd.rank())])
    state = tx.init(network)

    @JIT
    def step(network: list, state: tuple, images: jax.Array, labels: jax.Array) -> tuple:
        loss, found = jax.value_and_grad(loss_of)(network, images, labels)
        updates, state = tx.update(found, state, network)
        return optax.apply_updates(network, updates), state, hvd.pmean(loss)

    kept = [network, state]

    def train(images: Any, labels: Any) -> float:
        kept[0], kept[1], loss = step(*kept, images, labels)
        return float(loss)

    digits.check_curve(hvd, train)
