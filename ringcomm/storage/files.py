"""Files that hold code, keys, records or results: the rules are those of :mod:`ringcomm.storage.folders`."""

from __future__ import annotations

import errno
import os
import stat
from typing import Callable, List, Optional

from ringcomm.storage.folders import OTHERS_WRITE, Path, another_users, is_ours, others_write, walk

_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC


class Exposed(PermissionError):
    """A file for secrets has a mode by which other users may read or change it; the text names the mode."""


class PartialFile:
    """A new file that gets its name when it is complete, in place of what stands there by then.

    Args:
        folder: descriptor of its directory, from :mod:`.folders`; it must stay open until the end.
        name: without a directory.
        mode: of the file.

    Attributes:
        descriptor: to write to.

    Raises:
        OSError: it cannot be made.
    """

    def __init__(self, folder: int, name: str, mode: int = 0o600) -> None:
        self._folder, self._name = folder, name
        self._partial = f".{name[:200]}.{os.urandom(8).hex()}"
        self.descriptor = os.open(self._partial, _CREATE, mode, dir_fd=folder)

    def publish(self) -> None:
        """Give the file its name. The descriptor stays open."""
        os.rename(self._partial, self._name, src_dir_fd=self._folder, dst_dir_fd=self._folder)

    def abandon(self) -> None:
        """Close and remove the file."""
        os.close(self.descriptor)
        os.unlink(self._partial, dir_fd=self._folder)


def new_file(folder: int, name: str, mode: int = 0o600, fill: Optional[Callable[[int], None]] = None) -> int:
    """A new file, open for writing; what stood under its name before is replaced, whatever it was.

    Args:
        folder: descriptor of its directory, from :func:`own_folder` or another function of this module.
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


def write_all(descriptor: int, data: bytes) -> None:
    """Write all bytes to a descriptor."""
    left = memoryview(data)
    while left:
        left = left[os.write(descriptor, left) :]


def write_file(folder: int, name: str, data: bytes, mode: int = 0o600) -> None:
    """Write a file that only this user can read; it is complete as soon as it is there.

    Args:
        folder, name, mode: see :func:`new_file`.
        data: its content.

    Raises:
        OSError: it cannot be written.
    """
    os.close(new_file(folder, name, mode, lambda descriptor: write_all(descriptor, data)))


def write_private(path: Path, data: bytes, replace: bool = True, make_folders: bool = False) -> None:
    """Write a file with a secret to a path that the user has named; only this user can read it.

    The folder may belong to another user: that user can remove the file then, but not read it.

    Args:
        path: the path.
        data: its content.
        replace: whether a file that is there already is replaced. It is complete as soon as it is there then.
        make_folders: whether to make its folders, with mode 0700, where there are none.

    Raises:
        FileExistsError: it is there already, and not to be replaced.
        OSError: it cannot be written, or a link on the way belongs to another user.
    """
    with walk(path, mode=0o700 if make_folders else None, follow_last=False) as place:
        if replace:
            write_file(place.folder, place.name, data)
            return
        descriptor = os.open(place.name, _CREATE, 0o600, dir_fd=place.folder)
        try:
            write_all(descriptor, data)
        except BaseException:
            os.unlink(place.name, dir_fd=place.folder)  # no secret, and in the way of the next attempt
            raise
        finally:
            os.close(descriptor)


def remove_file(path: Path) -> None:
    """Remove a file that this process has made, if it is still there.

    Raises:
        OSError: it cannot be removed.
    """
    try:
        with walk(path, follow_last=False) as place:
            os.unlink(place.name, dir_fd=place.folder)
    except FileNotFoundError:
        pass  # the job's other processes may remove it, too


def open_named(path: Path) -> int:
    """Open a file that the user has named for writing, from its start; it is emptied.

    The user's own symbolic links and devices are followed.

    Returns:
        The descriptor, for the caller to close.

    Raises:
        OSError: it cannot be written, it is a FIFO, a link or file there belongs to another user, or another
            user may have made it as a hard link to a file of this user.
    """
    # Opening a FIFO that is not read would wait for a reader.
    flags = os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC
    with walk(path) as place:
        descriptor = os.open(place.name, flags | place.follow, 0o666, dir_fd=place.folder)
        try:
            facts = os.fstat(descriptor)
            if stat.S_ISFIFO(facts.st_mode):
                raise OSError(errno.ESPIPE, "it is a FIFO, not a file", os.fspath(path))
            if stat.S_ISREG(facts.st_mode):
                shared = os.fstat(place.folder).st_mode & OTHERS_WRITE
                if not is_ours(facts) or (facts.st_nlink > 1 and shared):
                    raise another_users(path, facts)
                os.ftruncate(descriptor, 0)
        except OSError:
            os.close(descriptor)
            raise
    os.set_blocking(descriptor, True)
    return descriptor


def _regular(descriptor: int, path: Path) -> os.stat_result:
    """The facts of what was opened.

    Raises:
        OSError: it is no regular file.
    """
    facts = os.fstat(descriptor)
    if not stat.S_ISREG(facts.st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file", os.fspath(path))
    return facts


def _content(descriptor: int, limit_bytes: int, name: str | os.PathLike[str]) -> bytes:
    pieces: List[bytes] = []
    left = limit_bytes + 1
    while left > 0:
        piece = os.read(descriptor, min(left, 1 << 24))
        if not piece:
            return b"".join(pieces)
        pieces.append(piece)
        left -= len(piece)
    raise OSError(errno.EFBIG, f"it is longer than {limit_bytes:,} bytes", os.fspath(name))


def read_file(path: Path, limit_bytes: int) -> bytes:
    """Return what a file holds that the user has named; its owner does not matter.

    Raises:
        OSError: it cannot be read, is longer, or it is a FIFO, a device or a directory.
    """
    descriptor = os.open(path, _READ)
    try:
        _regular(descriptor, path)
        return _content(descriptor, limit_bytes, path)
    finally:
        os.close(descriptor)


def read_private(path: Path, limit_bytes: int) -> bytes:
    """Return what a file with a secret holds.

    It belongs to this user, and no other user may read or write it; or to the administrator, and then a
    group may read it (that this user is in, or it could not be read).

    Raises:
        Exposed: its mode lets other users read or write it.
        OSError: it cannot be read, is longer than ``limit_bytes``, is no regular file, or belongs to another
            user, or a link to it does.
    """
    with walk(path) as place:
        descriptor = os.open(place.name, _READ | place.follow, dir_fd=place.folder)
    try:
        facts = _regular(descriptor, path)
        if not is_ours(facts):
            raise another_users(path, facts)
        if facts.st_mode & (0o077 if facts.st_uid == os.geteuid() else 0o037):
            raise _exposed(path, facts)
        return _content(descriptor, limit_bytes, path)
    finally:
        os.close(descriptor)


def _exposed(path: Path, facts: os.stat_result) -> Exposed:
    return Exposed(errno.EPERM, f"its mode is {stat.S_IMODE(facts.st_mode):04o}", os.fspath(path))


def open_at(folder: int, name: str) -> int:
    """Open a regular file in a folder for reading; no link is followed.

    Args:
        folder: descriptor of the folder.
        name: without a directory.

    Returns:
        The descriptor, for the caller to close.

    Raises:
        OSError: it cannot be read, or is no regular file.
    """
    descriptor = os.open(name, _READ | os.O_NOFOLLOW, dir_fd=folder)
    try:
        _regular(descriptor, name)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def read_at(folder: int, name: str, limit_bytes: int = 1 << 40) -> bytes:
    """Return what a file of code in a folder holds; no link is followed.

    Args:
        folder, name: see :func:`open_at`.
        limit_bytes: of a longer file nothing is returned.

    Raises:
        OSError: it cannot be read, is no regular file, or another user could change it.
    """
    descriptor = open_at(folder, name)
    try:
        check_code(name, os.fstat(descriptor), descriptor)
        return _content(descriptor, limit_bytes, name)
    finally:
        os.close(descriptor)


def check_code(name: str, facts: os.stat_result, opened: int = -1) -> None:
    """Refuse a file of code that another user could change.

    Args:
        name: of the file, for messages.
        facts: of it.
        opened: its descriptor; -1: it is not open.

    Raises:
        OSError: it belongs to another user, or other users may write it.
    """
    if not is_ours(facts):
        raise another_users(name, facts)
    if others_write(facts, opened):
        raise _exposed(name, facts)


def open_lock(folder: int, name: str) -> int:
    """Open a file of this user for a lock; it is made where there is none, and no link is followed.

    Args:
        folder, name: see :func:`open_at`.

    Returns:
        The descriptor, for the caller to close.

    Raises:
        OSError: it cannot be opened, is no regular file, or belongs to another user.
    """
    flags = os.O_CREAT | os.O_RDWR | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(name, flags, 0o600, dir_fd=folder)
    try:
        facts = _regular(descriptor, name)
        if not is_ours(facts):
            raise another_users(name, facts)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def open_standard_descriptors() -> None:
    """Open closed ones of the descriptors 0 to 2 on /dev/null: what is opened next would get them."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest that is free
