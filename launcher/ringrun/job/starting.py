"""Why a host's agent does not start, and whether another attempt may succeed."""

from __future__ import annotations

from typing import Callable, Optional

from ..plan.job import HostJob
from ..reach.agent_process import Link
from ..reach.base import RETRIES, last_lines


def not_ready_text(host: HostJob, link: Link, limit_s: float) -> str:
    """The problem of a host that is not ready in time.

    Args:
        host: the host.
        link: to its agent.
        limit_s: the time, in seconds.
    """
    said = last_lines(link.stderr_text + "\n" + link.noise)
    return (
        f"{host.name}: not ready within {limit_s:g} s (--start-timeout). "
        f"{'Its agent had' if link.answered else 'It had not'} answered; it said: {said}."
    )


def failed_start(
    host: HostJob, link: Link, status: Optional[int], note: Callable[[str], None]
) -> Optional[str]:
    """The problem of a host whose agent has ended before it answered.

    Args:
        host: the host.
        link: to its agent; what the next attempt starts is in ``link.argv`` afterwards.
        status: how the program ended that was to start the agent.
        note: shows the user a line.

    Returns:
        the text; None if it is to be tried again.
    """
    said = link.stderr_text or link.noise
    second = link.argv == list(host.fallback)
    tried = f"{host.python} or python3" if second else host.python
    failure = host.reach.explain_start(host.name, link.argv, tried, status, said)
    if failure.no_python and host.fallback and not second:
        note(f"{host.name} has no {host.python}: using python3 there")
        link.argv = list(host.fallback)
        return None
    if failure.retry and (failure.patient or link.attempt <= RETRIES):
        return None
    return failure.text
