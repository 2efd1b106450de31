from __future__ import annotations

import os
from pathlib import Path
from typing import Dict, List, Tuple

import pytest

from ringrun.agent import shipped
from ringrun.agent.shipped import JobFolder
from ringrun.job.files import FetchedFiles
from ringrun.ship.contents import Package, SourceTree


@pytest.fixture
def environ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Dict[str, str]:
    monkeypatch.setattr(shipped, "SHARED_PLACES", ())
    return {"XDG_CACHE_HOME": str(tmp_path / "cache")}


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


def test_a_restart_finds_what_the_last_attempt_has_written(tree: SourceTree, environ: Dict[str, str]) -> None:
    first, _ = place("job", tree, environ)
    root = Path(str(first.path))
    (root / "checkpoint").write_text("step 100")
    (root / "train.py").write_text("changed")
    os.close(first._lock)  # as at the end of its agent
    second, sent = place("job", tree, environ)
    assert second.path == first.path and sent == []
    assert (root / "checkpoint").read_text() == "step 100" and (root / "train.py").read_text() == "print(1)"


def test_a_changed_content_is_sent_again(tree: SourceTree, environ: Dict[str, str]) -> None:
    place("one", tree, environ)
    for file in Path(environ["XDG_CACHE_HOME"], "ringcomm", "files").iterdir():
        file.write_text("tampered")
    folder, sent = place("two", tree, environ)
    assert len(sent) == 2 and (Path(str(folder.path)) / "train.py").read_text() == "print(1)"


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
    found = {
        path.relative_to(tmp_path / "fetched").as_posix(): path.read_bytes()
        for path in (tmp_path / "fetched").rglob("*")
        if path.is_file()
    }
    assert found == {
        "jetson1/out/model.bin": b"x" * 25,
        "jetson1/out/deep/empty": b"",
        "jetson1/out/ten": b"y" * 10,
    }
