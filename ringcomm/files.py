"""Files and directories that other users of the machine could prepare: keys, records, results, caches.

Another user may have put a symbolic link, a FIFO or a directory of its own in the place of what is about
to be written or read. So a file is made under a fresh name, in a directory that was opened and looked at
before, and renamed: what stood there is replaced, never followed, opened or waited for. What is read is
looked at through its descriptor, so nothing can take its place between the look and the use.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Callable, Iterator, Optional, Union

_OTHERS = 0o077
_OTHERS_WRITE = 0o022
_MOST_LINKS = 8
_SYSTEMS = ("/proc/", "/dev/fd/")
"""Here links lead to what has no name, and only the system makes them."""
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def is_ours(facts: os.stat_result) -> bool:
    """Whether a file belongs to this user, or to the administrator."""
    return facts.st_uid in (os.geteuid(), 0)


def why_untrusted(place: Union[str, Path]) -> str:
    """Why a directory is not trusted with code or records; "" if it is.

    As sshd's ``StrictModes``: it is this user's own, no other user may write to it, and none may replace a
    directory above it, which belong to this user or the administrator (the owner of ``/``).

    Args:
        place: an existing path.

    Raises:
        OSError: it does not exist, or cannot be looked at.
    """
    path = Path(place).absolute()
    facts = path.lstat()
    if not stat.S_ISDIR(facts.st_mode):
        return "it is not a directory"
    if facts.st_uid != os.geteuid():
        return "it belongs to another user"
    if facts.st_mode & _OTHERS_WRITE:
        return "other users may write it"
    trusted = (os.geteuid(), 0, Path("/").stat().st_uid)
    for above in {*path.parents, *path.resolve().parents}:
        facts = above.lstat()
        if facts.st_uid not in trusted:
            return f"{above} belongs to another user"
        if facts.st_mode & _OTHERS_WRITE and not stat.S_ISLNK(facts.st_mode) | facts.st_mode & stat.S_ISVTX:
            return f"other users may write to {above}"
    return ""


def _another_users(path: Union[str, Path]) -> OSError:
    return PermissionError(errno.EPERM, "it belongs to another user", str(path))


@contextmanager
def own_folder(path: Path, mode: int = 0o777) -> Iterator[int]:
    """A descriptor of a directory that no other user can replace, made with this mode where there is none.

    Raises:
        OSError: it cannot be made or opened, or it, or the symbolic link to it, belongs to another user.
    """
    path.mkdir(mode=mode, parents=True, exist_ok=True)
    if not is_ours(path.lstat()):
        raise _another_users(path)
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if not is_ours(os.fstat(descriptor)):
            raise _another_users(path)
        yield descriptor
    finally:
        os.close(descriptor)


def inner_folder(folder: int, name: str, mode: int = 0o777) -> int:
    """A descriptor of a directory in another one, made where there is none. No link is followed.

    Args:
        folder: descriptor of the other directory.
        name: one component of a path.
        mode: with which it is made.

    Returns:
        The descriptor, for the caller to close.

    Raises:
        OSError: it cannot be made or opened, is a link or a file, or belongs to another user.
    """
    with suppress(FileExistsError):
        os.mkdir(name, mode, dir_fd=folder)
    descriptor = os.open(name, _DIRECTORY, dir_fd=folder)
    if is_ours(os.fstat(descriptor)):
        return descriptor
    os.close(descriptor)
    raise _another_users(name)


def new_file(folder: int, name: str, mode: int = 0o600, fill: Optional[Callable[[int], None]] = None) -> int:
    """A new file, open for writing; what stood under its name before is replaced, whatever it was.

    Args:
        folder: descriptor of its directory, from :func:`own_folder`.
        name: without a directory.
        fill: writes to the descriptor before the file gets its name, so that it is complete from then on.

    Returns:
        The descriptor, for the caller to close.

    Raises:
        OSError: it cannot be made, or not be written.
    """
    file = PartialFile(folder, name, mode)
    try:
        if fill is not None:
            fill(file.descriptor)
        file.publish()
    except BaseException:
        file.abandon()
        raise
    return file.descriptor


class PartialFile:
    """A new file that gets its name when it is complete, in place of what stands there by then.

    Args:
        folder: descriptor of its directory, which must stay open until the end.
        name: without a directory.
        mode: of the file.

    Attributes:
        descriptor: to write to.

    Raises:
        OSError: it cannot be made.
    """

    def __init__(self, folder: int, name: str, mode: int = 0o600) -> None:
        self._folder, self._name = folder, name
        self._partial = f".{os.urandom(8).hex()}.partial"
        self.descriptor = os.open(self._partial, _CREATE, mode, dir_fd=folder)

    def publish(self) -> None:
        """Give the file its name. The descriptor stays open."""
        os.rename(self._partial, self._name, src_dir_fd=self._folder, dst_dir_fd=self._folder)

    def abandon(self) -> None:
        """Close and remove the file."""
        os.close(self.descriptor)
        os.unlink(self._partial, dir_fd=self._folder)


def write_file(folder: int, name: str, data: bytes) -> None:
    """Write a file that only this user can read; it is complete as soon as it is there.

    Args:
        folder, name: see :func:`new_file`.

    Raises:
        OSError: it cannot be written.
    """

    def fill(descriptor: int) -> None:
        left = memoryview(data)
        while left:
            left = left[os.write(descriptor, left) :]

    os.close(new_file(folder, name, fill=fill))


def _shared(path: Union[str, Path]) -> bool:
    """Whether other users may make files in the directory of this one."""
    return bool(Path(path).parent.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH))


def open_named(path: Union[str, Path]) -> int:
    """Open a file that the user has named for writing, from its start; it is emptied.

    The user's own symbolic links, the administrator's, and devices are followed.

    Returns:
        The descriptor, for the caller to close.

    Raises:
        OSError: it cannot be written, it is a FIFO, a link or file there belongs to another user, or another
            user may have made it as a hard link to a file of this user.
    """
    descriptor = _open_through_own_links(str(path), _MOST_LINKS)
    try:
        facts = os.fstat(descriptor)
        if stat.S_ISFIFO(facts.st_mode):
            raise OSError(errno.ESPIPE, "it is a FIFO, not a file", str(path))
        if stat.S_ISREG(facts.st_mode):
            if not is_ours(facts) or (facts.st_nlink > 1 and _shared(path)):
                raise _another_users(path)
            os.ftruncate(descriptor, 0)
    except OSError:
        os.close(descriptor)
        raise
    os.set_blocking(descriptor, True)
    return descriptor


def _open_through_own_links(path: str, links: int) -> int:
    # Opening a FIFO that is not read would wait for a reader.
    flags = os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC
    if path.startswith(_SYSTEMS):
        return os.open(path, flags, 0o666)
    try:
        return os.open(path, flags | os.O_NOFOLLOW, 0o666)
    except OSError as problem:
        if problem.errno not in (errno.ELOOP, errno.EMLINK) or not links:
            raise
    return _open_through_own_links(str(Path(path).parent / _own_link(path)), links - 1)


def _own_link(path: str) -> str:
    """Where a symbolic link of this user or the administrator points to, read from the link looked at."""
    if not hasattr(os, "O_PATH"):  # not Linux
        before, target, after = os.lstat(path), os.readlink(path), os.lstat(path)
        if not is_ours(before) or (before.st_dev, before.st_ino) != (after.st_dev, after.st_ino):
            raise _another_users(path)
        return target
    link = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if not is_ours(os.fstat(link)):
            raise _another_users(path)
        return os.readlink("", dir_fd=link)
    finally:
        os.close(link)


def read_private(path: Union[str, Path], limit_bytes: int, follow: bool = True) -> bytes:
    """What a file with a key holds, up to this length.

    Args:
        path: of the file.
        limit_bytes: what is longer is cut.
        follow: whether it may be a symbolic link.

    Raises:
        NotPrivateError: it belongs to another user than this one and the administrator, or others may read or
            write it.
        OSError: it cannot be read, or it is a FIFO, a device or a directory.
    """
    flags = 0 if follow else os.O_NOFOLLOW
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | flags)
    with open(descriptor, "rb") as file:
        facts = os.fstat(descriptor)
        if not stat.S_ISREG(facts.st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
        if not is_ours(facts) or facts.st_mode & _OTHERS:
            raise NotPrivateError(facts)
        return file.read(limit_bytes)


class NotPrivateError(Exception):
    """A file that other users may read or write, or that is another user's.

    Attributes:
        owner: its user's number.
        mode: its permissions.
        is_own: whether it belongs to this user.
    """

    def __init__(self, facts: os.stat_result) -> None:
        self.owner, self.mode = facts.st_uid, stat.S_IMODE(facts.st_mode)
        self.is_own = facts.st_uid == os.geteuid()
        super().__init__(f"it belongs to user {self.owner} and has mode {self.mode:04o}")


def read_file(path: Union[str, Path], limit_bytes: int) -> bytes:
    """What a file holds, up to this length. Other things than regular files are not read.

    Raises:
        OSError: it cannot be read, or it is a FIFO, a device or a directory.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
        with open(descriptor, "rb", closefd=False) as file:
            return file.read(limit_bytes)
    finally:
        os.close(descriptor)
