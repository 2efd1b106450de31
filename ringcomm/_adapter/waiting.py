"""Waits for several operations, so that none is left in progress when one has failed."""

from __future__ import annotations

from typing import Any, Callable, List, Optional, Sequence

from ..errors import RingcommError


def run_all(steps: Sequence[Callable[[], Any]]) -> List[Any]:
    """Call every function, each of which waits for an operation, also when an earlier one has failed.

    The adapters call it where one call or one step of an optimizer waits for several operations: none of
    them may still write to a tensor when the error reaches the program.

    Args:
        steps: the functions, in the order in which they are called.

    Returns:
        what they return, in order.

    Raises:
        RingcommError: the first that was raised; all others have been called by then. Any other exception
            (Ctrl-C, for example) passes at once: the functions after that one are not called.
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
