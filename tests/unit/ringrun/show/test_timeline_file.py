"""The message about a timeline that was requested and not written."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ringrun.job.launch import prepare
from ringrun.plan.job import Job
from ringrun.plan.options import Options
from ringrun.plan.setting_sources import from_values
from ringrun.reach import doors
from ringrun.show.timeline_file import missing_timeline

BEGAN_S = 1e9


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory; of the hosts only localhost is this machine."""
    local = lambda specs, **_: [spec.name == "localhost" for spec in specs]  # noqa: E731
    monkeypatch.setattr(doors, "find_local", local)
    return tmp_path


def job(folder: Path, hosts: str = "localhost,far", timeline: str = "trace.json") -> Job:
    values = from_values({"timeline": timeline})
    options = Options(hosts=hosts, cwd=(str(folder),), setting_values=values)
    return prepare(options, ["true"], {"PATH": "/"})


def test_a_file_that_was_not_written_is_named(folder: Path) -> None:
    text = missing_timeline(job(folder), BEGAN_S, [0])
    assert text.startswith(f"No timeline was written to {folder / 'trace.json'}. Has rank 0 called")


@pytest.mark.parametrize(("written_s", "is_missing"), [(-3.0, True), (-1.0, False), (60.0, False)])
def test_a_file_of_an_earlier_job_does_not_count(folder: Path, written_s: float, is_missing: bool) -> None:
    """A file system may keep times in steps of two seconds."""
    path = folder / "trace.json"
    path.touch()
    os.utime(path, (BEGAN_S + written_s, BEGAN_S + written_s))
    assert bool(missing_timeline(job(folder), BEGAN_S, [0])) is is_missing


def test_what_was_not_requested_or_cannot_be_seen_is_not_missed(folder: Path) -> None:
    assert missing_timeline(job(folder, timeline=""), BEGAN_S, [0]) == ""
    assert missing_timeline(job(folder, hosts="far,localhost"), BEGAN_S, [0]) == "", "rank 0 is elsewhere"
