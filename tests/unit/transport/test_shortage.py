"""What a process lacks for its links: the limit and the remedy, by error."""

from __future__ import annotations

import errno
import os
import resource
from pathlib import Path
from typing import Iterator

import pytest

from ringcomm.transport import connect
from ringcomm.transport.connect import shortage_error


@pytest.mark.parametrize(
    ("problem", "words"),
    [
        (OSError(errno.EMFILE, "Too many open files"), ["ulimit -n", "open files there"]),
        (OSError(errno.ENFILE, "Too many open files in system"), ["fs.file-max"]),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), ["memory is used up", "ulimit -v"]),
        (OSError(errno.ENOSPC, "No space left", "/dev/shm/x"), ["/dev/shm/x: No space left", "--shm-size"]),
        (OSError(errno.ENOBUFS, "No buffer space available"), ["memory of its network"]),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), ["quota"]),
        (MemoryError(), ["memory is used up"]),
        (RuntimeError("can't start new thread"), ["ulimit -u"]),
    ],
)
def test_the_limit_and_the_remedy_are_named(problem, words) -> None:
    error = shortage_error(problem, 1, "desk")
    assert error is not None and all(word in str(error) for word in words)
    assert str(error).startswith("Rank 1 on desk cannot connect to the others: ")


@pytest.fixture
def few() -> Iterator[None]:
    """So few descriptors can be opened that there are enough for links to one peer, not to nine."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    probe = os.open(os.devnull, os.O_RDONLY)
    os.close(probe)
    beyond = sum(int(path.name) > probe for path in Path("/proc/self/fd").iterdir())
    resource.setrlimit(resource.RLIMIT_NOFILE, (probe + 40 + beyond, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_some_descriptors_are_kept_to_report_that_there_are_too_few(
    few: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connect, "_spare_users", set())  # other tests of this process may have left some
    monkeypatch.setattr(connect, "_spare", [])
    user = object()
    connect.keep_spare(user)
    connect.check_descriptors(1)
    with pytest.raises(OSError, match="Too many open files"):
        connect.check_descriptors(9)
    assert not connect._spare, "closed, so that the report has them"
    connect.keep_spare(user)
    assert connect._spare
    connect.drop_spare(user)
    assert not connect._spare
