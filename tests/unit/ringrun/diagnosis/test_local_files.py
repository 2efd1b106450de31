"""Files that only the launching machine has, in the errors of ranks elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import List

import pytest

from ringrun.diagnosis.first_failure import Exit, FirstFailure
from ringrun.diagnosis.local_files import local_file_hint
from ringrun.job.launch import prepare
from ringrun.job.outcome import ended
from ringrun.plan.job import Job
from ringrun.plan.options import Options

HEAD = ["Traceback (most recent call last):", '  File "train.py", line 3, in <module>']


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of a program with data that is not sent."""
    (tmp_path / "data").mkdir()
    for name, text in {"train.py": "", "data/x.npy": "", ".ringignore": "data\n"}.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PWD", str(tmp_path))
    return tmp_path


def job_of(ship: bool) -> Job:
    return prepare(Options(hosts="localhost,me@b", ship="." if ship else None), ["train.py"])


@pytest.mark.parametrize("ship", [False, True])
@pytest.mark.parametrize(
    "error",
    [
        "FileNotFoundError: [Errno 2] No such file or directory: 'data/x.npy'",
        "FileNotFoundError: data/x.npy not found.",
        "tensorflow.errors.NotFoundError: {{node R}} data/x.npy; No such file or directory [Op:ReadFile]",
        "OSError: Unable to open file (unable to open file: name = 'data/x.npy', errno = 2)",
        "FileNotFoundError: [Errno 2] No such file or directory: '{folder}/data/x.npy'",
        "FileNotFoundError: [Errno 2] No such file or directory: '{copy}/data/x.npy'",
    ],
)
def test_a_file_that_only_this_machine_has(folder: Path, error: str, ship: bool) -> None:
    job = job_of(ship)
    if "{copy}" in error and not ship:
        pytest.skip("there is no copy")
    error = error.replace("{folder}", str(folder)).replace("{copy}", f"/x/jobs/{job.folder}-1")
    lines = [*HEAD, error]
    hint = local_file_hint(job, job.hosts[1], lines)
    assert f"{folder}/data/x.npy is on this machine, but not on b" in hint
    assert f"rsync -a {folder}/data/x.npy me@b:{folder}/data/" in hint
    assert ("git or .ringignore leaves it out" in hint) is ship
    assert local_file_hint(job, job.hosts[0], lines) == "", "the rank is on this machine"
    failure = FirstFailure()
    failure.exited(Exit(1, 1, None))
    assert hint.split(":")[0] in ended(job, failure, "", 0, {1: lines}).report


@pytest.mark.parametrize(
    "lines",
    [
        [*HEAD, "FileNotFoundError: [Errno 2] No such file or directory: 'data/none'"],
        [*HEAD, "FileNotFoundError: [Errno 2] No such file or directory: 'train.py'"],
        [*HEAD, "ValueError: data/x.npy has another shape"],
        [],
    ],
)
def test_other_errors_have_no_hint(folder: Path, lines: List[str]) -> None:
    job = job_of(ship=True)
    assert local_file_hint(job, job.hosts[1], lines) == ""
