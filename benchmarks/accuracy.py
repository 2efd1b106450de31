"""What compression costs in accuracy, on small models, with paired seeds: an equivalence test.

    python benchmarks/accuracy.py [--task digits batchnorm textures] [--seeds 10] [--rate FACTOR]
        [--optimizer sgd|adamw] [--output FILE] [--only NAME ...]

Four workers train one model by SGD with momentum, or by AdamW; in every run of a seed they have the same
start, the same samples and the same order. What differs is how their gradients are averaged: with ringcomm's
own codecs, with error feedback as its executor computes, or with local steps. A method "loses nothing" here
only if the 95 % interval of the paired difference in test accuracy to float32 lies within +-0.5 points. Two
controls are known to be harmful and must fail that test: signs without error feedback, and 64 local steps at
a high rate without an outer step. Accuracy is the mean over the last epochs, so that one lucky step does not
decide.

* ``digits``: 1797 handwritten digits (scikit-learn), a perceptron with two hidden layers.
* ``batchnorm``: the same digits, a convolutional network with batch normalization. The workers share its
  running statistics, also during local steps.
* ``textures``: ten classes of overlapping textures of 16 x 16, noise, 10 % wrong labels; a small
  convolutional network.
* ``characters``: the next character of Python's own reference; a small transformer.
* ``three``: ``batchnorm`` with three workers and a high rate.

Needs PyTorch and scikit-learn, on one core.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Sequence, Tuple

import numpy as np
import torch
from torch import nn

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from peers.averaging import METHODS, Array, Gradients  # noqa: E402
from peers.tasks import TASKS, Task  # noqa: E402

from ringcomm._adapter.intervals import ADAPTIVE_DRIFT, AUTO_DRIFT  # noqa: E402

MARGIN = 0.5
"""In points of accuracy."""
LAST = 4
"""Epochs over which accuracy is averaged, at most a third of them."""
STUDENT = {
    2: 12.706,
    3: 4.303,
    4: 3.182,
    5: 2.776,
    6: 2.571,
    7: 2.447,
    8: 2.365,
    9: 2.306,
    10: 2.262,
    12: 2.201,
    15: 2.145,
    20: 2.093,
    30: 2.045,
}
"""97.5 % quantiles of Student's t for n - 1 degrees of freedom, by n."""


# ---- training --------------------------------------------------------------------------------


def parameters_of(model: nn.Module) -> List[Array]:
    """Copies of the parameters."""
    return [item.detach().numpy().copy() for item in model.parameters()]


def assign(model: nn.Module, arrays: Sequence[Array]) -> None:
    """Overwrite the parameters."""
    with torch.no_grad():
        for item, array in zip(model.parameters(), arrays):
            item.copy_(torch.from_numpy(np.ascontiguousarray(array)))


def gradients_on(model: nn.Module, inputs: Any, targets: Any) -> List[Array]:
    """One worker's gradients."""
    model.zero_grad(set_to_none=True)
    nn.functional.cross_entropy(model(inputs), targets).backward()
    return [item.grad.numpy().copy() for item in model.parameters() if item.grad is not None]


def accuracy(model: nn.Module, data: Any) -> float:
    """In points."""
    model.eval()
    with torch.no_grad():
        found = 100 * float((model(data[0]).argmax(1) == data[1]).float().mean())
    model.train()
    return found


class Momentum:
    """SGD with momentum 0.9, on arrays."""

    factor = 1.0
    """Its learning rate, in those of a task."""
    drift = AUTO_DRIFT

    def __init__(self, weights: Sequence[Array]) -> None:
        self.state = [np.zeros_like(item) for item in weights]

    def step(self, weights: Sequence[Array], gradients: Sequence[Array], rate: float) -> None:
        """Change the weights."""
        for item, velocity, gradient in zip(weights, self.state, gradients):
            velocity *= 0.9
            velocity += gradient
            item -= np.float32(rate) * velocity


class AdamW:
    """AdamW (Loshchilov and Hutter, "Decoupled weight decay regularization", 2019), decay 0.01, on arrays."""

    factor = 0.06
    drift = ADAPTIVE_DRIFT

    def __init__(self, weights: Sequence[Array]) -> None:
        self._moments = [(np.zeros_like(item), np.zeros_like(item)) for item in weights]
        self.state = [array for pair in self._moments for array in pair]
        self._steps = 0

    def step(self, weights: Sequence[Array], gradients: Sequence[Array], rate: float) -> None:
        """Change the weights."""
        self._steps += 1
        first, second = 1 - 0.9**self._steps, 1 - 0.999**self._steps
        for item, (mean, square), gradient in zip(weights, self._moments, gradients):
            mean += np.float32(0.1) * (gradient - mean)
            square += np.float32(0.001) * (gradient * gradient - square)
            item *= np.float32(1 - 0.01 * rate)
            item -= np.float32(rate / first) * mean / (np.sqrt(square / np.float32(second)) +
            np.float32(1e-8))


OPTIMIZERS = {"sgd": Momentum, "adamw": AdamW}


class Workers:
    """The models of all workers, of which each has its own weights and optimizer.

    Args:
        task: what they learn.
        method: how they average.
        seed: of the start.
        optimizer: its class.
    """

    def __init__(self, task: Task, method: Any, seed: int, optimizer: Any) -> None:
        torch.manual_seed(seed)
        self._task, self._method, self.model = task, method, task.make()
        self._weights = parameters_of(self.model)
        self._velocities = [np.zeros_like(item) for item in self._weights]
        self._own = [[item.copy() for item in self._weights] for _ in range(task.workers)]
        self._optimizers = [optimizer(self._weights) for _ in range(task.workers)]
        self._since = self.exchanges = self.longest = 0
        self._shared = True
        if method.interval is not None:
            method.suit(optimizer.drift)

    def step(self, batches: Sequence[Array], rate: float, last: bool) -> None:
        """Make a step of all workers, and what they exchange then."""
        method = self._method
        self._shared = shared = method.interval is None or method.shares()
        gradients = [self._gradients(*pair) for pair in zip(self._own, batches)]
        if shared:
            mean = (method.gradients if method.interval else method).average(gradients)
            gradients = [mean] * len(gradients)
        for mine, state, own in zip(self._own, self._optimizers, gradients):
            state.step(mine, own, rate)
        self._since += not shared
        if shared:
            self.exchanges += 1
            if method.interval is not None:
                method.follow(0)
        elif self._since >= method.interval.steps or last:
            if method.averages_state():
                average([state.state for state in self._optimizers])
            synchronize(method, self._weights, self._own, self._velocities, self._since)
            self.longest = max(self.longest, self._since)
            self._since, self.exchanges = 0, self.exchanges + 1

    def _gradients(self, weights: List[Array], batch: Array) -> List[Array]:
        inputs, targets = self._task.train
        assign(self.model, weights)
        return gradients_on(self.model, inputs[batch], targets[batch])

    def accuracy(self) -> float:
        """Return that of the last common weights; after a step with common gradients, of the mean of all."""
        mean = [np.mean(parts, axis=0) for parts in zip(*self._own)]
        assign(self.model, mean if self._shared else self._weights)
        return accuracy(self.model, self._task.test)


def train(task: Task, method: Any, seed: int, optimizer: Any) -> Tuple[float, float]:
    """Train one model; its accuracy over the last epochs, and what part of the steps had an exchange."""
    workers = Workers(task, method, seed, optimizer)
    generator, count = np.random.default_rng(seed), len(task.train[1])
    per_epoch = count // (task.workers * task.batch)
    total = task.epochs * per_epoch
    found: List[float] = []
    number = 0
    for epoch in range(task.epochs):
        order = generator.permutation(count)
        for step in range(per_epoch):
            rate = task.rate * optimizer.factor * method.rate * 0.5 * (1 + math.cos(math.pi * number / total))
            number += 1
            batches = [
                order[(step * task.workers + worker) * task.batch :][: task.batch]
                for worker in range(task.workers)
            ]
            workers.step(batches, rate, number == total)
        if epoch >= task.epochs - max(1, min(LAST, task.epochs // 3)):
            found.append(workers.accuracy())
    return statistics.mean(found), workers.exchanges / total


def synchronize(
    method: Any, weights: List[Array], own: Gradients, velocities: List[Array], made: int
) -> None:
    """The outer step, as :class:`ringcomm.LocalSGD` makes it."""
    deltas = [[old - new for old, new in zip(weights, mine)] for mine in own]
    mean = [np.mean(item, axis=0) for item in zip(*deltas)]
    apart = np.mean([square(mine) for mine in deltas]) - square(mean)
    for item, velocity, delta in zip(weights, velocities, method.deltas.average(deltas)):
        if method.outer is None:
            item -= delta
        else:
            velocity *= method.outer
            velocity += delta
            item -= np.float32(0.7) * (delta + np.float32(method.outer) * velocity)
    for mine in own:
        for item, common in zip(mine, weights):
            item[...] = common
    method.follow(made, float(apart), square(weights))


def average(states: Gradients) -> None:
    """Give all workers the mean of their states."""
    for parts in zip(*states):
        mean = np.mean(parts, axis=0)
        for part in parts:
            part[...] = mean


def square(arrays: Sequence[Array]) -> float:
    """The square of the norm of several arrays together."""
    return sum(float(np.vdot(item, item)) for item in arrays)


# ---- the test --------------------------------------------------------------------------------


class Comparison(NamedTuple):
    """The paired difference to float32, in points."""

    mean: float
    low: float
    high: float

    @property
    def equivalent(self) -> bool:
        """Whether the whole interval lies within the margin."""
        return self.low >= -MARGIN and self.high <= MARGIN


def compared(method: Sequence[float], reference: Sequence[float]) -> Comparison:
    """The 95 % interval of the mean paired difference."""
    differences = [one - other for one, other in zip(method, reference)]
    mean, count = statistics.mean(differences), len(differences)
    if count < 2:
        return Comparison(mean, -math.inf, math.inf)
    quantile = min((size, value) for size, value in STUDENT.items() if size >= min(count, 30))[1]
    half = quantile * statistics.stdev(differences) / math.sqrt(count)
    return Comparison(mean, mean - half, mean + half)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--task", nargs="+", choices=tuple(TASKS), default=list(TASKS))
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--rate", type=float, default=1.0, help="times each task's learning rate")
    parser.add_argument("--optimizer", choices=tuple(OPTIMIZERS), default="sgd")
    parser.add_argument("--only", nargs="+", choices=tuple(METHODS), default=list(METHODS), metavar="NAME")
    parser.add_argument("--output", type=Path, metavar="FILE", help="JSON with all accuracies")
    args = parser.parse_args()
    torch.set_num_threads(1)
    optimizer = OPTIMIZERS[args.optimizer]
    results: Dict[str, Dict[str, List[float]]] = {}
    shares: Dict[str, List[float]] = {name: [] for name in args.only}
    for task in args.task:
        found = results[task] = {name: [] for name in args.only}
        for seed in range(args.seeds):
            for name in args.only:
                chosen = TASKS[task](seed)
                chosen = chosen._replace(rate=chosen.rate * args.rate)
                reached, share = train(chosen, METHODS[name](), seed, optimizer)
                found[name].append(reached)
                shares[name].append(share)
            if args.output is not None:
                args.output.write_text(json.dumps(results))
            print(task, seed, {name: round(values[-1], 2) for name, values in found.items()}, flush=True)
        print(report(task, found, shares), flush=True)
        shares = {name: [] for name in args.only}
    return 0


def report(task: str, found: Dict[str, List[float]], shares: Dict[str, List[float]]) -> str:
    """A table in Markdown."""
    lines = [
        f"{task}:",
        "",
        "| | accuracy | difference to float32, 95 % interval | no loss | exchanges |",
        "| --- | ---: | ---: | --- | ---: |",
    ]
    for name, values in found.items():
        result = compared(values, found["float32"])
        interval = (
            "" if name == "float32" else f"{result.mean:+.2f} ({result.low:+.2f} to {result.high:+.2f})"
        )
        answer = "" if name == "float32" else "yes" if result.equivalent else "no"
        share = f"{100 * statistics.mean(shares[name]):.0f} %"
        lines.append(f"| {name} | {statistics.mean(values):.2f} | {interval} | {answer} | {share} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
