from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, List

import pytest

from ringcomm.errors import ProtocolError
from ringrun.job import fetch
from ringrun.job.fetch import FetchedFiles, matches
from ringrun.job.launch import Options, prepare
from ringrun.reach import doors

A: Any = SimpleNamespace(name="a", gets_code=True)
B: Any = SimpleNamespace(name="b", gets_code=True)
OTHER_USER = 12345
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


@pytest.fixture(autouse=True)
def no_lookups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which hosts are this machine is not asked of any resolver here."""
    local = lambda specs, **_: [spec.name == "localhost" for spec in specs]  # noqa: E731
    monkeypatch.setattr(doors, "find_local", local)


def piece(path: Any, offset: Any, data: bytes = b"", **more: Any) -> bytes:
    return json.dumps({"path": path, "offset": offset, **more}).encode() + b"\n" + data


def test_pieces_are_put_together_by_host(tmp_path: Path) -> None:
    files = FetchedFiles(tmp_path / "fetched", ["**"])
    files.take(A, piece("out/model.pt", 0, b"first\n"))
    files.take(B, piece("out/model.pt", 0, b"other"))
    files.take(A, piece("out/model.pt", 6, b"second"))
    assert (tmp_path / "fetched/a/out/model.pt").read_bytes() == b"first\nsecond"
    assert (tmp_path / "fetched/b/out/model.pt").read_bytes() == b"other"
    files.take(A, piece("out/model.pt", 0, b"of the next attempt"))
    assert (tmp_path / "fetched/a/out/model.pt").read_bytes() == b"of the next attempt"


def test_what_was_fetched_and_what_was_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text("")
    monkeypatch.chdir(tmp_path)
    options = Options(hosts="a,b,localhost", ship=".", fetch=("out/*", "*.pt"))
    job = prepare(options, ["train.py"], {"PWD": str(tmp_path)})
    assert [host.gets_code for host in job.hosts] == [True, True, False]
    files = FetchedFiles(tmp_path / "fetched", ["**"])
    files.take(A, piece("one", 0, b"x" * 200_000))
    assert files.describe(job).splitlines() == [
        f"fetched 1 file, 0.2 MB, from a into {tmp_path}/fetched/a",
        "b sent no file that matches out/* or *.pt",
    ]
    files.take(A, piece("two", 0))
    files.take(B, piece("secret", 0, error="Permission denied"))
    (tmp_path / "fetched" / "b").touch()  # in the way of the directory
    files.take(B, piece("three", 0))
    first, second, *problems = files.describe(job).splitlines()
    assert first.startswith("fetched 2 files") and second.startswith("b sent no file")
    assert problems[0] == "b: secret could not be read: Permission denied"
    assert problems[1].startswith(f"{tmp_path}/fetched/b/three could not be written: ")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}",
        b"[1]",
        b"\xff\n",
        piece("/etc/passwd", 0),
        piece("a/../../b", 0),
        piece("", 0),
        piece("a", "0"),
        piece("a", None),
        piece(3, 0),
        piece("a\0b", 0),
        piece("a\ud800b", 0),
        piece("a", -1),
        piece("a", True),
        piece("a", 5, b"not from its start"),
    ],
)
def test_a_piece_that_is_none(tmp_path: Path, data: bytes) -> None:
    """Nothing that a host sends ends the launcher, or is written elsewhere."""
    with pytest.raises(ProtocolError):
        FetchedFiles(tmp_path / "fetched", ["**"]).take(A, data)
    assert list(tmp_path.iterdir()) == []


def test_a_host_from_which_nothing_is_fetched_cannot_send_files(tmp_path: Path) -> None:
    local: Any = SimpleNamespace(name="c", gets_code=False)
    for files, host in [
        (FetchedFiles(tmp_path / "fetched", []), A),
        (FetchedFiles(tmp_path / "fetched", ["**"]), local),
    ]:
        with pytest.raises(ProtocolError, match="fetches none from it"):
            files.take(host, piece("out/a", 0, b"x"))
    assert list(tmp_path.iterdir()) == []


def test_only_files_that_match_are_taken(tmp_path: Path) -> None:
    files = FetchedFiles(tmp_path / "fetched", ["out/*.pt", "log"])
    files.take(A, piece("out/a.pt", 0, b"x"))
    files.take(A, piece("log", 0, b"x"))
    for path in ("out/deep/a.pt", "out/.a.pt", ".ssh/authorized_keys", "out", "train.py"):
        with pytest.raises(ProtocolError, match="not asked for"):
            files.take(A, piece(path, 0, b"x"))
        with pytest.raises(ProtocolError, match="not asked for"):
            files.take(A, piece(path, 0, error="gone"))


@pytest.mark.parametrize(
    ("pattern", "yes", "no"),
    [
        ("out/**", ["out/a", "out/b/c", "out"], ["out/.a", "out/.b/c", "a"]),
        ("**", ["a", "a/b/c"], [".a", "a/.b/c"]),
        ("**/*.pt", ["a.pt", "x/y/a.pt"], ["a.py", ".x/a.pt"]),
        ("./a/../b?[0-9]", ["bx1"], ["a/bx1", "bx", "bxx"]),
        (".hidden/*", [".hidden/a"], ["hidden/a", ".hidden/.a"]),
    ],
)
def test_patterns_match_as_glob_finds_files(pattern: str, yes: List[str], no: List[str]) -> None:
    assert [path for path in yes if not matches(path, pattern)] == []
    assert [path for path in no if matches(path, pattern)] == []


@as_root
@pytest.mark.parametrize("place", ["fetched", "fetched/a", "fetched/a/.ssh"])
def test_a_link_of_another_user_leads_no_file_elsewhere(tmp_path: Path, place: str) -> None:
    home, link = tmp_path / "home", tmp_path / place
    (home / ".ssh").mkdir(parents=True)
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(home / ".ssh" if place.endswith(".ssh") else home)
    os.chown(link, OTHER_USER, OTHER_USER, follow_symlinks=False)
    files = FetchedFiles(tmp_path / "fetched", [".ssh/*"])
    files.take(A, piece(".ssh/authorized_keys", 0, b"ssh-rsa"))
    files.take(A, piece(".ssh/authorized_keys", 7, b" AAAA"))
    assert [path.name for path in home.rglob("*")] == [".ssh"]
    assert len(files._problems) == 1 and "could not be written" in files._problems[0]


def test_a_link_in_the_place_of_a_file_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("keep")
    (tmp_path / "fetched" / "a").mkdir(parents=True)
    (tmp_path / "fetched" / "a" / "x").symlink_to(tmp_path / "precious")
    files = FetchedFiles(tmp_path / "fetched", ["*"])
    files.take(A, piece("x", 0, b"new"))
    assert (tmp_path / "fetched" / "a" / "x").read_bytes() == b"new"
    assert (tmp_path / "precious").read_text() == "keep"


def test_a_host_cannot_fill_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "HOST_LIMIT_BYTES", 1000)
    monkeypatch.setattr(fetch, "HOST_LIMIT_FILES", 3)
    files = FetchedFiles(tmp_path / "fetched", ["*"])
    for offset in range(0, 5000, 500):
        files.take(A, piece("big", offset, bytes(500)))
    files.take(B, piece("small", 0, bytes(500)))
    for number in range(9):
        files.take(B, piece(f"{number}", 0))
    assert (tmp_path / "fetched" / "a" / "big").stat().st_size == 1000
    assert len(list((tmp_path / "fetched" / "b").iterdir())) == 3
    assert files._problems == [
        "a sent more than 0 GiB; the rest was left out",
        "b sent more than 3 files; the others were left out",
    ]
