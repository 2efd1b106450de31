# ruff: noqa: PTH116, PTH118  descriptors, and no pathlib in the agent
"""Removes leftovers of jobs on a host: caches, job folders, records of failures. Runs on the host.

Standard library only: :mod:`ringrun.doctor.hosts` sends this file and its imports. Files of a running job
stay: every job holds the lock of its folder and of the cache that it uses (:func:`.shipped.hold`).
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import stat
import sys
import tempfile
from typing import Any, Dict, List, Mapping, Pattern

from ringcomm.storage import folders
from ringrun.agent import shipped

MARKER = "ringrun-clean/1"
RECORDS = "ringrun-flight-"
"""The beginning of the names of temporary folders with records."""
MARKER_OF_RECORDS = ".ringrun-records"
"""The file that marks such a folder: another folder may have a similar name."""
_RECORDS = re.compile(rf"{RECORDS}\w+")
_FILES = re.compile("files")
IN_USE = "a running job may use it"


class Cleaning:
    """Removes leftovers of jobs on this host; with `dry_run` it only lists them."""

    def __init__(self, environ: Mapping[str, str], dry_run: bool) -> None:
        self._environ, self._dry_run = environ, dry_run
        self.removed: List[List[Any]] = []  # kind, path, bytes
        self.kept: List[List[str]] = []  # path, reason

    def run(self) -> Dict[str, Any]:
        """Remove everything that no running job uses; return the attributes as a dictionary."""
        for place in shipped.places(self._environ):
            self._in(place, self._clean_place)
        self._in(shipped.place_of_programs(self._environ), self._clean_programs)
        self._in(tempfile.gettempdir(), self._clean_records, folders.temporary_folder)
        return {"removed": self.removed, "kept": self.kept}

    def _in(self, place: str, clean: Any, opens: Any = None) -> None:
        try:
            with opens(place) if opens else folders.trusted_folder(place, False) as folder:
                clean(place, folder)
        except FileNotFoundError:
            pass  # no job has made it
        except OSError as problem:
            self.kept.append([place, problem.strerror or str(problem)])

    def _clean_place(self, place: str, folder: int) -> None:
        try:
            with folders.inner_folder(folder, "jobs", None) as jobs:
                self._clean_jobs(os.path.join(place, "jobs"), jobs)
        except FileNotFoundError:
            pass  # --ship was never used
        try:
            lock = shipped.locked(folder, shipped.IN_USE, fcntl.LOCK_EX, 0.0)
        except BlockingIOError:
            self.kept.append([place, IN_USE])
            return
        try:
            self._remove_all("package", place, folder, shipped.PACKAGE)
            self._remove_all("shipped files", place, folder, _FILES)
        finally:
            os.close(lock)

    def _clean_jobs(self, place: str, jobs: int) -> None:
        for name, _ in folders.owned_names(jobs, shipped.JOB):
            lock = f"{name}.lock"
            try:
                descriptor = shipped.locked(jobs, lock, fcntl.LOCK_EX, 0.0)
            except BlockingIOError:
                self.kept.append([os.path.join(place, name), "its job runs"])
                continue
            self._remove("job folder", place, jobs, name)
            if not self._dry_run:
                folders.remove(jobs, lock)
            os.close(descriptor)

    def _clean_programs(self, place: str, folder: int) -> None:
        self._remove_all("agent program", place, folder, shipped.PROGRAM)  # agents have theirs in memory

    def _clean_records(self, place: str, folder: int) -> None:
        for name, _ in folders.owned_names(folder, _RECORDS):
            if folders.has_marker(folder, name, MARKER_OF_RECORDS):
                self._remove("folder of records", place, folder, name)

    def _remove_all(self, what: str, place: str, folder: int, pattern: Pattern[str]) -> None:
        for name, _ in folders.owned_names(folder, pattern):
            self._remove(what, place, folder, name)

    def _remove(self, what: str, place: str, folder: int, name: str) -> None:
        path = os.path.join(place, name)
        try:
            size = _size_bytes(folder, name)
            if not self._dry_run:
                folders.remove(folder, name)
        except OSError as problem:
            self.kept.append([path, problem.strerror or str(problem)])
        else:
            self.removed.append([what, path, size])


def _size_bytes(folder: int, name: str) -> int:
    facts = os.stat(name, dir_fd=folder, follow_symlinks=False)
    if not stat.S_ISDIR(facts.st_mode):
        return facts.st_size
    with folders.inner_folder(folder, name, None) as inner:
        return sum(_size_bytes(inner, each) for each in os.listdir(inner))  # noqa: PTH208


def main() -> None:
    """Answer the commands on stdin, each a line of JSON, until it ends."""
    sys.stdout.write("\n" + MARKER + "\n")
    sys.stdout.flush()
    for line in sys.stdin:
        found = Cleaning(os.environ, json.loads(line)["dry_run"]).run()
        sys.stdout.write(json.dumps(found) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
