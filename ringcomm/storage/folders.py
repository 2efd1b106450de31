# ruff: noqa: PTH109, PTH116, PTH118, PTH208  descriptors, and no pathlib in the agent
"""Folders that hold code, keys, records or results: opened, made, listed and removed here.

Another user of the machine may have prepared an entry (``/tmp``, a shared folder, a shared cache): a symbolic
or hard link, a FIFO, a folder, or a folder that it can exchange later. So nothing else in ringcomm and
ringrun opens such folders and files; the rules of this module and of :mod:`.files`:

* A path is opened component by component, by descriptors. A symbolic link is followed only if it belongs to
  this user or to the administrator, and inside an opened folder never.
* A folder for results (:func:`own_folder`) belongs to this user or to the administrator. A folder for code or
  keys (:func:`trusted_folder`) does so with every folder above it, and no other user may write any of them,
  unless the sticky bit keeps other users from exchanging its entries. ``sshd`` asks the same of its files.
* A folder in a shared place is removed with its content only if it has a file that ringcomm has made there
  (:func:`marked_folder`), and the place is one in which no other user can rename entries
  (:func:`temporary_folder`).
* A new file is made under a random name and renamed: an existing one is replaced, never followed or opened.
* Files to read are checked by their descriptors; FIFOs and devices are not waited for.

Standard library only, Python 3.8: ringrun sends both files to hosts with its agent.
"""

from __future__ import annotations

import errno
import os
import stat
import sys
from contextlib import contextmanager
from typing import Iterator, List, NamedTuple, Optional, Pattern, Tuple, Union

Path = Union[str, "os.PathLike[str]"]
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# Linux opens a folder without the right to list it, like a /home with mode 0711.
_ENTER = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_CLOEXEC
_LOOK = getattr(os, "O_PATH", 0) | os.O_NOFOLLOW | os.O_CLOEXEC
_MAX_LINKS = 40
_ACCESS_LIST = "system.posix_acl_access"
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def is_ours(facts: os.stat_result) -> bool:
    """Return whether a file belongs to this user, or to the administrator."""
    return facts.st_uid in (os.geteuid(), 0)


def others_write(facts: os.stat_result, opened: int = -1) -> bool:
    """Return whether another user may write a file or folder. ``opened``: its descriptor; -1: it is not open.

    Where a system makes a group for each user (``umask 002``), that of its files has no other member. Of a
    file with an access control list the group's part of the mode is the most that the list gives to anyone.
    """
    mode = facts.st_mode & OTHERS_WRITE
    own = mode == stat.S_IWGRP and facts.st_uid == os.geteuid() != 0
    return bool(mode) and not (own and _is_private(facts.st_gid, facts.st_uid) and not _has_list(opened))


def _has_list(opened: int) -> bool:
    """Return whether a file has an access control list besides its mode."""
    if sys.platform == "linux" and opened >= 0:
        try:
            # By its name in /proc: a descriptor of O_PATH itself has no attributes.
            return bool(os.getxattr(f"/proc/self/fd/{opened}", _ACCESS_LIST))
        except OSError:  # it has none
            return False
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


class NameInFolder(NamedTuple):
    """The result of a path: a name in an opened folder."""

    folder: int
    name: str
    # 0 for a link of ``/proc`` (like ``/dev/stdout``), which has no path as target; else ``O_NOFOLLOW``
    follow: int


def _parts(path: str) -> List[str]:
    return [part for part in reversed(path.split("/")) if part not in ("", ".")]


def _link(folder: int, name: str, shown: str) -> Optional[str]:
    """Return the target of a symbolic link; None if it is not a link, "" for a link of ``/proc``. Raises
    OSError if the link belongs to another user, or another user may have made it as a hard link.
    """
    try:
        opened = os.open(name, _LOOK, dir_fd=folder) if hasattr(os, "O_PATH") else -1
    except FileNotFoundError:
        return None
    try:
        facts = os.fstat(opened) if opened >= 0 else os.stat(name, dir_fd=folder, follow_symlinks=False)
        if not stat.S_ISLNK(facts.st_mode):
            return None
        around = os.fstat(folder)
        exchanged = facts.st_nlink > 1 and facts.st_uid != 0 and around.st_mode & OTHERS_WRITE
        if exchanged or not (is_ours(facts) or _is_systems(facts, around)):
            raise another_users(shown, facts)
        if facts.st_dev == _proc():
            return ""
        # By its descriptor where that is possible, so that it is the link that was looked at.
        return os.readlink("", dir_fd=opened) if opened >= 0 else os.readlink(name, dir_fd=folder)
    except FileNotFoundError:
        return None
    finally:
        if opened >= 0:
            os.close(opened)


def _proc() -> int:
    try:
        return os.stat("/proc").st_dev
    except OSError:
        return -1


def _is_systems(facts: os.stat_result, around: os.stat_result) -> bool:
    """Return whether the owner of ``/`` has a file in a folder that only that owner can write.

    A container without root shows that owner under another number, and other users of the host as well; these
    have no file in such a folder.
    """
    owner = os.stat("/").st_uid
    return facts.st_uid == around.st_uid == owner and not around.st_mode & OTHERS_WRITE


def _why_untrusted(opened: int, around: Optional[os.stat_result]) -> str:
    """Return why another user may exchange entries of a folder, or "". ``around``: of the folder above, if
    the folder is one on the way; None for the last one.
    """
    facts = os.fstat(opened)
    if not is_ours(facts) and (around is None or not _is_systems(facts, around)):
        return f"it belongs to another user (number {facts.st_uid})"
    if others_write(facts, opened) and (around is None or not facts.st_mode & stat.S_ISVTX):
        return f"other users may write it (mode {stat.S_IMODE(facts.st_mode):04o})"
    return ""


@contextmanager
def walk(
    path: Path, trusted: bool = False, mode: Optional[int] = None, follow_last: bool = True
) -> Iterator[NameInFolder]:
    """Yield the folder of a path's last component, opened component by component. ``trusted``: other users
    cannot exchange anything in any folder on the way; ``mode``: of folders that are made, None: they must
    exist; ``follow_last``: follow a link that the whole path names.
    """
    text = os.fspath(path)
    if trusted:
        text = os.path.join(os.getcwd(), text)
    left, links = _parts(text), 0
    here = os.open("/" if text.startswith("/") else ".", _ENTER)
    shown = "/" if text.startswith("/") else ""
    above = os.fstat(here)
    try:
        while True:
            name = left.pop() if left else "."
            is_place = name in (".", "..") or not (left or follow_last)
            target = None if is_place else _link(here, name, shown + name)
            if target:
                links += 1
                if links > _MAX_LINKS:
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), text)
                left += _parts(target)
                if target.startswith("/"):
                    os.close(here)
                    here = os.open("/", _ENTER)
                    shown, above = "/", os.fstat(here)
                continue
            follow = os.O_NOFOLLOW if target is None else 0
            if not left:
                yield NameInFolder(here, name, follow)
                return
            below = _entered(here, name, _ENTER | follow, mode)
            os.close(here)
            here, shown, facts = below, f"{shown}{name}/", os.fstat(below)
            why = _why_untrusted(here, above) if trusted else ""
            if why:
                raise PermissionError(errno.EPERM, f"as to the folder {shown[:-1]} above it: {why}", text)
            above = facts
    finally:
        os.close(here)


def _entered(folder: int, name: str, flags: int, mode: Optional[int]) -> int:
    """Return a descriptor of a folder in a folder, which is made if ``mode`` is given."""
    try:
        return os.open(name, flags, dir_fd=folder)
    except FileNotFoundError:
        if mode is None:
            raise
    try:
        os.mkdir(name, mode, dir_fd=folder)
    except FileExistsError:
        pass  # another process was faster
    return os.open(name, flags, dir_fd=folder)


# -- folders --------------------------------------------------------------------------------------


@contextmanager
def own_folder(path: Path, mode: Optional[int] = 0o777) -> Iterator[int]:
    """Yield a descriptor of a folder for results, which no other user can replace while it is open. ``mode``:
    for making it; None: it must exist. Raises OSError also if it, or a symbolic link on the way, belongs to
    another user.
    """
    with walk(path, mode=None if mode is None else 0o777) as place:
        descriptor = _entered(place.folder, place.name, _FOLDER & ~os.O_NOFOLLOW | place.follow, mode)
        try:
            facts = os.fstat(descriptor)
            if not is_ours(facts):
                raise another_users(path, facts)
            yield descriptor
        finally:
            os.close(descriptor)


@contextmanager
def trusted_folder(path: Path, make: bool = True) -> Iterator[int]:
    """Yield a descriptor of a folder for code or keys, which only this user and the administrator can change.
    ``make``: make it and those above it, with mode 0700. Raises OSError also if another user could change its
    entries; the text names the folder by which.
    """
    with walk(path, trusted=True, mode=0o700 if make else None) as place:
        descriptor = _entered(place.folder, place.name, _FOLDER, 0o700 if make else None)
        try:
            why = _why_untrusted(descriptor, None)
            if why:
                raise PermissionError(errno.EPERM, why, os.fspath(path))
            yield descriptor
        finally:
            os.close(descriptor)


@contextmanager
def temporary_folder(path: Path) -> Iterator[int]:
    """Yield a descriptor of a folder like ``/tmp``: other users may add to it, but not rename entries; raises
    OSError if another user could exchange this user's entries.
    """
    with walk(os.path.join(path, "name"), trusted=True, follow_last=False) as place:
        descriptor = _entered(place.folder, ".", _FOLDER, None)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def inner_folder(folder: int, path: str, mode: Optional[int] = 0o700) -> Iterator[int]:
    """Yield a descriptor of a folder below an opened one, at a relative path without ``..`` ("": the folder
    itself). Never follows symlinks. ``mode``: of folders that are made; None: they must exist. Raises OSError
    also if a component belongs to another user.
    """
    parts = path.split("/") if path else []
    if ".." in parts or path.startswith("/"):
        raise OSError(errno.EINVAL, "its path leaves the folder", path)
    here = os.dup(folder)
    os.set_inheritable(here, False)
    try:
        for part in parts:
            below = _entered(here, part or ".", _FOLDER, mode)
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
    """Make a folder with a random name that only this user can enter, and return the name. Other users may
    write the folder around it if that is sticky.
    """
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
