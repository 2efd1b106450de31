"""Gradients, optimizers and parameters of ringcomm.mlx on all ranks."""

from __future__ import annotations

from typing import Any, Dict, List

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from mlx.utils import tree_flatten

import ringcomm as rc
import ringcomm.mlx as hvd
from tests.adapters import contract, digits
from tests.adapters.jobs import same_everywhere, warned_about_different_weights
from tests.support.errors import raises


def gradients(scale: float = 1.0) -> Dict[str, Any]:
    return {
        "w": mx.full((3, 2), scale * (hvd.rank() + 1.0)),
        "layers": [{"b": (mx.arange(2.0) + hvd.rank()).astype(mx.bfloat16)}, {}],
    }


def flat(tree: Any) -> List[Any]:
    return [np.asarray(leaf.astype(mx.float32)) for _, leaf in tree_flatten(tree)]


def same(found: Any, expected: Any) -> None:
    for mine, right in zip(flat(found), flat(expected)):
        np.testing.assert_allclose(mine, right, rtol=1e-2, atol=1e-6)


def check_gradients_are_averaged_as_trees() -> None:
    middle = (rc.size() - 1) / 2
    found = hvd.average_gradients(gradients())
    assert found["layers"][1] == {} and found["layers"][0]["b"].dtype == mx.bfloat16
    same(found, {"w": mx.full((3, 2), middle + 1), "layers": [{"b": mx.arange(2.0) + middle}, {}]})
    assert hvd.average_gradients({}) == {}
    total = hvd.average_gradients(gradients(), hvd.Sum, compression="bf16")
    same(total["w"], mx.full((3, 2), rc.size() * (middle + 1)))


def check_gradients_with_weights() -> None:
    """The last rank's weight is 0, and what it passes does not count."""
    weights = [3.0 + rank for rank in range(hvd.size() - 1)] + [0.0 if hvd.size() > 1 else 3.0]
    own = weights[hvd.rank()]
    share = sum(weight * rank for rank, weight in enumerate(weights)) / sum(weights)
    found = hvd.average_gradients(gradients(1.0 if own else np.nan), weight=own)
    same(found["w"], mx.full((3, 2), share + 1))
    raises(rc.Misuse, lambda: hvd.average_gradients(gradients(), weight=-1.0))


def check_large_gradients_travel_in_buckets() -> None:
    tree = [mx.full((size,), hvd.rank() + 1.0) for size in (3_000_000, 5, 400_000, 7)]
    found = hvd.average_gradients(tree)
    assert [leaf.size for leaf in found] == [leaf.size for leaf in tree]
    assert all(mx.all(leaf == (rc.size() + 1) / 2).item() for leaf in found)


def check_an_optimizer_applies_the_average() -> None:
    middle = (rc.size() - 1) / 2
    for make in (
        lambda: optim.SGD(0.1, momentum=0.9), lambda: optim.Adam(0.1),
        lambda: optim.MultiOptimizer([optim.SGD(0.1), optim.Adam(0.1)], [lambda name, _: name == "w"]),
    ):  # fmt: skip
        plain: Any = make()
        optimizer = hvd.DistributedOptimizer(make(), gradient_predivide_factor=2.0)
        assert isinstance(optimizer, type(plain)) and type(optimizer).__name__ == type(plain).__name__
        found = optimizer.apply_gradients({"w": mx.ones(3) * (hvd.rank() + 1), "b": mx.ones(1)},
                                          {"w": mx.ones(3), "b": mx.ones(1)})  # fmt: skip
        right = plain.apply_gradients({"w": mx.ones(3) * (middle + 1), "b": mx.ones(1)},
                                      {"w": mx.ones(3), "b": mx.ones(1)})  # fmt: skip
        same(found, right)
    raises(rc.ConfigError, lambda: hvd.DistributedOptimizer(optimizer))
    raises(rc.ConfigError, lambda: hvd.DistributedOptimizer("adam"))
    raises(rc.ConfigError, lambda: hvd.DistributedOptimizer(plain, hvd.Sum, gradient_predivide_factor=2.0))


def check_ranks_that_begin_with_different_weights() -> None:
    def train(name: str, added: int) -> None:
        optimizer, weights = hvd.DistributedOptimizer(optim.SGD(0.1)), {name: mx.ones(3) + added}
        for _ in range(6):
            weights = optimizer.apply_gradients({name: mx.ones(3)}, weights)

    warned_about_different_weights(train)


def check_what_codecs_lose_is_added_to_the_next_gradient() -> None:
    def make_step(compression: str) -> Any:
        optimizer = hvd.DistributedOptimizer(optim.SGD(1.0), compression=compression)
        zeros = {"w": mx.zeros((64, 96))}
        return lambda gradient: -np.asarray(optimizer.apply_gradients({"w": mx.array(gradient)}, zeros)["w"])

    contract.check_error_feedback(make_step, hvd.rank(), hvd.size())


def check_what_keeps_something_from_step_to_step_needs_an_optimizer() -> None:
    raises(rc.ConfigError, lambda: hvd.average_gradients(gradients(), compression="auto"))


def check_state_is_broadcast() -> None:
    rank, root = hvd.rank(), rc.size() - 1
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm(2))
    model.update(hvd.broadcast_parameters(model.parameters()))
    before = model.layers[0].weight + rank
    model.layers[0].weight = before
    assert hvd.broadcast_parameters(model, root) is model
    assert np.array_equal(model.layers[0].weight, before - rank + root)
    state = {"step": mx.array(rank, mx.uint64), "note": str(rank), "m": [mx.full((2,), rank, mx.bfloat16)]}
    found = hvd.broadcast_parameters(state, root)
    assert (found["step"].item(), found["note"]) == (root, str(root))
    assert found["m"][0].dtype == mx.bfloat16 and found["m"][0].tolist() == [root] * 2
    assert hvd.allgather_object(rank) == list(range(rc.size()))


class Network(nn.Module):
    """The network of :mod:`tests.adapters.digits`."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        first, self.bias, second, self.bias_2 = map(mx.array, digits.weights(seed))
        self.matrices = [first, second]

    def __call__(self, images: mx.array) -> mx.array:
        return nn.relu(images @ self.matrices[0] + self.bias) @ self.matrices[1] + self.bias_2


def check_digits_have_the_loss_curve_of_one_process() -> None:
    for wrapped in (True, False):
        network = hvd.broadcast_parameters(Network(hvd.rank()))
        optimizer: Any = optim.SGD(digits.LEARNING_RATE, momentum=digits.MOMENTUM)
        optimizer = hvd.DistributedOptimizer(optimizer) if wrapped else optimizer
        average = (lambda found: found) if wrapped else hvd.average_gradients
        compute = nn.value_and_grad(
            network,
            lambda images, labels: nn.losses.cross_entropy(network(images), labels, reduction="mean"),  # noqa: B023
        )

        def step(images: Any, labels: Any) -> float:
            loss, found = compute(mx.array(images), mx.array(labels))  # noqa: B023
            optimizer.update(network, average(found))  # noqa: B023
            return float(loss.item())

        digits.check_curve(hvd, step)
        for _, leaf in tree_flatten(network.parameters()):
            same_everywhere(np.asarray(leaf))
