"""Outer optimizers by name."""

from __future__ import annotations

import inspect
from typing import Any, Type, TypeVar

_Made = TypeVar("_Made", bound="OuterOptimizer")


class OuterOptimizer:
    """What makes outer steps: the values of its arguments ``outer_lr`` and ``outer_momentum`` by name."""

    @classmethod
    def diloco(cls: Type[_Made], *arguments: Any, **options: Any) -> _Made:
        """Make one with DiLoCo's values: ``outer_lr=0.7``, ``outer_momentum=0.9`` and ``sync_every=16``.

        They suit long runs with small learning rates, such as those of language models. In runs of some
        dozens of synchronizations they lose accuracy, or the loss diverges: see docs/slow_links.md.

        Args:
            arguments: those of the class.
            options: those of the class.
        """
        given = inspect.signature(cls).bind_partial(*arguments, **options).arguments
        return cls(**{"sync_every": 16, "outer_lr": 0.7, "outer_momentum": 0.9, **given})
