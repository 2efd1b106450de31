from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ringcomm.errors import ProtocolError
from ringrun.job.fetch import FetchedFiles
from ringrun.job.launch import Options, prepare
from ringrun.reach import doors


@pytest.fixture(autouse=True)
def no_lookups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which hosts are this machine is not asked of any resolver here."""
    local = lambda specs, **_: [spec.name == "localhost" for spec in specs]  # noqa: E731
    monkeypatch.setattr(doors, "find_local", local)


def piece(path: Any, offset: Any, data: bytes = b"", **more: Any) -> bytes:
    return json.dumps({"path": path, "offset": offset, **more}).encode() + b"\n" + data


def test_pieces_are_put_together_by_host(tmp_path: Path) -> None:
    files = FetchedFiles(tmp_path / "fetched")
    files.take("a", piece("out/model.pt", 0, b"first\n"))
    files.take("b", piece("out/model.pt", 0, b"other"))
    files.take("a", piece("out/model.pt", 6, b"second"))
    assert (tmp_path / "fetched/a/out/model.pt").read_bytes() == b"first\nsecond"
    assert (tmp_path / "fetched/b/out/model.pt").read_bytes() == b"other"
    files.take("a", piece("out/model.pt", 0, b"of the next attempt"))
    assert (tmp_path / "fetched/a/out/model.pt").read_bytes() == b"of the next attempt"


def test_what_was_fetched_and_what_was_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text("")
    monkeypatch.chdir(tmp_path)
    options = Options(hosts="a,b,localhost", ship=".", fetch=("out/*", "*.pt"))
    job = prepare(options, ["train.py"], {"PWD": str(tmp_path)})
    assert [host.gets_code for host in job.hosts] == [True, True, False]
    files = FetchedFiles(tmp_path / "fetched")
    files.take("a", piece("one", 0, b"x" * 200_000))
    assert files.describe(job).splitlines() == [
        f"fetched 1 file, 0.2 MB, from a into {tmp_path}/fetched/a",
        "b sent no file that matches out/* or *.pt",
    ]
    files.take("a", piece("two", 0))
    files.take("b", piece("secret", 0, error="Permission denied"))
    (tmp_path / "fetched" / "b").touch()  # in the way of the directory
    files.take("b", piece("three", 0))
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
    ],
)
def test_a_piece_that_is_none(tmp_path: Path, data: bytes) -> None:
    """Nothing that a host sends ends the launcher, or is written elsewhere."""
    with pytest.raises(ProtocolError):
        FetchedFiles(tmp_path / "fetched").take("a", data)
    assert list(tmp_path.iterdir()) == []
