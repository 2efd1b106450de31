# ruff: noqa: PTH208  by descriptors
"""Folders that another user could prepare or exchange: what is opened, made, refused and removed."""

from __future__ import annotations

import grp
import os
import pwd
import re
import struct
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Callable

import pytest

from ringcomm.errors import ConfigError
from ringcomm.job.timeline import TraceFile
from ringcomm.storage import folders
from ringcomm.storage.files import Exposed, new_file, open_named, read_at, read_file, read_private, write_file
from ringcomm.storage.folders import inner_folder, own_folder, remove, trusted_folder
from ringrun.diagnosis.records import diagnose_folder

OTHER_USER = 12345
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


def test_a_trusted_folder_is_made_for_this_user_alone(tmp_path: Path) -> None:
    before = os.umask(0o002)  # with which a parent would be made for the group to write
    try:
        with trusted_folder(tmp_path / "a" / "b") as folder:
            write_file(folder, "x", b"1")
    finally:
        os.umask(before)
    assert [path.stat().st_mode & 0o777 for path in (tmp_path / "a", tmp_path / "a" / "b")] == [0o700] * 2
    with pytest.raises(FileNotFoundError), trusted_folder(tmp_path / "none", make=False):
        pass


@pytest.mark.parametrize("mode", [0o770, 0o777, 0o702])
def test_a_folder_above_that_others_may_write_is_not_trusted(tmp_path: Path, mode: int) -> None:
    above = tmp_path / "shared"
    (above / "cache").mkdir(mode=0o700, parents=True)
    above.chmod(mode)
    text = f"as to the folder {above} above it: other users may write it (mode {mode:04o})"
    with pytest.raises(PermissionError, match=re.escape(text)), trusted_folder(above / "cache"):
        pass
    above.chmod(mode | 0o1000)
    with trusted_folder(above / "cache"):
        pass
    with pytest.raises(PermissionError, match="other users may write it"), trusted_folder(above):
        pass  # sticky or not: other users may add to it


@as_root
@pytest.mark.parametrize("opened", [own_folder, trusted_folder])
def test_links_of_another_user_are_followed_nowhere_on_the_way(tmp_path: Path, opened: object) -> None:
    assert callable(opened)
    (tmp_path / "real" / "inner").mkdir(parents=True)
    before = len(os.listdir("/proc/self/fd"))
    link = tmp_path / "link"
    link.symlink_to("real")
    with opened(link / "inner"):
        pass
    os.chown(link, OTHER_USER, OTHER_USER, follow_symlinks=False)
    os.chown(tmp_path / "real" / "inner", OTHER_USER, OTHER_USER)
    for place in (link / "inner", tmp_path / "real" / "inner"):
        with pytest.raises(PermissionError, match="another user"), opened(place):
            pass
    assert len(os.listdir("/proc/self/fd")) == before


@as_root
@pytest.mark.parametrize("mode", [0o755, 0o1777])
def test_in_a_container_without_root_the_system_is_whoever_owns_the_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int
) -> None:
    """Other users of the host have the same number there, and files only in folders that all may write."""
    (tmp_path / "system" / "real").mkdir(parents=True)
    (tmp_path / "system" / "real" / "cache").mkdir()
    (tmp_path / "system" / "link").symlink_to("real")
    for path in (tmp_path / "system", tmp_path / "system" / "real", tmp_path / "system" / "link"):
        os.chown(path, OTHER_USER, OTHER_USER, follow_symlinks=False)
    (tmp_path / "system").chmod(mode)
    monkeypatch.setattr(folders, "_SYSTEM", OTHER_USER)
    for above in ("real", "link"):
        told = nullcontext() if mode == 0o755 else pytest.raises(PermissionError, match="another user")
        with told, trusted_folder(tmp_path / "system" / above / "cache"):
            pass


def test_links_that_lead_around_in_a_circle_end(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(OSError, match="symbolic links"), own_folder(tmp_path / "a"):
        pass


def test_inside_an_opened_folder_not_even_an_own_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "top").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "top" / "link").symlink_to(tmp_path / "elsewhere")
    with own_folder(tmp_path / "top") as top:
        with pytest.raises(NotADirectoryError), inner_folder(top, "link/deep"):
            pass
        for path in ("../elsewhere", "/etc", "a/../.."):
            with pytest.raises(OSError, match="leaves the folder"), inner_folder(top, path):
                pass
        with inner_folder(top, "a/b") as inner:
            write_file(inner, "x", b"1")
        with inner_folder(top, "") as same:
            assert sorted(os.listdir(same)) == ["a", "link"]
    assert (tmp_path / "top" / "a" / "b" / "x").read_bytes() == b"1"
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_remove_follows_no_link(tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "file").write_text("keep")
    gone = tmp_path / "gone"
    (gone / "deep").mkdir(parents=True)
    (gone / "deep" / "file").touch()
    (gone / "link").symlink_to(tmp_path / "precious")
    os.mkfifo(gone / "fifo")
    (tmp_path / "link").symlink_to(tmp_path / "precious")
    with own_folder(tmp_path) as folder:
        for name in ("gone", "link", "nothing"):
            remove(folder, name)
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]
    assert (tmp_path / "precious" / "file").read_text() == "keep"


@as_root
@pytest.mark.parametrize("mode", [0o600, 0o644, 0o666])
def test_a_secret_of_another_user_is_refused_whatever_its_mode(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "key"
    path.write_text("x")
    path.chmod(mode)
    os.chown(path, OTHER_USER, OTHER_USER)
    with pytest.raises(PermissionError, match=r"another user \(number 12345\)"):
        read_private(path, 10)


def test_a_secret_that_others_may_read_is_refused_and_a_fifo_is_not_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text("secret")
    path.chmod(0o600)
    (tmp_path / "link").symlink_to("key")
    with pytest.raises(OSError, match="it is longer than 3 bytes"):
        read_private(path, 3)
    assert read_private(path, 6) == read_private(tmp_path / "link", 99) == b"secret"
    path.chmod(0o640)
    with pytest.raises(Exposed, match="its mode is 0640"):
        read_private(path, 10)
    os.mkfifo(tmp_path / "fifo", 0o600)
    for odd in (tmp_path / "fifo", tmp_path, Path("/dev/zero")):
        with pytest.raises(OSError, match="not a regular file"):
            read_private(odd, 10)


def test_a_file_in_a_folder_is_read_only_if_no_other_user_may_change_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"content")
    (tmp_path / "link").symlink_to("file")
    os.mkfifo(tmp_path / "fifo", 0o600)
    with own_folder(tmp_path) as folder:
        assert read_at(folder, "file") == read_at(folder, "file", 7) == b"content"
        with pytest.raises(OSError, match="it is longer than 3 bytes"):
            read_at(folder, "file", 3)
        for name in ("link", "fifo", "nothing"):
            with pytest.raises(OSError):
                read_at(folder, name)
        (tmp_path / "file").chmod(0o620)
        with pytest.raises(Exposed):
            read_at(folder, "file")


def test_links_of_the_system_to_streams_are_followed(capfd: pytest.CaptureFixture[str]) -> None:
    descriptor = open_named("/dev/stdout")
    os.write(descriptor, b"here")
    os.close(descriptor)
    assert capfd.readouterr().out == "here"


def _as_user(uid: int, gid: int, call: Callable[[], bool]) -> bool:
    """Return what a call returns in a process of another user."""
    child = os.fork()
    if not child:
        code = 2
        try:
            os.setgroups([])
            os.setgid(gid)
            os.setuid(uid)
            code = int(call())
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.WIFEXITED(status) and os.WEXITSTATUS(status) in (0, 1), status
    return bool(os.WEXITSTATUS(status))


@as_root
def test_a_group_without_another_member_may_write(tmp_path: Path) -> None:
    user = pwd.getpwnam("daemon")
    others = grp.getgrnam("tty").gr_gid
    path = tmp_path / "file"
    path.touch()
    found = {}
    for gid, mode in ((user.pw_gid, 0o664), (user.pw_gid, 0o666), (others, 0o664), (others, 0o644)):
        os.chown(path, user.pw_uid, gid)
        path.chmod(mode)
        judged = partial(folders.others_write, path.stat(), str(path))
        found[gid, mode] = _as_user(user.pw_uid, user.pw_gid, judged)
    assert list(found.values()) == [False, True, True, False]
    os.chown(path, user.pw_uid, user.pw_gid)
    path.chmod(0o664)
    assert folders.others_write(path.stat(), str(path))  # the file of another user


@as_root
def test_an_access_list_for_another_user_is_seen_behind_a_private_group(tmp_path: Path) -> None:
    user = pwd.getpwnam("daemon")
    os.chown(tmp_path, user.pw_uid, user.pw_gid)
    tmp_path.chmod(0o775)

    def judged() -> bool:
        return folders.others_write(os.fstat(opened), opened)

    opened = os.open(tmp_path, os.O_RDONLY)
    assert not _as_user(user.pw_uid, user.pw_gid, judged)
    # Another user may write, in the system's form.
    rows = ((1, 7, -1), (2, 7, OTHER_USER), (4, 5, -1), (16, 7, -1), (32, 5, -1))
    form = struct.pack("<I", 2) + b"".join(struct.pack("<HHi", *row) for row in rows)
    try:
        os.setxattr(tmp_path, "system.posix_acl_access", form)
    except OSError as problem:
        pytest.skip(f"no access lists here: {problem}")
    assert _as_user(user.pw_uid, user.pw_gid, judged)
    os.close(opened)


def test_a_temporary_folder_is_one_in_which_others_rename_nothing(tmp_path: Path) -> None:
    tmp_path.chmod(0o1777)
    with folders.temporary_folder(tmp_path) as opened:
        name = folders.marked_folder(opened, "mine-", ".marker")
        assert folders.has_marker(opened, name, ".marker") and os.listdir(opened) == [name]
        assert not folders.has_marker(opened, "absent", ".marker")
    tmp_path.chmod(0o777)
    with pytest.raises(PermissionError, match="other users may write it"), folders.temporary_folder(tmp_path):
        pass


# ---- files where other users may write ----------------------------------------------------------


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
