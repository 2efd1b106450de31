"""Writing files where other users of the machine may write, too (``/tmp``, a shared directory).

Another user may have put a symbolic link, a FIFO or a directory of its own in the place of what is about
to be written. So a file is made under a fresh name, in a directory that was opened and looked at before, and
renamed: what stood there is replaced, never followed, opened or waited for.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import contextmanager
from pathlib import Path
from typing import Callable, Iterator, Optional, Union

_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def is_ours(facts: os.stat_result) -> bool:
    """Whether a file belongs to this user, or to the administrator."""
    return facts.st_uid in (os.geteuid(), 0)


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
    partial = f".{name}.{os.urandom(8).hex()}"
    descriptor = os.open(partial, _CREATE, mode, dir_fd=folder)
    try:
        if fill is not None:
            fill(descriptor)
        os.rename(partial, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        os.close(descriptor)
        os.unlink(partial, dir_fd=folder)
        raise
    return descriptor


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

    The user's own symbolic links and devices are followed.

    Returns:
        The descriptor, for the caller to close.

    Raises:
        OSError: it cannot be written, it is a FIFO, a link or file there belongs to another user, or another
            user may have made it as a hard link to a file of this user.
    """
    # Opening a FIFO that is not read would wait for a reader.
    flags = os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW, 0o666)
    except OSError as problem:
        if problem.errno not in (errno.ELOOP, errno.EMLINK):
            raise
        # Looked at after the link was found, so no other user can put one there in between.
        if not is_ours(os.lstat(path)):
            raise _another_users(path) from None
        descriptor = os.open(path, flags, 0o666)
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


def read_file(path: Union[str, Path], limit_bytes: int) -> bytes:
    """What a file holds, up to this length. What is no file is not waited for.

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
