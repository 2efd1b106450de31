from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from ringcomm.errors import ProtocolError
from ringrun.job.files import FetchedFiles
from ringrun.job.launch import prepare
from ringrun.plan.options import Options

ALL = ("**",)


def piece(path: Any, offset: Any, data: bytes = b"", last: bool = True, **more: Any) -> bytes:
    return json.dumps({"path": path, "offset": offset, "last": last, **more}).encode() + b"\n" + data


def test_pieces_are_put_together_by_host(tmp_path: Path) -> None:
    files = FetchedFiles(tmp_path / "fetched")
    files.take("a", piece("out/model.pt", 0, b"first\n", last=False), ALL)
    files.take("b", piece("out/model.pt", 0, b"other"), ALL)
    files.take("a", piece("out/model.pt", 6, b"second"), ALL)
    assert (tmp_path / "fetched/a/out/model.pt").read_bytes() == b"first\nsecond"
    assert (tmp_path / "fetched/b/out/model.pt").read_bytes() == b"other"
    files.take("a", piece("out/model.pt", 0, b"of the next attempt"), ALL)
    assert (tmp_path / "fetched/a/out/model.pt").read_bytes() == b"of the next attempt"


def test_what_was_fetched_and_what_was_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text("")
    monkeypatch.chdir(tmp_path)
    options = Options(hosts="a,b,localhost", ship=".", fetch=("out/*", "*.pt"))
    job = prepare(options, ["train.py"], {"PWD": str(tmp_path)})
    assert [host.gets_code for host in job.hosts] == [True, True, False]
    files = FetchedFiles(tmp_path / "fetched")
    files.take("a", piece("one", 0, b"x" * 200_000), ALL)
    assert files.describe(job).splitlines() == [
        f"fetched 1 file, 0.2 MB, from a into {tmp_path}/fetched/a",
        "b sent no file that matches out/* or *.pt",
    ]
    files.take("a", piece("two", 0), ALL)
    files.take("b", piece("secret", 0, error="Permission denied"), ALL)
    (tmp_path / "fetched" / "b").touch()  # in the way of the directory
    files.take("b", piece("three", 0), ALL)
    first, second, *problems = files.describe(job).splitlines()
    assert first.startswith("fetched 2 files") and second.startswith("b sent no file")
    assert problems[0] == "b: secret could not be read: 'Permission denied'"
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
    ],
)
def test_a_piece_that_is_none(tmp_path: Path, data: bytes) -> None:
    """Nothing that a host sends ends the launcher, or is written elsewhere."""
    with pytest.raises(ProtocolError):
        FetchedFiles(tmp_path / "fetched").take("a", data, ALL)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "path, patterns",
    [
        ("model.pt", ()), (".bashrc", ALL), ("out/.hidden/x", ("out/**",)), ("out/deep/x.pt", ("out/*.pt",)),
        ("secret", ("out/*", "*.pt")),
    ],
)  # fmt: skip
def test_a_file_that_the_job_does_not_fetch(tmp_path: Path, path: str, patterns: Any) -> None:
    with pytest.raises(ProtocolError, match="which this job does not fetch"):
        FetchedFiles(tmp_path / "fetched").take("a", piece(path, 0, b"x"), patterns)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("place", ["fetched/evil", "fetched/evil/.ssh", "fetched"])
def test_no_link_in_the_way_is_followed(tmp_path: Path, place: str) -> None:
    victim = tmp_path / "victim"
    (victim / ".ssh").mkdir(parents=True)
    (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / place).symlink_to(victim if place == "fetched/evil" else victim / ".ssh")
    if place == "fetched":  # the top may be the user's own link, but not another user's
        if os.geteuid():
            pytest.skip("only root can make another user's link")
        os.lchown(tmp_path / place, 12345, 12345)
    files = FetchedFiles(tmp_path / "fetched")
    files.take("evil", piece(".ssh/authorized_keys", 0, b"ssh-ed25519 AAAA"), (".ssh/*",))
    assert list((victim / ".ssh").iterdir()) == []
    assert len(files._problems) == 1 and "could not be written" in files._problems[0]


def test_what_stands_in_the_place_of_a_file_is_replaced(tmp_path: Path) -> None:
    victim, folder = tmp_path / "victim", tmp_path / "fetched" / "a"
    victim.write_text("precious")
    folder.mkdir(parents=True)
    (folder / "link").symlink_to(victim)
    os.link(victim, folder / "hard")
    os.mkfifo(folder / "fifo")
    files = FetchedFiles(tmp_path / "fetched")
    for name in ("link", "hard", "fifo"):
        files.take("a", piece(name, 0, b"sent"), ALL)
        assert (folder / name).read_bytes() == b"sent" and not (folder / name).is_symlink()
    assert victim.read_text() == "precious"


def test_only_complete_files_have_a_name(tmp_path: Path) -> None:
    files = FetchedFiles(tmp_path)
    files.take("a", piece("x", 0, b"first", last=False), ALL)
    for wrong in (piece("y", 5, b"z"), piece("x", 4, b"z")):
        with pytest.raises(ProtocolError, match="does not follow"):
            files.take("a", wrong, ALL)
    files.take("a", piece("other", 0, b"whole"), ALL)
    files.take("a", piece("more", 0, b"half", last=False), ALL)
    files.describe(prepare(Options(), ["true"]))
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["other"]
    assert files._problems == ["a: more did not arrive completely"]


def test_a_host_cannot_fill_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ringrun.job.files.MAX_HOST_BYTES", 10)
    files = FetchedFiles(tmp_path)
    files.take("a", piece("small", 0, b"12345678"), ALL)
    files.take("a", piece("large", 0, b"123", last=False), ALL)
    files.take("a", piece("large", 3, b"456"), ALL)  # what follows is dropped without a further word
    files.take("b", piece("small", 0, b"12345678"), ALL)
    assert len(files._problems) == 1 and "a has sent" in files._problems[0]
    monkeypatch.setattr("ringrun.job.files.MIN_FREE_BYTES", 1 << 60)
    files.take("b", piece("x", 0, b"1"), ALL)
    assert "would be left" in files._problems[1]
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == ["small", "small"]


@pytest.mark.parametrize(
    ("path", "why"),
    [("out/\x1b[2J", "control characters"), ("a\nb", "control characters"), ("\u202ea", "control"),
     ("/".join("a" * 1200), "more than 64 components")],
)  # fmt: skip
def test_odd_names_are_not_taken(tmp_path: Path, path: str, why: str) -> None:
    """A line says so, and the host's other files come."""
    files = FetchedFiles(tmp_path / "fetched")
    files.take("a", piece(path, 0, b"first", last=False), ("**",))
    files.take("a", piece(path, 5, b"second"), ("**",))
    files.take("a", piece("good", 0, b"x"), ("**",))
    assert [item.name for item in (tmp_path / "fetched/a").iterdir()] == ["good"]
    (line,) = files.describe(prepare(Options(), ["true"])).splitlines()
    assert why in line and line.isprintable()
