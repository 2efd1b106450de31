"""What is sent to hosts: ringcomm, wheels and the files of --ship."""

from __future__ import annotations

import re
import subprocess
import zipfile
from pathlib import Path
from typing import Any, Dict, List

import pytest

from ringcomm.errors import ConfigError
from ringrun.agent import shipped
from ringrun.job import files as contents
from ringrun.job.files import (
    SourceTree,
    Target,
    describe_sent,
    fetch_wheels,
    own_package,
    platform_tags,
    position,
)

PAGE = Path(__file__).resolve().parents[4] / "docs" / "machines.md"


def test_the_page_names_the_size_of_what_is_sent() -> None:
    (named,) = re.findall(r"this machine's version, about ([0-9.]+) MB", PAGE.read_text())
    assert abs(len(own_package.__wrapped__().archive) / 1e6 - float(named)) < 0.15


def write(root: Path, *names: str, content: str = "") -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)


def paths(root: Path) -> list[str]:
    return [file.path for file in SourceTree(root).files]


def test_with_git_it_is_what_git_tracks_or_would_track(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    write(tmp_path, "train.py", "deleted.py", "a b/ü.py", "data/large.bin", "notes.txt")
    write(tmp_path, ".gitignore", content="data/\n")
    subprocess.run(["git", "-C", str(tmp_path), "add", "deleted.py", "train.py"], check=True)
    (tmp_path / "deleted.py").unlink()
    assert paths(tmp_path) == [".gitignore", "a b/ü.py", "notes.txt", "train.py"]
    assert paths(tmp_path / "a b") == ["ü.py"]


def test_without_git_it_is_all_but_junk(tmp_path: Path) -> None:
    write(tmp_path, "fetched/jetson1/out", "lib/fetched")
    write(tmp_path, "train.py", "lib/a.py", ".venv/bin/python", "lib/__pycache__/a.pyc", "b.pyc", ".hidden")
    assert paths(tmp_path) == [".hidden", "lib/a.py", "lib/fetched", "train.py"]


def test_ringignore_leaves_out_names_directories_and_patterns(tmp_path: Path) -> None:
    write(tmp_path, "a.py", "b.csv", "deep/c.csv", "runs/1/model.bin", "lib/out/x", "out/x")
    write(tmp_path, ".ringignore", content="# data\n*.csv\nruns/\nlib/out\n\n")
    assert paths(tmp_path) == [".ringignore", "a.py", "out/x"]


@pytest.mark.parametrize("git", [True, False])
def test_folders_whose_content_is_not_sent_are_made_empty(tmp_path: Path, git: bool) -> None:
    write(tmp_path, "train.py", "lib/a.py", "runs/1/model.bin", "data/raw/x.bin", "kept/out/x.txt")
    write(tmp_path, ".gitignore", content="data/\n")
    write(tmp_path, ".ringignore", content="runs\n*.txt\n")
    for name in ("out", "logs/today", "lib/none", "fetched/host", "venv/bin", "runs/2"):
        (tmp_path / name).mkdir(parents=True)
    if git:
        subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    tree = SourceTree(tmp_path)
    assert tree.folders == [*(["data"] if git else []), "kept/out", "lib/none", "logs/today", "out"]
    entries = {file.path: file.digest for file in tree.announced()}
    assert entries["out/"] == "" and entries["train.py"] and len(entries) == len(tree.files + tree.folders)


def test_too_large_names_the_ten_largest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contents, "LIMIT_BYTES", 1000)
    for number in range(12):
        write(tmp_path, f"file{number:02}", content="x" * 100 * number)
    with pytest.raises(ConfigError) as error:
        SourceTree(tmp_path)
    assert "12 files" in str(error.value) and "file11" in str(error.value) and "file02" in str(error.value)
    assert "file01" not in str(error.value) and ".ringignore" in str(error.value)


def test_counting_stops_soon_after_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contents, "LIMIT_BYTES", 1000)
    monkeypatch.setattr(contents, "COUNT_S", 0.0)
    monkeypatch.setenv("HOME", str(tmp_path))
    write(tmp_path, *(f"file{number:02}" for number in range(9)), content="x" * 600)
    with pytest.raises(ConfigError, match="more than 2 files.*It is your home directory"):
        SourceTree(tmp_path)


@pytest.mark.parametrize("git", [True, False])
def test_what_is_left_out_is_known_and_named(tmp_path: Path, git: bool) -> None:
    if git:
        subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    write(tmp_path, "a.py", "data/x/1", "w.pt", ".env", "lib/b.py", "lib/__pycache__/a.pyc", "out/1", "b.log")
    write(tmp_path, ".gitignore", content="data/\nw.pt\n.env\n__pycache__\n")
    write(tmp_path, ".ringignore", content="out\n*.log\n")
    tree = SourceTree(tmp_path)
    line = describe_sent("b", (1, 1, 0), tree.ignored)
    names = "b.log, data/, out/, w.pt" if git else "b.log, out/"
    assert line == f"sent 1 of 1 files to b, 0.0 MB; git or .ringignore leaves out {names}"
    assert describe_sent("b", (1, 1, 0), [".env", "lib/__pycache__/"]) == "sent 1 of 1 files to b, 0.0 MB"
    assert tree.why_not_sent(tmp_path / "out" / "1") == "git or .ringignore leaves it out"
    assert "none of the files that were sent" in tree.why_not_sent(tmp_path / "later")
    assert "it is not in" in tree.why_not_sent(tmp_path.parent)


def test_a_link_out_of_the_tree_is_refused_and_one_inside_is_a_file(tmp_path: Path) -> None:
    root = tmp_path / "tree"
    write(root, "a.py", content="text")
    (root / "inside.py").symlink_to("a.py")
    assert [file.digest for file in SourceTree(root).files][0] == SourceTree(root).files[1].digest
    write(tmp_path, "secret")
    (root / "outside").symlink_to("../secret")
    with pytest.raises(ConfigError, match=r"outside is a symbolic link that leads out of"):
        SourceTree(root)


def test_the_working_directory_has_to_be_in_the_tree(tmp_path: Path) -> None:
    write(tmp_path, "a/b/c", "d/e")
    assert position(tmp_path / "a", tmp_path / "a") == "."
    assert position(tmp_path, tmp_path / "a" / "b") == "a/b"
    with pytest.raises(ConfigError, match="--ship="):
        position(tmp_path / "d", tmp_path / "a")


BOARD = Target("3.8", "aarch64", "2.31")


@pytest.mark.parametrize("glibc", ["", "3.1", "2.x", "2.9999999"])
def test_another_c_library_is_refused(glibc: str) -> None:
    with pytest.raises(ConfigError, match=r"glibc only.*package manager"):
        platform_tags(BOARD._replace(glibc=glibc))


class Pip:
    """Writes wheels as pip does, and counts how often."""

    def __init__(self) -> None:
        self.calls = 0
        self.version = "1.0"

    def __call__(self, argv: List[str], **_: object) -> Any:
        self.calls += 1
        folder = Path(argv[argv.index("--dest") + 1])
        for name in argv[argv.index("--dest") + 2 :]:
            with zipfile.ZipFile(folder / f"{name}-{self.version}-cp38-cp38-linux_aarch64.whl", "w") as wheel:
                wheel.writestr(f"{name}/__init__.py", "")
                wheel.writestr(f"{name}/tests/test_it.py", "")
        return subprocess.CompletedProcess(argv, 0, b"", b"")


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch) -> Pip:
    made = Pip()
    monkeypatch.setattr("ringrun.job.files.subprocess.run", made)
    return made


@pytest.fixture
def environ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Dict[str, str]:
    monkeypatch.setattr(shipped, "SHARED_PLACES", ())
    return {"XDG_CACHE_HOME": str(tmp_path / "cache")}


def kept_in(environ: Dict[str, str]) -> Path:
    return Path(environ["XDG_CACHE_HOME"], "ringcomm", "wheels-cp3.8-aarch64-glibc2.31")


def test_wheels_of_an_earlier_job_are_used_again(pip: Pip, environ: Dict[str, str]) -> None:
    package, lines = fetch_wheels(BOARD, environ)
    assert package.name == "numpy 1.0, psutil 1.0" and pip.calls == 1
    files = sorted(file.name for file in kept_in(environ).glob("*.whl"))
    assert [line.split()[0] for line in lines] == files
    assert all(len(line.split("sha256 ")[1]) == 65 for line in lines)
    again, lines = fetch_wheels(BOARD, environ)
    assert again.digest == package.digest and pip.calls == 1
    assert lines == [], "the digests are shown when they are downloaded"


@pytest.mark.parametrize("change", ["a link", "others may write", "removed"])
def test_a_wheel_that_is_not_as_it_was_downloaded_is_not_used(
    pip: Pip, environ: Dict[str, str], tmp_path: Path, change: str
) -> None:
    package, _ = fetch_wheels(BOARD, environ)
    wheel = next(kept_in(environ).glob("numpy*"))
    evil = tmp_path / "evil.whl"
    with zipfile.ZipFile(evil, "w") as archive:
        archive.writestr("numpy/__init__.py", "import evil")
    if change == "others may write":
        wheel.chmod(0o666)
    else:
        wheel.unlink()
    if change == "a link":
        wheel.symlink_to(evil)
    again, _ = fetch_wheels(BOARD, environ)
    assert again.digest == package.digest and pip.calls == 2


def test_a_download_that_fails_says_why(environ: Dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    failed = subprocess.CompletedProcess((), 1, b"", b"ERROR: No matching distribution found for numpy\n")
    monkeypatch.setattr("ringrun.job.files.subprocess.run", lambda *_, **__: failed)
    with pytest.raises(ConfigError, match="no wheels of numpy for Python 2.9 on vax with glibc 2.31"):
        fetch_wheels(Target("2.9", "vax", "2.31"), environ, ["numpy"])
