"""One training on handwritten digits for every framework: all have the loss curve of NumPy here."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Callable, List, Sequence, Tuple

import numpy as np

GLOBAL_BATCH = 96
STEPS = 18
HIDDEN = 32
LEARNING_RATE = 0.2
MOMENTUM = 0.9

_EACH_EPOCH = 1536 // GLOBAL_BATCH


@lru_cache(maxsize=None)
def _everything() -> Tuple[Any, Any]:
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    return (images / 16).astype(np.float32), labels.astype(np.int64)


def samples(step: int, rank: int = 0, size: int = 1) -> Tuple[Any, Any]:
    """A rank's part of a step's global batch: images (float32, rows of 64) and labels (int64)."""
    images, labels = _everything()
    start = step % _EACH_EPOCH * GLOBAL_BATCH
    rows = np.arange(start, start + GLOBAL_BATCH).reshape(size, -1)[rank]
    return images[rows], labels[rows]


def weights(seed: int = 0) -> List[Any]:
    """The network: a matrix and a bias of two dense layers; matrices of shape (inputs, outputs), float32."""
    draw = np.random.default_rng(seed)
    first, second = draw.normal(size=(64, HIDDEN)) * 0.1, draw.normal(size=(HIDDEN, 10)) * 0.1
    arrays = [first, np.zeros(HIDDEN), second, np.zeros(10)]
    return [array.astype(np.float32) for array in arrays]


def loss_and_gradients(network: Sequence[Any], images: Any, labels: Any) -> Tuple[float, List[Any]]:
    """The mean softmax cross-entropy of the network, and its gradients."""
    first, bias, second, bias_2 = network
    hidden = images @ first + bias
    active = np.maximum(hidden, 0)
    scores = active @ second + bias_2
    scores -= scores.max(1, keepdims=True)
    chances = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
    places = np.arange(len(labels))
    loss = float(-np.log(chances[places, labels]).mean())
    chances[places, labels] -= 1
    error = chances / len(labels)
    back = (error @ second.T) * (hidden > 0)
    return loss, [images.T @ back, back.sum(0), active.T @ error, error.sum(0)]


@lru_cache(maxsize=None)
def loss_curve() -> List[float]:
    """The loss of every step of one process: SGD with momentum, in float64."""
    state = [array.astype(np.float64) for array in weights()]
    momenta = [np.zeros_like(array) for array in state]
    losses = []
    for step in range(STEPS):
        loss, gradients = loss_and_gradients(state, *samples(step))
        losses.append(loss)
        momenta = [MOMENTUM * old - LEARNING_RATE * new for old, new in zip(momenta, gradients)]
        state = [array + change for array, change in zip(state, momenta)]
    return losses


def same_curve(losses: List[float]) -> None:
    """Compare the average of all ranks' losses of every step with :func:`loss_curve`."""
    expected = loss_curve()
    assert expected[-1] < expected[0] / 2
    np.testing.assert_allclose(losses, expected, rtol=2e-4)


def check_curve(hvd: Any, step: Callable[[Any, Any], float]) -> None:
    """Train with a function that makes a step with images and labels of this rank, and returns their loss."""
    losses = [step(*samples(number, hvd.rank(), hvd.size())) for number in range(STEPS)]
    same_curve(np.mean(hvd.allgather_object(losses), axis=0).tolist())
