"""The launcher's flight records: those that arrive from ranks, and the files in which they are kept."""

from __future__ import annotations

import contextlib
import json
import os
import re
import tempfile
from pathlib import Path
from typing import Any, Container, Dict, List, Mapping, Optional, Sequence, Tuple

from ringcomm.errors import ConfigError
from ringcomm.storage import folders
from ringcomm.storage.files import read_file, write_file

from ..agent.shipped import MARKER_OF_RECORDS, RECORDS
from ..plan.job import Job
from .first_failure import Complaint, Exit
from .waiting import LOST_WITH_HOST, diagnose, has_failed, has_met_another_call, parse_record, read_report

PATTERN = "flight.*.json"
_WRITTEN = re.compile(r"flight\.\d+\.json")
_FOLDER = re.compile(rf"{RECORDS}\w+")
KEPT_FOLDERS = 10  # temporary ones, with this job's
FILE_LIMIT_BYTES = 16 << 20
KEPT_ERRORS, ERROR_CHARACTERS = 16, 20_000
"""Number of errors per rank that are kept, and of characters of each."""


class Records:
    """The flight records of one job's ranks."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._contents: Dict[int, Dict[str, Any]] = {}
        # For each rank: its errors, the rank that each names as the cause, and the text about that rank.
        self._errors: Dict[int, List[Tuple[str, Optional[int], str]]] = {}
        self._failed = False

    def take(self, rank: int, data: bytes) -> str:
        """Store a record and return its reason, or "starved"; "" if it is invalid: it counts as missing."""
        try:
            content = parse_record(data)
            content.update(rank=rank, host=self._job.host_of(rank).name, size=self._job.plan.size)
            read_report(content)
        except (ValueError, IndexError):
            return ""
        if content["reason"] == "failure":
            texts = [str(content.get(name, ""))[:ERROR_CHARACTERS] for name in ("error", "because")]
            culprit = content.get("culprit")
            known = type(culprit) is int and 0 <= culprit < self._job.plan.size
            errors = self._errors.setdefault(rank, [])
            errors.append((texts[0], culprit if known else None, texts[1]))
            del errors[:-KEPT_ERRORS]
        if self._has_more(content, self._contents.get(rank)):
            self._contents[rank] = content
        return str(content["state"] if content.get("state") == "starved" else content["reason"])

    def _has_more(self, content: Mapping[str, Any], before: Optional[Mapping[str, Any]]) -> bool:
        """Return whether a record has more content than the one before it."""
        if before is None or content.get("generation", 0) > before.get("generation", 0):
            return True
        if before["reason"] == "ended":
            return bool(content["reason"] == "failure")  # otherwise: no answer any more
        if before["reason"] == "silent" and (content["reason"] == "ended" or self.is_victim(content["rank"])):
            return True  # it was slow to answer
        if before["reason"] == "failure":
            return False
        # The rank's place when the job failed means more than a later one, unless the rank found the failure,
        # or was about to fail on its own before its first call.
        report = read_report(content)
        own = has_failed(report) and not any(row["operations"] for row in before.get("lanes", ()))
        return not self._failed or own or has_met_another_call(report)

    def forget(self, failed: bool = False) -> None:
        """Drop records before ranks are asked again, but not those of ranks that have ended or `failed`."""
        self._failed = failed
        lasting = ("ended", "failure") if failed else ("ended",)
        self._contents = {rank: item for rank, item in self._contents.items() if item["reason"] in lasting}

    def answered(self, exits: Container[int] = ()) -> int:
        """Return the number of ranks with a record, without those that have ended."""
        return sum(rank not in exits for rank in self._contents)

    def made_no_call(self) -> bool:
        """Return whether every rank reported at its end that it had made no call of ringcomm."""
        told = [item for item in self._contents.values() if item["reason"] == "ended"]
        rows = (row for content in told for row in content.get("lanes", ()))
        return len(told) == self._job.plan.size > 0 and not any(row["operations"] for row in rows)

    def is_victim(self, rank: int) -> bool:
        """Return whether a rank reported that it failed because of another one."""
        return any(culprit not in (None, rank) for _, culprit, _ in self._errors.get(rank, ()))

    def explanations(self, tails: Mapping[int, Sequence[str]]) -> List[Complaint]:
        """Return the reports of ranks that ended because of another one. An error that is neither at the end
        of a rank's stderr (`tails`) nor in its last error was caught: it does not count.
        """
        found: List[Complaint] = []
        for rank, errors in sorted(self._errors.items()):
            for _, culprit, text in reversed(errors):
                if culprit is None or not text or text not in errors[-1][0]:
                    continue
                if text in "\n".join(tails.get(rank, ())):
                    found.append(Complaint(rank, culprit, text))
                    break
        return found

    def complete(
        self, exits: Mapping[int, Exit], lost: Container[int] = (), processes: Sequence[int] = ()
    ) -> Dict[int, Dict[str, Any]]:
        """Return one record for every rank; those without a report have the known facts about their end."""
        found: Dict[int, Dict[str, Any]] = {}
        processes = processes or range(self._job.plan.size)
        for rank, number in enumerate(processes):
            host = self._job.host_of(number)
            end = exits[number].describe() if number in exits and not exits[number].sent else ""
            if not end and host.index in lost:
                end = LOST_WITH_HOST
            content = self._contents.get(number, {"type": "record", "format": 1, "reason": "nothing"})
            found[rank] = {**content, "rank": rank, "host": host.name, "size": len(processes), "end": end}
        return found


def has_operations(contents: Mapping[int, Mapping[str, Any]]) -> bool:
    """Return whether a rank recorded an operation before its end; otherwise there is nothing to compare."""
    told = [content for content in contents.values() if content["reason"] != "ended"]
    return any(channel["operations"] for content in told for channel in content.get("lanes", ()))


def explain(contents: Mapping[int, Mapping[str, Any]], names_calls: bool = False) -> str:
    """Return the diagnosis as lines of text; see :func:`.waiting.diagnose`."""
    reports = {rank: read_report(content) for rank, content in contents.items()}
    return "\n".join(diagnose(reports, names_calls))


def keep_records(job: Job, contents: Mapping[int, Mapping[str, Any]]) -> Path:
    """Write the records to the user's folder, or to a new temporary one for this user alone; return it."""
    wanted = Path(job.settings.diagnose_dir) if job.settings.diagnose_dir else job.output_dir
    if wanted is not None:
        with folders.own_folder(wanted, 0o700) as opened:
            for name in os.listdir(opened):  # noqa: PTH208  by its descriptor
                if _WRITTEN.fullmatch(name):
                    os.unlink(name, dir_fd=opened)  # of an earlier job
            _write(opened, contents)
        return wanted
    place = Path(tempfile.gettempdir())
    with folders.temporary_folder(place) as around:
        name = folders.marked_folder(around, RECORDS, MARKER_OF_RECORDS)
        try:
            with folders.inner_folder(around, name, None) as folder:
                _write(folder, contents)
        except OSError:
            folders.remove(around, name)
            raise
        own = (name for name, _ in folders.owned_names(around, _FOLDER))
        ours = [each for each in own if folders.has_marker(around, each, MARKER_OF_RECORDS)]
        for old in ours[KEPT_FOLDERS:]:
            with contextlib.suppress(OSError):  # another ringrun has just removed it
                folders.remove(around, old)
    return place / name


def _write(folder: int, contents: Mapping[int, Mapping[str, Any]]) -> None:
    for rank, content in contents.items():
        write_file(folder, f"flight.{rank}.json", json.dumps(content).encode())


def diagnose_folder(folder: Path) -> Tuple[str, int]:
    """Return the diagnosis of the records in a directory, with a sentence for each file that cannot be read,
    and the exit code, 1 if a file is not valid. ConfigError without a record.
    """
    paths = sorted(folder.glob(PATTERN)) if folder.is_dir() else []
    if not paths:
        what = "has no flight records (flight.0.json, …)" if folder.is_dir() else "is not a directory"
        raise ConfigError(
            f"{folder} {what}. When a job fails, the box of ringrun names the directory that they are in."
        )
    reports, bad = {}, []
    for path in paths:
        try:
            found = read_report(parse_record(read_file(path, FILE_LIMIT_BYTES)))
        except (OSError, ValueError) as problem:
            why = (problem.strerror or "").lower() if isinstance(problem, OSError) else ""
            bad.append(f"{path} cannot be read: {why or problem}.")
        else:
            reports[found.rank] = found
    paragraphs = ["\n".join(diagnose(reports) if reports else []), "\n".join(bad)]
    return "\n\n".join(filter(None, paragraphs)) + "\n", 1 if bad else 0
