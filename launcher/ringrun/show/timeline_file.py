"""Whether the timeline that the user asked for is there at the end."""

from __future__ import annotations

from pathlib import Path

from ..plan.job import Job

_COARSE_S = 2.0
"""What a file system may make of the time of a write."""


def missing_timeline(job: Job, began_s: float) -> str:
    """A sentence if rank 0, on this machine, has not written the timeline that was asked for, else "".

    Args:
        began_s: wall clock when the job began: an older file is another job's.
    """
    host = job.host_of(0)
    if not job.settings.timeline or not host.is_local:
        return ""
    path = Path(host.cwd) / job.settings.timeline
    try:
        written = path.stat().st_mtime >= began_s - _COARSE_S
    except OSError:
        written = False
    if written:
        return ""
    return (
        f"No timeline was written to {path}. Has rank 0 called ringcomm.init(), hvd.init(), or "
        "init_process_group() with ringcomm's backend?"
    )
