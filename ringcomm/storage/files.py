# ruff: noqa: PTH108, PTH116, PTH120  descriptors, and no pathlib in the agent
"""Files that hold code, keys, records or results: the rules are those of :mod:`ringcomm.storage.folders`."""

from __future__ import annotations

import errno
import os
import stat
from typing import Callable, Optional, Union

from ringcomm.storage.folders import (
    OTHERS_WRITE,
    Path,
    another_users,
    is_ours,
    make_folders,
    open_resolved,
    others_write,
    resolved,
)  # fmt: skip

_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC


class Exposed(PermissionError):
    """A file for secrets has a mode by which other users may read or change it; the text names the mode."""


class PartialFile:
    """A new file that gets its name when it is complete, replacing any file with that name. ``folder`` is a
    descriptor, which must stay open until the end; ``descriptor`` is for writing.
    """

    def __init__(self, folder: int, name: str, mode: int = 0o600) -> None:
        self._folder, self._name = folder, name
        self._partial = f".{name[:200]}.{os.urandom(8).hex()}"
        self.descriptor = os.open(self._partial, _CREATE, mode, dir_fd=folder)

    def publish(self) -> None:
        """Give the file its name. The descriptor stays open."""
        os.rename(self._partial, self._name, src_dir_fd=self._folder, dst_dir_fd=self._folder)

    def abandon(self) -> None:
        os.close(self.descriptor)
        os.unlink(self._partial, dir_fd=self._folder)


def new_file(folder: int, name: str, mode: int = 0o600, fill: Optional[Callable[[int], None]] = None) -> int:
    """Make a file and return its descriptor, for writing, which the caller closes; any file with that name is
    replaced. ``fill`` writes to it before it gets its name, so that it is complete from then on.
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
    """Write a file that only this user can read; see :func:`new_file`. With its name it is complete."""
    os.close(new_file(folder, name, mode, lambda descriptor: write_all(descriptor, data)))


def write_private(path: Path, data: bytes, replace: bool = True) -> None:
    """Write a file with a secret, which only this user can read, to a path that the user has named; the
    folder may belong to another user. With ``replace`` missing folders are made, and the file is complete as
    soon as it has its name; otherwise FileExistsError if there is one.
    """
    place = resolved(path, follow_last=False)
    if replace:
        above, name = os.path.split(place)
        make_folders(above, 0o700)
        folder = os.open(above, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            write_file(folder, name, data)
        finally:
            os.close(folder)
        return
    descriptor = os.open(place, _CREATE, 0o600)
    try:
        write_all(descriptor, data)
    except BaseException:
        os.unlink(place)  # no secret, and in the way of the next attempt
        raise
    finally:
        os.close(descriptor)


def open_named(path: Path) -> int:
    """Open a file that the user has named for writing, and empty it; the caller closes the descriptor. Raises
    OSError also for a FIFO (it would wait for a reader), if a link or file there belongs to another user, or
    if another user may have made it as a hard link to a file of this user.
    """
    descriptor = open_resolved(path, os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK)
    try:
        facts = os.fstat(descriptor)
        if stat.S_ISFIFO(facts.st_mode):
            raise OSError(errno.ESPIPE, "it is a FIFO, not a file", os.fspath(path))
        if stat.S_ISREG(facts.st_mode):
            shared = facts.st_nlink > 1 and os.stat(os.path.dirname(resolved(path))).st_mode & OTHERS_WRITE
            if shared or not is_ours(facts):
                raise another_users(path, facts)
            os.ftruncate(descriptor, 0)
    except OSError:
        os.close(descriptor)
        raise
    os.set_blocking(descriptor, True)
    return descriptor


def _regular(descriptor: int, path: Path) -> os.stat_result:
    """Return the status of an opened file; raises OSError, and closes it, unless it is a regular file."""
    facts = os.fstat(descriptor)
    if not stat.S_ISREG(facts.st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file", os.fspath(path))
    return facts


def _content(descriptor: int, limit_bytes: int, name: Path) -> bytes:
    data = bytearray()
    while len(data) <= limit_bytes:
        piece = os.read(descriptor, min(limit_bytes + 1 - len(data), 1 << 24))
        if not piece:
            return bytes(data)
        data += piece
    raise OSError(errno.EFBIG, f"it is longer than {limit_bytes:,} bytes", os.fspath(name))


def read_file(path: Path, limit_bytes: int) -> bytes:
    """Return the content of a regular file that the user has named, of any owner; OSError above the limit."""
    descriptor = os.open(path, _READ)
    _regular(descriptor, path)
    try:
        return _content(descriptor, limit_bytes, path)
    finally:
        os.close(descriptor)


def read_private(path: Path, limit_bytes: int) -> bytes:
    """Return the content of a file with a secret. It belongs to this user, and no other user may read or
    write it (Exposed); or to the administrator, and then a group may read it, which this user is in. OSError
    if it is longer than the limit, not a regular file, or another user's.
    """
    descriptor = open_resolved(path, _READ)
    facts = _regular(descriptor, path)
    try:
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
    """Open a regular file in a folder for reading, without following links; the caller closes it."""
    descriptor = os.open(name, _READ | os.O_NOFOLLOW, dir_fd=folder)
    _regular(descriptor, name)
    return descriptor


def read_at(folder: int, name: str, limit_bytes: int = 1 << 40) -> bytes:
    """Return the content of a file of code in a folder; OSError if another user could change it."""
    descriptor = open_at(folder, name)
    try:
        check_code(name, os.fstat(descriptor), descriptor)
        return _content(descriptor, limit_bytes, name)
    finally:
        os.close(descriptor)


def check_code(name: str, facts: os.stat_result, place: Union[int, str]) -> None:
    """Raise OSError if another user could change a file of code, which is at a path or descriptor."""
    if not is_ours(facts):
        raise another_users(name, facts)
    if others_write(facts, place):
        raise _exposed(name, facts)


def open_lock(folder: int, name: str) -> int:
    """Open or make this user's file for a lock, without following links; the caller closes the descriptor."""
    flags = os.O_CREAT | os.O_RDWR | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(name, flags, 0o600, dir_fd=folder)
    facts = _regular(descriptor, name)
    if not is_ours(facts):
        os.close(descriptor)
        raise another_users(name, facts)
    return descriptor


def open_standard_descriptors() -> None:
    """Open closed ones of the descriptors 0 to 2 on /dev/null: the next opened files would get them."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest that is free
