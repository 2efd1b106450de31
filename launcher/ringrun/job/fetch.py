"""Writes the files that hosts send back (``--fetch``)."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path, PurePosixPath
from typing import Any, Dict, List
from typing import Counter as Counts

from ringcomm.errors import ProtocolError

from ..plan.job import Job


class FetchedFiles:
    """The files of one job, in one directory per host.

    Args:
        folder: the directory; it is made when the first file arrives.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: Counts[str] = Counter()
        self._bytes: Counts[str] = Counter()
        self._problems: List[str] = []

    def take(self, host: str, data: bytes) -> None:
        """Write one piece of a file.

        Args:
            host: the name of the host that sent it.
            data: a line of JSON with ``path`` and ``offset``, and perhaps ``error``; then the bytes.

        Raises:
            ProtocolError: it is malformed, or its path leaves the directory.
        """
        line, _, piece = data.partition(b"\n")
        facts = _facts(line)
        path = PurePosixPath(facts["path"])
        if "error" in facts:
            self._problems.append(f"{host}: {path} could not be read: {facts['error']}")
            return
        target = self._folder / host.replace("/", "_") / path
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with target.open("ab" if facts["offset"] else "wb") as file:
                file.write(piece)
        except OSError as problem:
            self._problems.append(f"{target} could not be written: {problem.strerror}")
            return
        self._files[host] += not facts["offset"]
        self._bytes[host] += len(piece)

    def describe(self, job: Job) -> str:
        """What was fetched from each host of the job, and what went wrong, in lines."""
        lines = []
        for host in job.hosts:
            if host.gets_code and self._files[host.name]:
                count, size = self._files[host.name], self._bytes[host.name]
                plural = "" if count == 1 else "s"
                text = f"fetched {count} file{plural}, {size / 1e6:.1f} MB, from {host.name}"
                lines.append(f"{text} into {self._folder / host.name}")
            elif host.gets_code:
                lines.append(f"{host.name} sent no file that matches {' or '.join(job.fetch)}")
        return "\n".join([*lines, *self._problems])


def _facts(line: bytes) -> Dict[str, Any]:
    try:
        facts = json.loads(line.decode())
        path, offset = PurePosixPath(facts["path"]), facts["offset"]
        is_name = b"\0" not in os.fsencode(path)
    except (ValueError, TypeError, LookupError, RecursionError) as problem:
        raise ProtocolError(f"a file without a description: {problem!r}") from None
    if not is_name:
        raise ProtocolError(f"a file whose path {str(path)!r} is no path")
    if path.is_absolute() or ".." in path.parts or not path.parts or not isinstance(offset, int):
        raise ProtocolError(f"a file whose path {str(path)!r} leaves the directory")
    return dict(facts)
