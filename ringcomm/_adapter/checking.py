"""Compares the parameters of all ranks every ``RINGCOMM_CHECK_EVERY`` optimizer steps."""

from __future__ import annotations

from typing import Any, Callable, Sequence, Tuple

from .. import api
from ..calls.consistency import compare
from ..calls.process_set import ProcessSet, included_in, number_of

Named = Sequence[Tuple[str, Any]]


class StepCheck:
    """Counts steps and compares the parameters of all ranks every ``RINGCOMM_CHECK_EVERY`` steps.

    Args:
        process_set: the ranks that train together.
    """

    def __init__(self, process_set: ProcessSet) -> None:
        self._process_set = process_set
        self._steps = 0

    def stepped(self, named: Callable[[], Named]) -> None:
        """Count a step, and compare the parameters if it is time.

        Args:
            named: returns all parameters as pairs (name, array), in the same order on all ranks.

        Raises:
            DesyncError: they differ between ranks.
        """
        context = api.context()
        every = context.settings.check_every
        self._steps += 1
        if every and self._steps % every == 0 and context.size > 1 and included_in(self._process_set):
            compare(context, named(), number_of(self._process_set))
