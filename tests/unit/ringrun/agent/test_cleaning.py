"""What `ringrun clean` removes from a host, and what stays."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Dict, Iterator, List

import pytest

from ringcomm.storage.folders import trusted_folder
from ringrun.agent import cleaning, shipped
from ringrun.agent.cleaning import Cleaning

DIGEST = "ab" * 16


@pytest.fixture
def environ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Dict[str, str]]:
    """A host on which jobs have left one thing of every kind, and the user other ones."""
    monkeypatch.setattr(shipped, "SHARED_PLACES", ())
    monkeypatch.setattr(shipped, "_held", {})
    temporary = tmp_path / "tmp"
    monkeypatch.setattr(cleaning.tempfile, "gettempdir", lambda: str(temporary))
    for name in (
        f"cache/ringcomm/{DIGEST}/ringcomm/api.py", f"cache/ringcomm/.{DIGEST}.0f/half.py",
        "cache/ringcomm/wheels-cp3.8-x86_64-glibc2.31/numpy-1.whl", f"cache/ringcomm/files/{DIGEST}",
        "cache/ringcomm/jobs/one-0/train.py", "cache/ringcomm/mine/file", f"cache/ringcomm-agent/{'cd' * 32}",
        "cache/ringcomm-agent/mine", "tmp/ringrun-flight-0a/flight.0.json", "tmp/ringrun-other",
        f"tmp/ringcomm-{os.getuid()}/{DIGEST}/a.py",
    ):  # fmt: skip
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.write_text("12345")
    (temporary / "ringrun-flight-0a" / cleaning.MARKER_OF_RECORDS).touch()
    yield {"XDG_CACHE_HOME": str(tmp_path / "cache"), "TMPDIR": str(temporary)}
    for descriptor in shipped._held.values():
        os.close(descriptor)


def files(folder: Path) -> List[str]:
    found = [path.relative_to(folder) for path in folder.rglob("*") if path.is_file()]
    return sorted(str(path) for path in found if path.suffix != ".lock")


MINE = ["cache/ringcomm-agent/mine", "cache/ringcomm/mine/file", "tmp/ringrun-other"]


def test_all_that_jobs_have_left_is_removed_and_nothing_else(tmp_path: Path, environ: Dict[str, str]) -> None:
    before = files(tmp_path)
    trial = Cleaning(environ, dry_run=True).run()
    assert files(tmp_path) == before
    found = Cleaning(environ, dry_run=False).run()
    assert found == trial and found["kept"] == []
    assert {what for what, _, _ in found["removed"]} == {
        "package", "shipped files", "job folder", "agent program", "folder of records"
    }  # fmt: skip
    assert all(size == 5 for _, _, size in found["removed"]) and len(found["removed"]) == 8
    assert files(tmp_path) == MINE
    assert Cleaning(environ, dry_run=False).run() == {"removed": [], "kept": []}


def test_the_cache_and_the_folder_of_a_running_job_stay(tmp_path: Path, environ: Dict[str, str]) -> None:
    place = shipped.places(environ)[0]
    with trusted_folder(place) as folder, trusted_folder(f"{place}/jobs") as jobs:
        shipped.hold(folder)
        shipped.hold(folder)  # once more: it is held already
        lock = shipped.locked(jobs, "one-0.lock", fcntl.LOCK_EX, 0.0)
    found = Cleaning(environ, dry_run=False).run()
    os.close(lock)
    assert [place, cleaning.IN_USE] in found["kept"]
    assert [f"{place}/jobs/one-0", "its job runs"] in found["kept"]
    left = files(tmp_path)
    assert f"cache/ringcomm/{DIGEST}/ringcomm/api.py" in left and "cache/ringcomm/jobs/one-0/train.py" in left
    assert f"tmp/ringcomm-{os.getuid()}/{DIGEST}/a.py" not in left  # another cache, which it does not use


def test_what_cannot_be_trusted_or_followed_stays(tmp_path: Path, environ: Dict[str, str]) -> None:
    place = Path(shipped.places(environ)[0])
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "file").touch()
    (place / DIGEST / "link").symlink_to(tmp_path / "precious")
    (tmp_path / "tmp" / "ringrun-flight-ff").symlink_to(tmp_path / "precious")
    assert ["package", f"{place}/{DIGEST}"] in [row[:2] for row in Cleaning(environ, False).run()["removed"]]
    assert (tmp_path / "precious" / "file").exists()
    place.chmod(0o777)
    (kept,) = Cleaning(environ, False).run()["kept"]
    assert kept[0] == str(place) and "other users may write it" in kept[1]


@pytest.mark.parametrize("mode", [0o700, 0o777, 0o1777])
def test_a_private_folder_under_the_name_of_records_stays(
    tmp_path: Path, environ: Dict[str, str], mode: int
) -> None:
    """Where a shared folder has no sticky bit, another user can rename any folder there."""
    private = tmp_path / "tmp" / "ringrun-flight-0123456789abcdef"
    private.mkdir(mode=0o700)
    (private / "thesis").write_text("precious")
    (tmp_path / "tmp").chmod(mode)
    found = Cleaning(environ, dry_run=False).run()
    assert (private / "thesis").read_text() == "precious"
    kept = [why for place, why in found["kept"] if place == str(tmp_path / "tmp")]
    assert ["other users may write it (mode 0777)" in why for why in kept] == [True] * (mode == 0o777)
    assert (tmp_path / "tmp" / "ringrun-flight-0a").exists() is (mode == 0o777)
