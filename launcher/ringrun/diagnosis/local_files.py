"""Files of this machine that a rank on another host does not find."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path
from typing import Iterator, Sequence

from ..plan.job import HostJob, Job
from .tracebacks import traceback_lines

_MISSING = re.compile(
    r"no such file|not ?found|does ?n[o']t exist|errno = 2\b|(can|could) ?n[o']t (find|open)|unable to open",
    re.I,
)
_QUOTED = re.compile(r"'([^']+)'|\"([^\"]+)\"")
_PATH_LIKE = re.compile(r"[/.]")


def local_file_hint(job: Job, host: HostJob, lines: Sequence[str]) -> str:
    """Return a paragraph if a rank failed because its host lacks a file of this machine, or ""; `lines` are
    the end of its stderr.
    """
    if host.is_local:
        return ""
    found = traceback_lines(lines)[1:] or lines[-5:]
    error = "\n".join(line for line in found if not line.startswith("  "))
    if not _MISSING.search(error):
        return ""
    tree = job.tree if host.gets_code else None
    sent = set() if tree is None else {str(tree.root / file[0]) for file in tree.files}
    paths = (_here(job, host, name) for name in _names(error))
    path = next((path for path in paths if path.name and str(path) not in sent), None)
    if path is None:
        return ""
    target = f"{host.planned.spec.target}:{path.parent}/"
    copy = f"rsync -a {shlex.quote(str(path))} {shlex.quote(target)}"
    if tree is not None:
        why = f" --ship does not send it: {tree.why_not_sent(path)}."
        remedy = f"Copy it there, to the same path (`{copy}`), and have the program use the absolute path"
    else:
        why, remedy = "", f"Copy it there (`{copy}`), or send the directory of the program along with --ship"
    return (
        f"{path} is on this machine, but not on {host.name}: each rank reads the files of its own host.{why} "
        f"{remedy}, or use a directory that all hosts share. What rank 0 has written in this job, rank 0 "
        "can read and broadcast."
    )


def _names(error: str) -> Iterator[str]:
    """Yield the words of an error that may be paths, quoted ones first."""
    yield from (one or other for one, other in _QUOTED.findall(error))
    bare = (item.strip("'\"`:;,()[]") for item in error.split())
    yield from (word for word in bare if _PATH_LIKE.search(word))


def _here(job: Job, host: HostJob, name: str) -> Path:
    """Return the absolute path on this machine for a name on a host; an empty path if there is no file."""
    name = name.rstrip(".")
    folder = f"/{job.folder or job.id}-{host.index}/"
    if folder in name and job.tree is not None:
        name = str(job.tree.root / name.partition(folder)[2])
    there = len(name) > 1 and os.path.exists(name)  # noqa: PTH110  also of names that are too long
    return Path(os.path.abspath(name)) if there else Path()  # noqa: PTH100  links stay
