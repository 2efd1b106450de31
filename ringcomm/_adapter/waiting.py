"""Waits for several operations, so that none is left in progress when one has failed."""

from __future__ import annotations

from typing import Any, Callable, List, Optional, Sequence

from ..errors import RingcommError


def run_all(steps: Sequence[Callable[[], Any]]) -> List[Any]:
    """Call every function, each of which waits for an operation.

    Args:
        steps: the functions, in the order in which they are called.

    Returns:
        what they return, in order.

    Raises:
        RingcommError: the first that was raised; all others have been called by then.
    """
    results: List[Any] = []
    problem: Optional[RingcommError] = None
    for step in steps:
        try:
            results.append(step())
        except RingcommError as error:
            problem = problem or error
    if problem is not None:
        raise problem
    return results
