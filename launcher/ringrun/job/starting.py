"""Why a host's agent does not start, and whether another attempt may succeed."""

from __future__ import annotations

from typing import Callable, Optional

from ..plan.job import HostJob
from ..plan.reaching import NOTHING, last_lines
from ..reach.agent_process import AgentLink
from ..reach.base import RETRIES

_IN_PIPES_BYTES = 1 << 16
"""Unsent bytes up to this number do not mean that the network is slow."""


def not_ready_text(host: HostJob, link: AgentLink, limit_s: float, wheels: str = "") -> str:
    """Return the problem of a host that is not ready in time; its `wheels` are being downloaded, or ""."""
    if not link.answered:
        doing = f"{link.argv[0]} had not answered: a login that waits, or a host that is slow to start Python"
    elif wheels:
        doing = f"this machine was still downloading the wheels of {wheels} for it (--provision)"
    elif link.outgoing_bytes > _IN_PIPES_BYTES:
        doing = f"{link.outgoing_bytes / 1e6:.1f} MB were still to be sent to it: the network is slow"
    elif host.command.is_python:
        doing = (
            f"its agent was running, and {host.python} was still trying to import numpy and ringcomm there: "
            "a slow disk or network file system, or a busy host"
        )
    else:
        doing = "its agent was running, and was still preparing the job: a slow disk, or a busy host"
    said = last_lines(link.stderr_text + "\n" + link.noise)
    printed = "" if said == NOTHING else f" It printed: {said}."
    return f"{host.name}: not ready within {limit_s:g} s (--start-timeout): {doing}.{printed}"


def failed_start(
    host: HostJob, link: AgentLink, status: Optional[int], note: Callable[[str], None], printed: str = "",
    endless: bool = True,
) -> Optional[str]:  # fmt: skip
    """Return the problem of a host whose agent ended before it answered; None to try again with
    ``link.argv``, which may have changed. `endless` permits retries without limit where the host may still
    appear; `printed` is its output unless the link has read it.
    """
    said = link.stderr_text or link.noise or printed
    second = link.argv == list(host.fallback)
    tried = f"{host.python} or python3" if second else host.python
    failure = host.reach.explain_start(host.name, link.argv, tried, status, said)
    if failure.no_python and host.fallback and not second:
        other = "its environment is looked for there, then python3" if host.finder else "using python3 there"
        note(f"{host.name} has no {host.python}: {other}")
        link.argv, link.first = list(host.fallback), host.finder
        return None
    if failure.retry and (endless and failure.may_appear or link.attempt <= RETRIES):
        return None
    return failure.text
