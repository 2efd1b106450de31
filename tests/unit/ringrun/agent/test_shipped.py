"""What hosts get and keep: packages, job folders, and what `ringrun clean` removes of them."""

from __future__ import annotations

import errno
import fcntl
import io
import os
import zipfile
from pathlib import Path
from typing import Dict, Iterator, List, Tuple

import pytest

from ringcomm.storage.folders import trusted_folder
from ringrun.agent import shipped
from ringrun.agent.shipped import Cleaning, JobFolder
from ringrun.job.files import FetchedFiles, Package, SourceTree

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
    with pytest.raises(OSError, match="Not a directory") as caught:
        shipped.unpack(package.archive, package.digest, environ)
    assert "cache/ringcomm: Not a directory; " in str(caught.value)


@pytest.fixture
def tree(tmp_path: Path) -> SourceTree:
    root = tmp_path / "tree"
    (root / "lib").mkdir(parents=True)
    (root / "train.py").write_text("print(1)")
    (root / "lib" / "a.sh").write_text("echo")
    (root / "lib" / "a.sh").chmod(0o755)
    (root / "copy.py").write_text("print(1)")
    return SourceTree(root)


def place(job: str, tree: SourceTree, environ: Dict[str, str]) -> Tuple[JobFolder, List[str]]:
    """Make a job's directory as agent and launcher do; also what was sent."""
    folder = JobFolder(job, tree.announced(), environ)
    lacking = folder.prepare(b"").get("files", [])
    if lacking:
        assert folder.prepare(Package("files", tree.contents(lacking)).archive) == {}
    return folder, lacking


def test_only_what_a_host_lacks_is_sent(tree: SourceTree, environ: Dict[str, str]) -> None:
    (tree.root / "out" / "today").mkdir(parents=True)
    first, sent = place("one", SourceTree(tree.root), environ)
    assert Path(str(first.path), "out", "today").is_dir()
    assert len(sent) == 2  # two files have the same content
    path = Path(str(first.path))
    assert (path / "train.py").read_text() == (path / "copy.py").read_text() == "print(1)"
    assert os.access(path / "lib" / "a.sh", os.X_OK) and not os.access(path / "train.py", os.X_OK)
    (path / "train.py").write_text("a program may write into its directory")
    second, sent = place("two", tree, environ)
    assert sent == [] and (Path(str(second.path)) / "train.py").read_text() == "print(1)"
    (tree.root / "train.py").write_text("print(2)")
    changed = SourceTree(tree.root)
    _, sent = place("three", changed, environ)
    assert list(changed.contents(sent).values()) == [b"print(2)"]


def test_a_changed_content_is_sent_again(tree: SourceTree, environ: Dict[str, str]) -> None:
    place("one", tree, environ)
    for file in Path(environ["XDG_CACHE_HOME"], "ringcomm", "files").iterdir():
        file.write_text("tampered")
    folder, sent = place("two", tree, environ)
    assert len(sent) == 2 and (Path(str(folder.path)) / "train.py").read_text() == "print(1)"


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="looks into /proc")
def test_a_full_directory_is_left_for_the_next_one(
    tree: SourceTree, environ: Dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    place("one", tree, environ)
    write = shipped.files.write_file

    def full(folder: int, name: str, content: bytes, *mode: int) -> None:
        where = os.readlink(f"/proc/self/fd/{folder}")  # noqa: PTH115
        if len(content) > 1000 and where.startswith(environ["XDG_CACHE_HOME"]):
            raise OSError(errno.ENOSPC, "No space left on device")
        write(folder, name, content, *mode)

    monkeypatch.setattr(shipped.files, "write_file", full)
    (tree.root / "large").write_text("x" * 1001)
    changed = SourceTree(tree.root)
    folder = JobFolder("two", changed.announced(), environ)
    asked = []
    archive = b""
    while lacking := folder.prepare(archive).get("files", []):
        asked.append(len(lacking))
        archive = Package("files", changed.contents(lacking)).archive
    assert asked == [1, 2]  # of a host the launcher takes two requests
    assert str(folder.path).startswith(environ["TMPDIR"])
    assert (Path(str(folder.path)) / "train.py").read_text() == "print(1)"


def test_the_directories_of_the_last_jobs_are_kept(tree: SourceTree, environ: Dict[str, str]) -> None:
    running, _ = place("running", tree, environ)
    os.utime(str(running.path), (0, 0))
    for number in range(5):
        folder, _ = place(f"job{number}", tree, environ)
        os.utime(str(folder.path), (number + 1, number + 1))
        os.close(folder._lock)  # as at the end of its agent
    left = sorted(path.name for path in Path(str(running.path)).parent.iterdir() if path.is_dir())
    assert "running" in left and "job4" in left and "job0" not in left
    assert len(left) == shipped.KEPT_JOBS + 1


@pytest.mark.parametrize("name", ["../a", "/a", "a/../../b", ""])
def test_paths_that_leave_the_directory_are_refused(name: str, environ: Dict[str, str]) -> None:
    digest = "e3b0c44298fc1c149afbf4c8996fb924"  # of nothing
    folder = JobFolder("job", [(name, digest, False)], environ)
    facts = folder.prepare(Package("", {digest: b""}).archive)
    assert facts["problem"] == "package" and "leaves the directory" in facts["why"]


def test_files_are_fetched_in_pieces(
    tree: SourceTree, environ: Dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shipped, "PIECE_BYTES", 10)
    folder, _ = place("job", tree, environ)
    root = Path(str(folder.path))
    (root / "out" / "deep").mkdir(parents=True)
    for name, content in [("out/model.bin", b"x" * 25), ("out/deep/empty", b""), ("out/ten", b"y" * 10)]:
        (root / name).write_bytes(content)
    (tmp_path / "secret").write_text("secret")
    (root / "out" / "link").symlink_to(tmp_path / "secret")
    patterns = ["out/**", "out/*.bin", "../*", "nothing*"]
    taken = FetchedFiles(tmp_path / "fetched")
    for piece in folder.fetched(patterns):
        taken.take("jetson1", piece, patterns)
    assert contents(str(tmp_path / "fetched")) == {
        "jetson1/out/model.bin": b"x" * 25,
        "jetson1/out/deep/empty": b"",
        "jetson1/out/ten": b"y" * 10,
    }


DIGEST = "ab" * 16


@pytest.fixture
def left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Dict[str, str]]:
    """A host on which jobs have left one thing of every kind, and the user other ones."""
    monkeypatch.setattr(shipped, "SHARED_PLACES", ())
    monkeypatch.setattr(shipped, "_held", {})
    temporary = tmp_path / "tmp"
    monkeypatch.setattr(shipped.tempfile, "gettempdir", lambda: str(temporary))
    for name in (
        f"cache/ringcomm/{DIGEST}/ringcomm/api.py", f"cache/ringcomm/.{DIGEST}.0f/half.py",
        "cache/ringcomm/wheels-cp3.8-x86_64-glibc2.31/numpy-1.whl", f"cache/ringcomm/files/{DIGEST}",
        "cache/ringcomm/jobs/one-0/train.py", "cache/ringcomm/mine/file",
        "tmp/ringrun-flight-0a/flight.0.json", "tmp/ringrun-other",
        f"tmp/ringcomm-{os.getuid()}/{DIGEST}/a.py",
    ):  # fmt: skip
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.write_text("12345")
    (temporary / "ringrun-flight-0a" / shipped.MARKER_OF_RECORDS).touch()
    yield {"XDG_CACHE_HOME": str(tmp_path / "cache"), "TMPDIR": str(temporary)}
    for descriptor in shipped._held.values():
        os.close(descriptor)


def files(folder: Path) -> List[str]:
    found = [path.relative_to(folder) for path in folder.rglob("*") if path.is_file()]
    return sorted(str(path) for path in found if path.suffix != ".lock")


MINE = ["cache/ringcomm/mine/file", "tmp/ringrun-other"]


def test_all_that_jobs_have_left_is_removed_and_nothing_else(tmp_path: Path, left: Dict[str, str]) -> None:
    before = files(tmp_path)
    trial = Cleaning(left, dry_run=True).run()
    assert files(tmp_path) == before
    found = Cleaning(left, dry_run=False).run()
    assert found == trial and found["kept"] == []
    assert {what for what, _, _ in found["removed"]} == {
        "package", "shipped files", "job folder", "folder of records"
    }  # fmt: skip
    assert all(size == 5 for _, _, size in found["removed"]) and len(found["removed"]) == 7
    assert files(tmp_path) == MINE
    assert Cleaning(left, dry_run=False).run() == {"removed": [], "kept": []}


def test_the_cache_and_the_folder_of_a_running_job_stay(tmp_path: Path, left: Dict[str, str]) -> None:
    place = shipped.places(left)[0]
    with trusted_folder(place) as folder, trusted_folder(f"{place}/jobs") as jobs:
        shipped.hold(folder)
        shipped.hold(folder)  # once more: it is held already
        lock = shipped.locked(jobs, "one-0.lock", fcntl.LOCK_EX, 0.0)
    found = Cleaning(left, dry_run=False).run()
    os.close(lock)
    assert [place, "a running job may use it"] in found["kept"]
    assert [f"{place}/jobs/one-0", "its job runs"] in found["kept"]
    stay = files(tmp_path)
    assert f"cache/ringcomm/{DIGEST}/ringcomm/api.py" in stay and "cache/ringcomm/jobs/one-0/train.py" in stay
    assert f"tmp/ringcomm-{os.getuid()}/{DIGEST}/a.py" not in stay  # another cache, which it does not use


def test_what_cannot_be_trusted_or_followed_stays(tmp_path: Path, left: Dict[str, str]) -> None:
    place = Path(shipped.places(left)[0])
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "file").touch()
    (place / DIGEST / "link").symlink_to(tmp_path / "precious")
    (tmp_path / "tmp" / "ringrun-flight-ff").symlink_to(tmp_path / "precious")
    assert ["package", f"{place}/{DIGEST}"] in [row[:2] for row in Cleaning(left, False).run()["removed"]]
    assert (tmp_path / "precious" / "file").exists()
    place.chmod(0o777)
    (kept,) = Cleaning(left, False).run()["kept"]
    assert kept[0] == str(place) and "other users may write it" in kept[1]


@pytest.mark.parametrize("mode", [0o700, 0o777, 0o1777])
def test_a_private_folder_under_the_name_of_records_stays(
    tmp_path: Path, left: Dict[str, str], mode: int
) -> None:
    """Where a shared folder has no sticky bit, another user can rename any folder there."""
    private = tmp_path / "tmp" / "ringrun-flight-0123456789abcdef"
    private.mkdir(mode=0o700)
    (private / "thesis").write_text("precious")
    (tmp_path / "tmp").chmod(mode)
    found = Cleaning(left, dry_run=False).run()
    assert (private / "thesis").read_text() == "precious"
    kept = [why for place, why in found["kept"] if place == str(tmp_path / "tmp")]
    assert ["other users may write it (mode 0777)" in why for why in kept] == [True] * (mode == 0o777)
    assert (tmp_path / "tmp" / "ringrun-flight-0a").exists() is (mode == 0o777)
