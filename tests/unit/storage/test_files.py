"""Files where other users may write: what they have put there is neither followed nor waited for."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ringcomm.errors import ConfigError
from ringcomm.job.timeline import TraceFile
from ringcomm.storage.files import new_file, open_named, read_file, write_file
from ringcomm.storage.folders import own_folder
from ringrun.diagnosis.records import diagnose_folder

OTHER_USER = 12345
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    """A directory that others may write to, and that belongs to another user."""
    folder = tmp_path / "theirs"
    folder.mkdir(mode=0o777)
    os.chown(folder, OTHER_USER, OTHER_USER)
    return folder


@pytest.mark.parametrize("trap", ["link", "fifo", "folder"])
def test_what_stands_in_the_place_of_a_file_is_neither_followed_nor_opened(tmp_path: Path, trap: str) -> None:
    precious, place = tmp_path / "precious", tmp_path / "flight.0.json"
    precious.write_text("precious")
    if trap == "link":
        place.symlink_to(precious)
    elif trap == "fifo":
        os.mkfifo(place)
    else:
        place.mkdir()
    with own_folder(tmp_path) as folder:
        if trap == "folder":
            with pytest.raises(IsADirectoryError):
                write_file(folder, place.name, b"{}")
        else:
            write_file(folder, place.name, b"{}")
            assert place.read_bytes() == b"{}" and place.stat().st_mode & 0o777 == 0o600
    assert precious.read_text() == "precious"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["flight.0.json", "precious"]


def test_a_file_that_cannot_be_filled_leaves_what_was_there(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("before")

    def fill(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with own_folder(tmp_path) as folder, pytest.raises(OSError, match="No space"):
        new_file(folder, "file", fill=fill)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["before"]


@as_root
def test_folders_of_other_users_are_refused(tmp_path: Path, theirs: Path) -> None:
    link = tmp_path / "link"
    (tmp_path / "mine").mkdir()
    link.symlink_to(tmp_path / "mine")
    os.chown(link, OTHER_USER, OTHER_USER, follow_symlinks=False)
    for folder in (theirs, link):
        with pytest.raises(OSError, match="another user"), own_folder(folder):
            pass


def test_a_named_file_is_emptied_and_no_fifo_is_waited_for(tmp_path: Path) -> None:
    path, fifo = tmp_path / "trace", tmp_path / "fifo"
    path.write_text("before")
    os.close(open_named(path))
    assert path.read_text() == ""
    os.close(open_named("/dev/null"))
    os.mkfifo(fifo)
    with pytest.raises(ConfigError, match="cannot be written"):
        TraceFile(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    with pytest.raises(OSError, match="FIFO"):
        open_named(fifo)
    os.close(reader)


def test_what_is_no_file_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "flight.0.json")
    for path in (tmp_path / "flight.0.json", Path("/dev/zero"), tmp_path):
        with pytest.raises(OSError, match="regular file"):
            read_file(path, 10)
    (tmp_path / "long").write_bytes(bytes(20))
    with pytest.raises(OSError, match="it is longer than 10 bytes"):
        read_file(tmp_path / "long", 10)
    text, code = diagnose_folder(tmp_path)
    assert code == 1 and text.strip().endswith("flight.0.json cannot be read: it is not a regular file.")
