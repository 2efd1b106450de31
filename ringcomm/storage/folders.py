# ruff: noqa: PTH102, PTH109, PTH112, PTH116, PTH118, PTH120, PTH208  descriptors, and no pathlib in the agent
"""Folders that hold code, keys, records or results: opened, made, listed and removed here.

Another user of the machine may have prepared an entry (``/tmp``, a shared folder): a symbolic or hard link, a
FIFO, or a folder. The rules of this module and of :mod:`.files`, for all of ringcomm and ringrun:

* A symbolic link on a path counts only if it belongs to this user or to the administrator; the folder is then
  opened once, without following links, and inside it everything is reached by its descriptor.
* A folder for results (:func:`own_folder`) belongs to this user or to the administrator. A folder for code or
  keys (:func:`trusted_folder`) cannot be changed by other users, and neither can those above it: programs are
  started by their path. ``sshd`` asks the same of its files.
* A folder in a shared place is removed only if it has a file that ringcomm has made there
  (:func:`marked_folder`).
* A new file is made under a random name and renamed: an existing one is replaced, never followed or opened.

Standard library only, Python 3.8: ringrun sends both files to hosts with its agent.
"""

from __future__ import annotations

import errno
import os
import stat
import sys
from contextlib import contextmanager
from typing import Iterator, List, Pattern, Tuple, Union

Path = Union[str, "os.PathLike[str]"]
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_MAX_LINKS = 40
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_SYSTEM = os.stat("/").st_uid


def is_ours(facts: os.stat_result) -> bool:
    """Return whether a file belongs to this user, or to the administrator."""
    return facts.st_uid in (os.geteuid(), 0)


def _is_systems(facts: os.stat_result, place: str) -> bool:
    """Return whether the owner of ``/`` has a file in a folder that only that owner, or this user, can write.
    A container without root shows that owner under another number than 0, and other users of the host as
    well; these have no file in such a folder.
    """
    around = os.lstat(os.path.dirname(place))
    is_closed = (is_ours(around) or around.st_uid == _SYSTEM) and not around.st_mode & OTHERS_WRITE
    return facts.st_uid == _SYSTEM and is_closed


def others_write(facts: os.stat_result, place: Union[int, str]) -> bool:
    """Return whether another user may write a file or folder, which is at a path or descriptor. Many systems
    make a group for each user, with a umask of 002; an access control list gives no more than the group's.
    """
    mode = facts.st_mode & OTHERS_WRITE
    own = mode == stat.S_IWGRP and facts.st_uid == os.geteuid() != 0
    return bool(mode) and not (own and _is_private(facts.st_gid, facts.st_uid) and not _has_list(place))


def _has_list(place: Union[int, str]) -> bool:
    try:
        return sys.platform == "linux" and bool(os.getxattr(place, "system.posix_acl_access"))
    except OSError:  # it has none
        return False


def _is_private(gid: int, uid: int) -> bool:
    """Return whether a group is a user's own: its primary group, of its name, without another member."""
    import grp
    import pwd

    try:
        user, group = pwd.getpwuid(uid), grp.getgrgid(gid)
    except KeyError:
        return False
    return (
        (user.pw_gid, user.pw_name) == (gid, group.gr_name)
        and set(group.gr_mem) <= {user.pw_name}
        and all(other.pw_uid == uid for other in pwd.getpwall() if other.pw_gid == gid)
    )


def another_users(path: Path, facts: os.stat_result) -> OSError:
    """Return the error for a file or folder of another user."""
    text = f"it belongs to another user (number {facts.st_uid})"
    return PermissionError(errno.EPERM, text, os.fspath(path))


# -- paths ----------------------------------------------------------------------------------------


def resolved(path: Path, follow_last: bool = True, trusted: bool = False) -> str:
    """Return an absolute path without symbolic links; PermissionError if one of them is another user's.
    ``follow_last``: resolve a link that the whole path names; ``trusted``: and no other user can exchange a
    link. Below ``/proc`` (``/dev/stdout``) links stay.
    """
    text = os.fspath(path)
    if not text.startswith("/"):
        text = os.path.join(os.getcwd(), text)
    left, here, links = text.split("/")[::-1], "/", 0
    while left:
        name = left.pop()
        if name in ("", "."):
            continue
        if name == "..":
            here = os.path.dirname(here)
            continue
        place = os.path.join(here, name)
        facts = None if here.startswith("/proc/") or not (left or follow_last) else _status(place)
        if facts is None or not stat.S_ISLNK(facts.st_mode):
            here = place
            continue
        links += 1
        if links > _MAX_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), text)
        if not (is_ours(facts) or _is_systems(facts, place)):
            raise another_users(place, facts)
        if trusted:
            _check_above(place)
        target = os.readlink(place)
        here = "/" if target.startswith("/") else here
        left += target.split("/")[::-1]
    return here


def _status(path: str) -> Union[os.stat_result, None]:
    try:
        return os.lstat(path)
    except FileNotFoundError:
        return None


def open_resolved(path: Path, flags: int, mode: int = 0o666) -> int:
    """Open a file whose path has links of this user and of the administrator only."""
    place = resolved(path)
    follow = 0 if place.startswith("/proc/") else os.O_NOFOLLOW
    return os.open(place, flags | follow | os.O_CLOEXEC, mode)


def make_folders(path: str, mode: int) -> None:
    """Make a folder and the missing ones above it; another process may do so at the same time."""
    if not os.path.isdir(path):
        make_folders(os.path.dirname(path), mode)
        try:
            os.mkdir(path, mode)
        except FileExistsError:
            pass


def _check_above(path: str) -> None:
    """Raise PermissionError if another user could exchange a folder above a resolved path."""
    above = path
    while above != "/":
        above = os.path.dirname(above)
        facts, why = os.lstat(above), ""
        if not (is_ours(facts) or _is_systems(facts, above)):
            why = f"it belongs to another user (number {facts.st_uid})"
        elif others_write(facts, above) and not facts.st_mode & stat.S_ISVTX:
            why = f"other users may write it (mode {stat.S_IMODE(facts.st_mode):04o})"
        if why:
            raise PermissionError(errno.EPERM, f"as to the folder {above} above it: {why}", path)


# -- folders --------------------------------------------------------------------------------------


@contextmanager
def own_folder(path: Path, mode: Union[int, None] = 0o777) -> Iterator[int]:
    """Yield a descriptor of a folder for results, not another user's; ``mode``: for making it, or None."""
    place = resolved(path)
    if mode is not None:
        make_folders(place, mode)
    descriptor = os.open(place, _FOLDER)
    try:
        facts = os.fstat(descriptor)
        if not is_ours(facts):
            raise another_users(path, facts)
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def trusted_folder(path: Path, make: bool = True) -> Iterator[int]:
    """Yield a descriptor of a folder for code or keys, which only this user and the administrator can change;
    the error names a folder above it by which others could. ``make``: make it, with mode 0700.
    """
    place = resolved(path, trusted=True)
    if make:
        make_folders(place, 0o700)
    _check_above(place)
    with own_folder(place, None) as descriptor:
        facts = os.fstat(descriptor)
        if others_write(facts, descriptor):
            why = f"other users may write it (mode {stat.S_IMODE(facts.st_mode):04o})"
            raise PermissionError(errno.EPERM, why, os.fspath(path))
        yield descriptor


@contextmanager
def temporary_folder(path: Path) -> Iterator[int]:
    """Yield a descriptor of a folder like ``/tmp``: other users may add to it, but not rename entries; raises
    OSError if another user could exchange this user's entries.
    """
    place = resolved(path, trusted=True)
    _check_above(os.path.join(place, "name"))
    descriptor = os.open(place, _FOLDER)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def inner_folder(folder: int, path: str, mode: Union[int, None] = 0o700) -> Iterator[int]:
    """Yield a descriptor of a folder below an opened one, at a relative path without ``..`` and links ("":
    the folder itself). ``mode``: of folders that are made; None: they must exist.
    """
    parts = path.split("/") if path else []
    if ".." in parts or path.startswith("/"):
        raise OSError(errno.EINVAL, "its path leaves the folder", path)
    here = os.open(".", _FOLDER, dir_fd=folder)
    try:
        for part in parts:
            if mode is not None and part:
                try:
                    os.mkdir(part, mode, dir_fd=here)
                except FileExistsError:
                    pass
            below = os.open(part or ".", _FOLDER, dir_fd=here)
            os.close(here)
            here = below
            facts = os.fstat(here)
            if not is_ours(facts):
                raise another_users(path, facts)
        yield here
    finally:
        os.close(here)


def marked_folder(folder: int, prefix: str, marker: str) -> str:
    """Make a folder like :func:`new_folder`, with an empty file by which :func:`has_marker` knows it."""
    name = new_folder(folder, prefix)
    try:
        with inner_folder(folder, name, None) as inner:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            os.close(os.open(marker, flags, 0o600, dir_fd=inner))
    except OSError:
        os.rmdir(name, dir_fd=folder)
        raise
    return name


def has_marker(folder: int, name: str, marker: str) -> bool:
    """Return whether a folder was made by :func:`marked_folder`."""
    try:
        with inner_folder(folder, name, None) as inner:
            return stat.S_ISREG(os.stat(marker, dir_fd=inner, follow_symlinks=False).st_mode)
    except OSError:
        return False


def new_folder(folder: int, prefix: str) -> str:
    """Make a folder with a random name that only this user can enter, and return the name."""
    name = prefix + os.urandom(8).hex()
    os.mkdir(name, 0o700, dir_fd=folder)
    return name


def owned_names(folder: int, pattern: Pattern[str]) -> List[Tuple[str, os.stat_result]]:
    """Return this user's entries in a folder whose whole names match, with their status, the latest first.
    The pattern must fit only names that ringcomm makes: they may be removed later.
    """
    found = []
    for name in os.listdir(folder):
        if pattern.fullmatch(name):
            try:
                facts = os.stat(name, dir_fd=folder, follow_symlinks=False)
            except FileNotFoundError:
                continue  # another process has removed it
            if facts.st_uid == os.geteuid():
                found.append((name, facts))
    return sorted(found, key=lambda row: row[1].st_mtime, reverse=True)


def remove(folder: int, name: str) -> None:
    """Remove a file, or a folder with its content, if it exists. Links are removed, not followed."""
    try:
        inner = os.open(name, _FOLDER, dir_fd=folder)
    except FileNotFoundError:
        return
    except OSError as problem:
        if problem.errno not in (errno.ENOTDIR, errno.ELOOP, errno.EMLINK):
            raise
        os.unlink(name, dir_fd=folder)
        return
    try:
        for each in os.listdir(inner):
            remove(inner, each)
    finally:
        os.close(inner)
    os.rmdir(name, dir_fd=folder)
