"""The interface between optimizers and the weights of gradients."""

from __future__ import annotations


class StepWeight:
    """The weight of this rank's gradients in a weighted average, from step to step."""

    def now(self) -> float:
        """Return the weight in the current step."""
        raise NotImplementedError

    def reduced(self) -> None:
        """Begin the next step: all gradients of this one have been reduced."""
