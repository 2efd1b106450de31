"""Check at the end of a job that the requested timeline was written."""

from __future__ import annotations

from pathlib import Path
from typing import Sequence

from ..plan.job import Job

_COARSE_S = 2.0
"""Resolution of a file system's modification times, in seconds."""


def missing_timeline(job: Job, began_s: float, ranks: Sequence[int]) -> str:
    """Return a message if rank 0, on this machine, has not written the requested timeline, else "". `ranks`
    are the processes by their last ranks; a file from before `began_s` (wall clock) is another job's.
    """
    host = job.host_of(ranks[0])
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
