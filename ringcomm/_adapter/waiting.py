"""Wait for several operations, so that none is left in progress when one has failed."""

from __future__ import annotations

from typing import Any, Callable, List, Optional, Sequence

from ..errors import RingcommError


def run_all(steps: Sequence[Callable[[], Any]]) -> List[Any]:
    """Call every function, each of which waits for an operation, also when an earlier one has failed.

    None of the operations of one call may still write to a tensor when the error reaches the program. Return
    the results in order. The first RingcommError is raised after all calls; any other exception (Ctrl-C, for
    example) passes at once.
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
