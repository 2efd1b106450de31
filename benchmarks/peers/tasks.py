"""What accuracy.py trains: small data sets, models for them, and how they are trained."""

from __future__ import annotations

import math
from typing import Any, Callable, NamedTuple

import numpy as np
import torch
from torch import nn

from .averaging import WORKERS


class Task(NamedTuple):
    """A data set, a model, and how to train it."""

    train: Any
    test: Any
    make: Callable[[], nn.Module]
    rate: float
    epochs: int
    batch: int
    """Per worker."""
    workers: int = WORKERS


def digits(seed: int) -> Task:
    """Handwritten digits; which of them are for the test depends on the seed."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(seed).permutation(len(labels))
    inputs = torch.tensor(images[order] / 8.0 - 1.0, dtype=torch.float32)
    targets = torch.tensor(labels[order])
    model = lambda: nn.Sequential(  # noqa: E731
        nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64), nn.ReLU(), nn.Linear(64, 10)
    )
    return Task((inputs[:1000], targets[:1000]), (inputs[1000:], targets[1000:]), model, 0.05, 24, 16)


def batchnorm(seed: int) -> Task:
    """The digits as images, for convolutions with batch normalization."""
    train, test, *_ = digits(seed)
    model = lambda: nn.Sequential(  # noqa: E731
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1),
        nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(512, 10),
    )  # fmt: skip
    images = [(inputs.view(-1, 1, 8, 8), targets) for inputs, targets in (train, test)]
    return Task(images[0], images[1], model, 0.05, 15, 16)


def textures(seed: int) -> Task:
    """Sums of two waves; classes differ in their directions, which overlap."""
    generator = np.random.default_rng(10_000 + seed)
    fixed = np.random.default_rng(7)
    waves = fixed.uniform(0.2, 1.3, (10, 2, 2))

    def sample(count: int, wrong: float) -> Any:
        labels = generator.integers(0, 10, count)
        places = np.arange(16)
        chosen = waves[labels] + 0.12 * generator.standard_normal((count, 2, 2))
        phases = generator.uniform(0, 2 * math.pi, (count, 2))
        image = np.zeros((count, 16, 16))
        for part in range(2):
            angle = (
                chosen[:, part, 0, None, None] * places[None, :, None]
                + chosen[:, part, 1, None, None] * places[None, None, :]
            )
            image += np.sin(angle + phases[:, part, None, None])
        image += 0.9 * generator.standard_normal(image.shape)
        flipped = generator.uniform(size=count) < wrong
        labels = np.where(flipped, generator.integers(0, 10, count), labels)
        return torch.tensor(image[:, None], dtype=torch.float32), torch.tensor(labels)

    model = lambda: nn.Sequential(  # noqa: E731
        nn.Conv2d(1, 12, 5, stride=2, padding=2), nn.ReLU(), nn.Conv2d(12, 24, 3, stride=2, padding=1),
        nn.ReLU(), nn.Flatten(), nn.Linear(384, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip
    return Task(sample(2048, 0.1), sample(4096, 0.0), model, 0.05, 12, 16)


def three(seed: int) -> Task:
    """The task of ``batchnorm`` with three workers and a high rate."""
    return batchnorm(seed)._replace(rate=0.08, workers=3)


class Characters(nn.Module):
    """A small transformer that predicts the next character at each place of a text."""

    def __init__(self, symbols: int, length: int, width: int = 32) -> None:
        super().__init__()
        self.symbols = nn.Embedding(symbols, width)
        self.places = nn.Parameter(0.02 * torch.randn(length, width))
        layer = nn.TransformerEncoderLayer(width, 2, 2 * width, 0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 1, nn.LayerNorm(width), enable_nested_tensor=False)
        self.out = nn.Linear(width, symbols)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length))

    def forward(self, inputs: Any) -> Any:
        """Return logits of shape (texts, symbols, places)."""
        found = self.layers(self.symbols(inputs) + self.places, mask=self.mask, is_causal=True)
        return self.out(found).transpose(1, 2)


def characters(seed: int) -> Task:
    """Pieces of 24 characters of Python's own reference; the seed decides which of them are for the test."""
    from pydoc_data.topics import topics

    text = "".join(topics[name] for name in sorted(topics)).encode("ascii", "replace")
    pieces = torch.tensor(np.frombuffer(text, np.uint8)[: 25 * 18_000].astype(np.int64).reshape(-1, 25) % 128)
    pieces = pieces[torch.tensor(np.random.default_rng(seed).permutation(len(pieces)))]
    train, test = pieces[:2304], pieces[-1500:]
    model = lambda: Characters(128, 24)  # noqa: E731
    return Task((train[:, :-1], train[:, 1:]), (test[:, :-1], test[:, 1:]), model, 0.4, 4, 8)


TASKS = {
    "digits": digits, "batchnorm": batchnorm, "textures": textures, "characters": characters, "three": three,
}  # fmt: skip
