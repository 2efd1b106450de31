"""Warn if several ranks train and do not communicate: then each of them trains a separate model.

That happens without an error when a trainer does not use the group: ``Accelerator()`` without ``cpu=True``,
``TrainingArguments()`` without ``use_cpu=True``, Lightning's ``Trainer()`` without a strategy, or a plain
model without DistributedDataParallel.
"""

from __future__ import annotations

import atexit
import warnings
import weakref
from typing import Any, Optional

import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from ... import api
from ._work import RingcommWork

STEPS = 10  # the step of an optimizer after which the warning is given
_last: Optional[_Observer] = None  # of the last default group


def watch_optimizers(uses_context: bool) -> None:
    """Warn on rank 0 if the default group has several ranks, and they train without any communication.

    There is no warning if the program also uses the other interface of ringcomm (``uses_context``), whose
    operations are not counted here.
    """
    if dist.get_world_size() > 1 and dist.get_rank() == 0 and not uses_context:
        global _last
        if _last is not None:
            _last.end()
        _last = _Observer(api.is_initialized())


class _Observer:
    """Count optimizer steps of a group until a collective has run or a message was sent or received."""

    def __init__(self, has_context: bool) -> None:
        self._size = dist.get_world_size()
        self._has_context = has_context
        self._steps = 0
        self._stopped = False
        self._group = weakref.ref(dist.group.WORLD)
        self._hook = register_optimizer_step_post_hook(self._after_step)
        atexit.register(self._at_exit)

    def _after_step(self, *_: Any) -> None:
        world = dist.group.WORLD
        if self._stopped or world is None or world is not self._group():
            return
        self._steps += 1
        if self._is_synchronized():
            self._stop()
        elif self._steps >= STEPS:
            self._warn()

    def _at_exit(self) -> None:
        if self._steps and not self._stopped and not self._is_synchronized():
            self._warn()

    def end(self) -> None:
        """Warn as at the program's end, and remove the hook: the program makes another group."""
        self._at_exit()
        self._stop()
        self._hook.remove()

    def _is_synchronized(self) -> bool:
        return RingcommWork.any_made or api.is_initialized() != self._has_context

    def _warn(self) -> None:
        self._stop()
        warnings.warn(
            f"Rank 0 of {self._size} has made {self._steps} optimizer step(s), and no collective of "
            "torch.distributed has run: every rank trains a model of its own. On machines without a GPU "
            "Accelerate takes part only with Accelerator(cpu=True), the Hugging Face Trainer with "
            "TrainingArguments(use_cpu=True), and Lightning with a strategy (\"ddp_ringcomm\"); a plain "
            "model has to be wrapped in DistributedDataParallel.",
            RuntimeWarning,
            stacklevel=2,
        )

    def _stop(self) -> None:
        # The hook stays: PyTorch calls it in a loop over all hooks, which must not change meanwhile.
        self._stopped = True
        atexit.unregister(self._at_exit)
