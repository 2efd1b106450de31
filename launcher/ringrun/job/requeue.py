"""``--restarts`` inside a Slurm job whose time is nearly over: has Slurm start the job again."""

from __future__ import annotations

import re
import signal
from typing import Callable, Mapping

from ..reach.doors import scontrol


def restarts_before(environ: Mapping[str, str]) -> int:
    """Return how often Slurm has started the surrounding job again: after a requeue, 0 elsewhere.

    Args:
        environ: the launcher's environment.
    """
    text = environ.get("SLURM_RESTART_COUNT", "")
    return int(text) if text.isdigit() and text.isascii() else 0


def requeue(
    environ: Mapping[str, str], restarts: int, signum: int, say: Callable[[str], None]
) -> None:  # fmt: skip
    """Have Slurm start the surrounding batch job again, if that is what its signal is for.

    Slurm sends SIGTERM some time before the time limit where ``--signal=B:TERM@SECONDS`` asks for it, and the
    job is still running then; a job that was cancelled or has reached its limit is not.

    Args:
        environ: the launcher's environment.
        restarts: the number of restarts that the user allows, all those of Slurm included.
        signum: the signal that has ended the ranks, or 0.
        say: shows a line to the user.
    """
    job, before = environ.get("SLURM_JOB_ID", ""), restarts_before(environ)
    if signum != signal.SIGTERM or before >= restarts or not job or "SLURM_STEP_ID" in environ:
        return
    shown = scontrol("show", "job", job)
    if shown is None or re.search(r"\bJobState=RUNNING\b", shown) is None:
        return
    say(f"Slurm starts job {job} again: restart {before + 1} of {restarts} (--restarts {restarts}).")
    # Slurm ends this process while it executes the command.
    if scontrol("requeue", job) is None:
        say(f"Slurm does not requeue job {job}: was it submitted with --no-requeue?")
