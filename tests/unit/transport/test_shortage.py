"""What a process lacks for its links: the limit and the remedy, by error."""

from __future__ import annotations

import errno

import pytest

from ringcomm.transport.connect import shortage_error


@pytest.mark.parametrize(
    ("problem", "words"),
    [
        (OSError(errno.EMFILE, "Too many open files"), ["ulimit -n", "open files there"]),
        (OSError(errno.ENFILE, "Too many open files in system"), ["open files in system"]),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), ["memory is used up", "ulimit -v"]),
        (OSError(errno.ENOSPC, "No space left", "/dev/shm/x"), ["/dev/shm/x: No space left", "--shm-size"]),
        (MemoryError(), ["memory is used up"]),
        (RuntimeError("can't start new thread"), ["ulimit -u"]),
    ],
)
def test_the_limit_and_the_remedy_are_named(problem, words) -> None:
    error = shortage_error(problem, 1, "desk")
    assert error is not None and all(word in str(error) for word in words)
    assert str(error).startswith("Rank 1 on desk cannot connect to the others: ")
