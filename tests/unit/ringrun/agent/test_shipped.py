from __future__ import annotations

import io
import zipfile
from pathlib import Path
from typing import Dict

import pytest

from ringrun.agent import shipped
from ringrun.ship.contents import Package

FILES = {"a/__init__.py": b"x = 1\n", "a/b.py": b"", "data.txt": b"\x00\xff"}


@pytest.fixture
def package() -> Package:
    return Package("example 1.0", FILES)


@pytest.fixture
def environ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Dict[str, str]:
    monkeypatch.setattr(shipped, "SHARED_PLACES", ())
    return {"XDG_CACHE_HOME": str(tmp_path / "cache"), "TMPDIR": str(tmp_path / "temporary")}


def contents(path: str) -> Dict[str, bytes]:
    return {
        file.relative_to(path).as_posix(): file.read_bytes()
        for file in Path(path).rglob("*")
        if file.is_file()
    }


def test_a_package_is_unpacked_once_and_found_afterwards(package: Package, environ: Dict[str, str]) -> None:
    assert shipped.find(package.digest, environ) is None
    path = shipped.unpack(package.archive, package.digest, environ)
    assert contents(path) == FILES
    assert shipped.find(package.digest, environ) == path
    assert shipped.unpack(package.archive, package.digest, environ) == path  # by another job
    assert Path(path).parent.stat().st_mode & 0o777 == 0o700
    assert {entry.name for entry in Path(path).parent.iterdir()} == {package.digest, shipped.IN_USE}


@pytest.mark.parametrize("change", ["changed", "added", "removed"])
def test_a_package_that_was_changed_is_not_used(
    change: str, package: Package, environ: Dict[str, str]
) -> None:
    path = Path(shipped.unpack(package.archive, package.digest, environ))
    if change == "changed":
        (path / "a" / "b.py").write_text("import os")
    elif change == "added":
        (path / "numpy.py").write_text("")
    else:
        (path / "data.txt").unlink()
    assert shipped.find(package.digest, environ) is None
    assert contents(shipped.unpack(package.archive, package.digest, environ)) == FILES


@pytest.mark.parametrize("above", ["home", "cache"])
def test_a_package_below_a_folder_that_a_group_writes_is_not_used(
    package: Package, environ: Dict[str, str], tmp_path: Path, above: str
) -> None:
    """Another user could exchange it between the check and the start of the ranks."""
    home = tmp_path / "home"
    environ["XDG_CACHE_HOME"] = str(home / "cache")
    inside = shipped.unpack(package.archive, package.digest, environ)
    assert inside.startswith(str(home))
    (home if above == "home" else home / "cache").chmod(0o770)
    assert shipped.find(package.digest, environ) is None
    assert shipped.unpack(package.archive, package.digest, environ).startswith(f"{tmp_path}/temporary/")


def test_the_agents_program_is_kept_and_nothing_else_is_removed(tmp_path: Path) -> None:
    environ = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    folder = tmp_path / "cache" / "ringcomm-agent"
    shipped.keep_program(b"", environ)
    assert not folder.exists()
    for number in range(5):
        shipped.keep_program(b"program %d" % number, environ)
    (folder / "thesis").touch()
    shipped.keep_program(b"last", environ)
    assert len(list(folder.iterdir())) == shipped.KEPT_PROGRAMS + 1 and (folder / "thesis").exists()
    documents = tmp_path / "documents"
    documents.mkdir()
    (documents / "a").write_text("keep")
    folder.rename(tmp_path / "before")
    folder.symlink_to(documents)
    (tmp_path / "cache").chmod(0o777)  # another user has put the link there
    shipped.keep_program(b"other", environ)
    assert [path.name for path in documents.iterdir()] == ["a"]


def archive_of(*names: str) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name in names:
            archive.writestr(name, b"")
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"nothing", "not a zip file"),
        (archive_of("../a.py"), "contains the path '../a.py'"),
        (archive_of("/a.py"), "contains the path '/a.py'"),
        (archive_of("a/../../b.py"), "contains the path"),
        (archive_of("a.py"), "not what the launcher announced"),
    ],
    ids=["no archive", "above", "absolute", "above later", "another"],
)
def test_what_is_no_such_package_is_refused(data: bytes, why: str, environ: Dict[str, str]) -> None:
    with pytest.raises(ValueError, match=why):
        shipped.unpack(data, "0" * 32, environ)


def test_where_there_is_no_room_the_next_directory_is_taken(
    package: Package, environ: Dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "cache").touch()  # no directory can be made there
    path = shipped.unpack(package.archive, package.digest, environ)
    assert path.startswith(f"{tmp_path}/temporary/")
    (tmp_path / "temporary").rename(tmp_path / "gone")
    (tmp_path / "temporary").touch()
    with pytest.raises(shipped.NoPlace) as caught:
        shipped.unpack(package.archive, package.digest, environ)
    assert "cache/ringcomm: Not a directory; " in str(caught.value)
